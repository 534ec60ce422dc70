"""Selects cached objects to evict for a new one: a pure rule.

The least recently used go first; objects in use never go.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    key: str
    size_bytes: int
    used_at: float
    """Any order of use: larger is later."""
    in_use: bool


def evicted(
    entries: Iterable[CacheEntry], *, needed_bytes: int, capacity_bytes: int
) -> tuple[str, ...] | None:
    """Keys to drop, oldest first, so that `needed_bytes` more fit; None where they cannot."""
    held = sorted(entries, key=lambda entry: (entry.used_at, entry.key))
    over = sum(entry.size_bytes for entry in held) + needed_bytes - capacity_bytes
    doomed: list[str] = []
    for entry in held:
        if over <= 0:
            break
        if not entry.in_use:
            doomed.append(entry.key)
            over -= entry.size_bytes
    return tuple(doomed) if over <= 0 else None
