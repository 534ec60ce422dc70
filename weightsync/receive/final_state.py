"""Brings a full checkpoint to the state that the later deltas lead to, in the receiver's copy.

Changes and hashes; staging.py compares the digests.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

from weightsync.elements.bits import bits_from_bytes
from weightsync.encoding.delta import Delta, checked_apply
from weightsync.layout.slices import CutDelta
from weightsync.reading.memory_room import MemoryRoom
from weightsync.receive.full_state import StoredEntry
from weightsync.receive.held_parts import EntryPart
from weightsync.receive.staged import delta_bytes

_HASHED_BYTES = 1 << 20
"""Memory that hashing takes, however large the entry."""


def advance(
    stored: Mapping[str, StoredEntry],
    deltas: Mapping[str, Sequence[Delta]],
    parts: Mapping[str, EntryPart],
    pool: Executor,
    room: MemoryRoom,
) -> None:
    """Apply every entry's deltas to the held part of it; raises Corrupt."""

    def size_of(entry: str) -> int:
        largest = max(delta_bytes(delta) for delta in deltas[entry])
        return 2 * stored[entry].spec.size_bytes + largest

    def work(entry: str) -> None:
        _advance(stored[entry], deltas[entry], parts[entry])

    for _ in room.spread(pool, work, list(deltas), size_of):
        pass


def entry_digests(
    stored: Mapping[str, StoredEntry],
    parts: Mapping[str, EntryPart],
    pool: Executor,
    room: MemoryRoom,
) -> dict[str, str]:
    """xxh3-128 of every entry that is held whole."""
    whole = [entry for entry in sorted(stored) if parts[entry].within.is_whole]

    def digest(entry: str) -> str:
        return stored[entry].place.digest(stored[entry].whole)

    found = room.spread(
        pool, digest, whole, lambda entry: min(stored[entry].spec.size_bytes, _HASHED_BYTES)
    )
    return dict(zip(whole, found, strict=True))


def _advance(stored: StoredEntry, deltas: Sequence[Delta], part: EntryPart) -> None:
    around = stored.around(part.within)
    data = stored.place.read(around)
    if part.within.is_whole:
        bits = bits_from_bytes(data, stored.spec)
        for delta in deltas:
            checked_apply(delta, bits)
    else:
        box = stored.view(data, part.within)
        bits = box.reshape(-1).copy()
        for delta in deltas:
            checked_apply(CutDelta(part.within, delta), bits)
        box[...] = bits.reshape(box.shape)
    stored.place.write(around.start, data)
