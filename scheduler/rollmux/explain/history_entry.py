"""One event of a job's history as text."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from harvester.contracts.ids import NodeId


class EventKind(StrEnum):
    JOURNAL = "journal"
    """The journal begins here, or lacks decisions."""
    CONTROL = "control"
    """The control was away."""
    SUBMITTED = "submitted"
    QUEUED = "queued"
    PLACED = "placed"
    MOVE_REQUESTED = "move_requested"
    MOVE_ORDERED = "move_ordered"
    ARRIVED = "arrived"
    RESTARTED = "restarted"
    CLOSED = "closed"
    GRANTED = "granted"
    NARROWED = "narrowed"
    FREED = "freed"
    UNLOADED = "unloaded"
    WIDENED = "widened"
    WARNED = "warned"
    REVOKED = "revoked"
    DONE = "done"
    LOST = "lost"
    """A permit ended and its phase is not done."""


SUMMARISED = frozenset(
    {
        EventKind.GRANTED,
        EventKind.NARROWED,
        EventKind.FREED,
        EventKind.UNLOADED,
        EventKind.WIDENED,
        EventKind.WARNED,
        EventKind.DONE,
    }
)
"""Routine entries about permits: too many to be listed one by one."""


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    kind: EventKind
    text: str


def seconds(value_s: float) -> str:
    return f"{value_s:.1f} s" if value_s < 100 else f"{value_s:.0f} s"


def nodes_in_words(
    nodes: Iterable[NodeId], accelerators: Mapping[NodeId, tuple[int, ...]] | None = None
) -> str:
    """`accelerators` of the nodes that are meant in part."""
    parts = accelerators or {}
    return " ".join(f"{node}{_numbers(parts[node])}" if node in parts else node for node in nodes)


def _numbers(numbers: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, numbers))}]"
