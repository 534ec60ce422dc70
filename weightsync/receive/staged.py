"""Result of a staging, a local and checked copy of an update, and how a target is written from it.

No publisher gives a digest of a part of a tensor. For a holder's parts, the digest is made from a
copy with the known changes applied, and compared with the bits read back; the copy's base is
compared with the previously read bits, before the first byte changes.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np

from harvester.contracts.errors import ConfigError, Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.elements import state_hash
from weightsync.elements.batches import spread
from weightsync.elements.bits import UNSIGNED_NUMPY, Bits, Layout, difference
from weightsync.elements.state_hash import digest_of, digests_of
from weightsync.encoding.delta import Delta, apply_all
from weightsync.layout.slices import Slicing
from weightsync.reading.memory_budget import MemoryBudget
from weightsync.receive.full_state import FullState
from weightsync.receive.held_parts import HeldParts, Selection, bounds, held_parts
from weightsync.receive.plan import PullPlan
from weightsync.receive.stored_delta import delta_bytes
from weightsync.receive.target import ApplyTarget

PARTS_CHANGED = "this holder's parts are not those that were written before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Hashes by which the final state is verified."""

    state_hash: str | None
    """The version's state hash; None in a foreign store."""
    checksums: Mapping[str, tuple[str, str]]
    """Algorithm and checksum per tensor that a foreign store changed; else empty."""
    slicing: Slicing = field(default_factory=Slicing)
    digests: Mapping[str, str] | None = None
    """Digests of held entries, for a holder of parts; the state hash covers all entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A state that was written and verified."""

    version: WeightVersion
    state_hash: str
    bytes_read: int
    from_full: bool
    seconds: float
    """Duration of the apply alone: writing and verifying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An update that was read into memory or a local file and checked; `write_state` applies it."""

    plan: PullPlan
    layout: Layout
    """Layout of the holder's tensors."""
    full: FullState | None
    """The verified final state, if the plan starts from a full checkpoint."""
    deltas: Mapping[str, tuple[Delta, ...]]
    """Deltas of each tensor in order of application; empty if `full` holds the final state."""
    expected: Expected
    bytes_read: int
    parts: HeldParts
    table: Mapping[str, str]
    """Digest of every entry of the final state: published, or computed for a full checkpoint that
    was read whole."""
    sums: Mapping[str, int]
    """Published sum of every entry of the final state (box_sums.py), as far as there are any."""
    partial_digests: Mapping[str, str]
    """Digests of the holder's tensors that are parts, as this receiver wrote them last: the deltas
    build on these bits. Empty for a full checkpoint."""
    partial_sums: Mapping[str, int]
    """Sums of the same tensors, as far as they were found."""
    budget: MemoryBudget
    stamp: str = ""
    """`Store.stamp` of the version, no newer than what was staged."""
    tried: bool = False
    """Whether a foreign chain was found to lead to its checksums, on copies of the target."""

    @property
    def changed(self) -> tuple[str, ...]:
        return tuple(sorted(self.deltas if self.full is None else self.full))

    def narrowed(self, selection: Selection) -> "Staged":
        """A full checkpoint that was staged whole, reduced to a holder's parts; or ValueError."""
        if self.full is None or not self.parts.is_everything:
            raise ValueError("only a full checkpoint that was staged whole can be narrowed")
        parts = held_parts(self.parts.whole, self.parts.slicing, selection)
        return replace(
            self,
            layout=parts.layout(),
            full=self.full.held(parts.layout(), parts.by_tensor()),
            parts=parts,
            expected=expected_of_parts(self.expected.state_hash, parts, self.table),
        )

    def applied(self, state_hash: str, *, seconds: float) -> Applied:
        return Applied(
            version=self.plan.target,
            state_hash=state_hash,
            bytes_read=self.bytes_read,
            from_full=self.full is not None,
            seconds=seconds,
        )

    def lent_bytes(self, name: str) -> int:
        """Approximate memory for writing a tensor, beside the target, in bytes."""
        size, box = self.layout[name].size_bytes, self.parts.boxes[name]
        if self.full is not None:
            # The bytes between the columns of a box are read too.
            around = bounds(box, self.layout[name].width_bytes)
            return size if box.is_whole else size + around.size_bytes
        return size + max((delta_bytes(delta) for delta in self.deltas[name]), default=0)


def expected_of_parts(
    state_hash: str | None, parts: HeldParts, table: Mapping[str, str]
) -> Expected:
    """Expected digests of tensors held whole; a tensor held in part has no published digest."""
    partial = parts.partial
    digests = {
        entry: table[entry]
        for entry, held in parts.parts.items()
        if any(part.of.tensor not in partial for part in held)
    }
    return Expected(
        state_hash=state_hash, checksums={}, slicing=parts.uncut_slicing(), digests=digests
    )


def check_state(
    expected: Expected, layout: Layout, read: Callable[[str], Bits], pool: Executor
) -> str:
    """The hash of the state behind `read`; raises Corrupt if it is not the expected one."""
    digests = expected.slicing.digests(layout, read, pool)
    found = check_digests(expected, layout, digests)
    for name, (algorithm, checksum) in expected.checksums.items():
        check_foreign(name, algorithm, checksum, read(name))
    return found


def check_digests(expected: Expected, layout: Layout, digests: Mapping[str, str]) -> str:
    """The hash of a state of entries with these digests; raises Corrupt if it is not the expected
    one. A holder of parts may leave out entries of which it has parts only."""
    if expected.digests is not None:
        for entry, digest in digests.items():
            if expected.digests.get(entry) != digest:
                raise Corrupt(f"{entry}: the held part does not match the published digest")
        return expected.state_hash or state_hash.combined(digests, layout)
    found = state_hash.combined(digests, expected.slicing.entries(layout))
    if expected.state_hash is not None and found != expected.state_hash:
        raise Corrupt(f"state {found} where {expected.state_hash} was published")
    return found


def check_foreign(name: str, algorithm: str, checksum: str, bits: Bits) -> None:
    """Check a tensor against the checksum of another system; raises Corrupt."""
    if state_hash.foreign_checksum(algorithm, bits) != checksum:
        raise Corrupt(f"{name}: not the {algorithm} checksum that was published")


def tried_foreign(staged: Staged, read: Callable[[str], Bits], pool: Executor) -> Staged:
    """Try the deltas of a foreign store on copies of the tensors from `read`; raises Corrupt.

    Shards of ours have digests, so that damage is found while they are read. A foreign delta is
    only known to be whole by the tensor that it leads to.
    """

    def attempt(name: str) -> None:
        bits: Bits = read(name).copy()
        apply_all(staged.deltas[name], bits)
        check_foreign(name, *staged.expected.checksums[name], bits)

    if staged.full is None and not staged.tried:
        # A follower that finishes an interrupted apply omits tensors that are written already.
        names = [name for name in staged.expected.checksums if name in staged.deltas]
        limit_bytes = staged.budget.lent_bytes
        list(spread(pool, attempt, names, staged.lent_bytes, limit_bytes=limit_bytes))
    return replace(staged, tried=True)


def write_state(staged: Staged, target: ApplyTarget, pool: Executor) -> tuple[str, dict[str, str]]:
    """Returns the state's hash, and the digest of every tensor that is held in part.

    Raises ConfigError if the target has another layout and Corrupt if parts have changed or a
    foreign delta is damaged (nothing is touched), and Corrupt if the state is not the published one
    (the target is in doubt).
    """
    if other := difference(staged.layout, target.layout()):
        raise ConfigError(f"the store's checkpoint does not fit this model: {other}")
    staged = tried_foreign(staged, target.bits, pool)
    partial, known = staged.parts.partial, staged.partial_digests
    there = {} if staged.full is not None else digests_of(partial, staged.layout, target.bits, pool)
    if any(known.get(name) != digest for name, digest in there.items()):
        raise Corrupt(PARTS_CHANGED)

    limit_bytes = staged.budget.lent_bytes
    twins = _twins(staged)
    after = spread(
        pool,
        lambda name: apply_all(staged.deltas[name], target.bits(name).copy(), hashed=True),
        twins,
        staged.lent_bytes,
        limit_bytes=limit_bytes,
    )
    coming: dict[str, str] = dict(zip(twins, after, strict=True))

    def write(name: str) -> str:
        if name in partial:
            return _write_part(staged, target, name, coming.get(name))
        _write_whole(staged, target, name)
        return ""

    found = spread(pool, write, staged.changed, staged.lent_bytes, limit_bytes=limit_bytes)
    written = dict(zip(staged.changed, found, strict=True))
    target.finish(staged.changed)
    digests = {name: written.get(name) or known[name] for name in partial}
    expected = staged.expected
    if expected.digests is not None:
        expected = replace(expected, digests={**expected.digests, **digests})
        _check_pieces(staged, target.bits, pool)
    return check_state(expected, staged.layout, target.bits, pool), digests


def _check_pieces(staged: Staged, read: Callable[[str], Bits], pool: Executor) -> None:
    """Raises Corrupt if an entry that deltas have changed, and of which a holder has all in pieces,
    is not the published one."""
    held, partial = staged.parts, staged.parts.partial
    entries = [
        entry
        for entry, parts in held.parts.items()
        if any(part.of.tensor in partial and part.of.tensor in staged.deltas for part in parts)
        and held.is_covered(entry)
    ]

    def check(entry: str) -> None:
        spec = held.entries[entry]
        bits = np.empty(spec.elements, UNSIGNED_NUMPY[spec.width_bytes])
        for part in held.parts[entry]:
            part.within.box(bits)[...] = part.of.box(read(part.of.tensor))
        if digest_of(bits) != staged.table[entry]:
            raise Corrupt(f"{entry}: the held parts do not make up the published tensor")

    limit_bytes = staged.budget.lent_bytes
    list(
        spread(pool, check, entries, lambda e: held.entries[e].size_bytes, limit_bytes=limit_bytes)
    )


def _write_whole(staged: Staged, target: ApplyTarget, name: str) -> None:
    if staged.full is None:
        target.change(name, staged.deltas[name])
        return
    bits = target.bits(name)
    staged.full.copy_into(name, bits)
    target.commit(name, bits)


def _twins(staged: Staged) -> list[str]:
    """Changed parts that have the same bits as another one, as tied ones have: these may be in the
    same memory, where the second delta would find the first one's bits."""
    changed = (
        [] if staged.full is not None else staged.partial_digests.keys() & staged.deltas.keys()
    )
    names: dict[str, list[str]] = {}
    for name in sorted(changed):
        names.setdefault(staged.partial_digests[name], []).append(name)
    return [name for found in names.values() if len(found) > 1 for name in found]


def _write_part(staged: Staged, target: ApplyTarget, name: str, coming: str | None) -> str:
    """Writes a part; returns the digest that it should have now. `coming`: that digest of a part
    that may be in the memory of another one."""
    bits = target.bits(name)
    if staged.full is None:
        new: Bits = bits.copy()
        if coming is not None and digest_of(new) != staged.partial_digests[name]:
            # The other one is written: the final check compares both with what is there.
            return coming
        apply_all(staged.deltas[name], new)
    else:
        new = staged.full[name]
    np.copyto(bits, new)
    target.commit(name, bits)
    return digest_of(new)
