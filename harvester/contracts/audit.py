"""Audit events of an agent: who got which slot and why it ended, and who changed what.

One JSON line each, in `<state_dir>/audit.jsonl` and its older files, and in the agent's log. They
are few and kept for weeks; the journal has every beat, of the last hours.
"""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from harvester.contracts.errors import UNDECODABLE

SCHEMA = 1
MAX_LINE_BYTES = 64 << 10


class AuditKind(StrEnum):
    AGENT_STARTED = "agent_started"
    AGENT_STOPPED = "agent_stopped"
    AUDIT_RESUMED = "audit_resumed"
    """The audit is written again; the `omitted` events before this one are lost."""
    CONFIG_RELOADED = "config_reloaded"
    CONFIG_REFUSED = "config_refused"
    MODE_CHANGED = "mode_changed"
    SLOT_OPENED = "slot_opened"
    SLOT_CLOSED = "slot_closed"
    KILL_SWITCH = "kill_switch"
    STOP_PLACED = "stop_placed"
    STOP_LIFTED = "stop_lifted"
    LEASE_GRANTED = "lease_granted"
    LEASE_REFUSED = "lease_refused"
    RENEWAL_REFUSED = "renewal_refused"
    REFUSALS_OMITTED = "refusals_omitted"
    LEASE_ENDED = "lease_ended"
    SLOT_STATE = "slot_state"
    QUARANTINED = "quarantined"
    QUARANTINE_RELEASED = "quarantine_released"
    GUEST_STARTED = "guest_started"
    GUEST_ENDED = "guest_ended"
    GUEST_KILLED = "guest_killed"


class AuditEvent(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"from_state": "from", "to_state": "to"},
):
    """Fields without meaning for an event are left out of its line."""

    schema: int
    time: str
    """RFC 3339, UTC."""
    t_s: float
    """The agent's monotonic clock, in s; comparable with the journal's."""
    node: str
    event: str
    """An `AuditKind`; a later schema may have more."""
    slot: str = ""
    lease: str = ""
    """Public name of the lease, never its id."""
    epoch: int | None = None
    tenant: str = ""
    job: str = ""
    who: str = ""
    """Identity of the caller or operator, as far as it is known; "agent" for its own decisions."""
    from_state: str = ""
    to_state: str = ""
    reason: str = ""
    changes: tuple[str, ...] = ()
    """Changed fields of the configuration."""
    omitted: int = 0
    """Number of events of this kind left out since the last: too many, or a full disk."""


def audit_files(path: Path) -> list[Path]:
    """The existing files of an audit, oldest first; `path` is the current one."""
    older = sorted(path.parent.glob(f"{path.stem}.{'[0-9]' * 6}{path.suffix}"))
    return [*older, *([path] if path.exists() else [])]


def read_audit(path: Path) -> Iterator[AuditEvent | str]:
    """The events of one file, and a message for each line that cannot be decoded, as a torn one."""
    decoder = msgspec.json.Decoder(AuditEvent)
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if not raw.strip():
                continue
            try:
                yield decoder.decode(raw)
            except UNDECODABLE as error:
                yield f"{path.name} line {number} is skipped: {error}"
