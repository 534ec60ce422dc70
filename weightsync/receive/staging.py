"""Turns a plan into checked changes: reads shards, decodes, verifies. Touches no engine.

Two passes. The first brings everything into the receiver's own copy (spool.py) and checks it there:
a full checkpoint is brought to its final state and hashed. The second, at apply time, reads
verified bits. Neither takes more memory than its budget gives.
"""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace

from harvester.contracts.errors import Corrupt
from weightsync.elements import state_hash
from weightsync.elements.batches import spread
from weightsync.elements.bits import bits_from_bytes
from weightsync.encoding.delta import Delta
from weightsync.encoding.plain import plain_deltas
from weightsync.layout.chunk_digests import MIN_CHUNK_BYTES
from weightsync.layout.shard import ShardHeader
from weightsync.reading.memory_budget import MemoryBudget
from weightsync.reading.shard_copy import ShardCopy
from weightsync.reading.spool import Spool
from weightsync.reading.store import Store
from weightsync.receive.full_state import FullState, StoredEntry, advance, entry_digests
from weightsync.receive.held_parts import EntryPart, HeldParts, everything, placed, runs
from weightsync.receive.plan import PlanStep, PullPlan
from weightsync.receive.staged import Expected, Staged, check_foreign, expected_of_parts
from weightsync.receive.stored_delta import StoredDelta, decoded_bytes
from weightsync.transport.ranges import ByteSpan

_logger = logging.getLogger(__name__)

_SMALL = 4 * MIN_CHUNK_BYTES
"""A shard up to this size is read whole without a log line."""


class Staging:
    """The staging of one plan. A foreign store is read whole: it has no digests for parts.

    For a holder of parts, at the version that the plan builds on: `known`, digests of all entries,
    and `known_sums`; `partial`, those of the holder's tensors that are parts, and their
    `partial_sums`. `copy`: the state of the plan's first
    step, which is changed in its place.
    """

    def __init__(
        self,
        store: Store,
        plan: PullPlan,
        parts: HeldParts,
        pool: Executor,
        *,
        budget: MemoryBudget,
        spool: Spool,
        known: Mapping[str, str],
        partial: Mapping[str, str],
        known_sums: Mapping[str, int],
        partial_sums: Mapping[str, int],
        copy: FullState | None = None,
    ) -> None:
        self._store = store
        self._plan = plan
        self._held = parts
        self._is_ours = all(step.manifest.section is not None for step in plan.steps)
        self._read = parts if self._is_ours else everything(parts.whole, parts.slicing)
        self._pool = pool
        self._budget = budget
        self._spool = spool
        self._table = dict(known)
        self._copied = known if copy else {}
        self._sums = dict(known_sums)
        self._partial, self._partial_sums = partial, partial_sums
        self._checksums: dict[str, tuple[str, str]] = {}
        self._stored: dict[str, StoredEntry] = copy.handed_over() if copy else {}
        self._steps = plan.steps[1:] if copy else plan.steps
        self._deltas: dict[str, list[StoredDelta]] = {}
        """Changes on top of a full checkpoint, by entry."""
        self._changes: dict[str, list[Delta]] = {}
        """Changes on top of the version that the plan builds on, by the holder's tensor."""
        self._bytes_read = 0
        self._whole_bytes = 0
        """Size of shards that were read whole."""

    def _take(self, step: PlanStep) -> None:
        """Read one version; raises Corrupt."""
        found: set[str] = set()
        doubles: dict[str, str | None] = {}
        self._whole_bytes = 0
        if step.manifest.is_full:
            self._table.clear()
            self._sums.clear()
        for shard in step.manifest.shards:
            copy, whole = self._fetched(step, shard)
            header = _mapped_here(step, shard, whole)
            doubles |= {
                n: whole.metadata.get(n) for n in whole.layout.keys() - header.layout.keys()
            }
            found |= set(header.layout)
            given = {**step.manifest.checksums, **header.metadata}
            checksums = {n: given[n] for n in header.layout if n in given}
            if step.manifest.section is None:
                _check_given(step, shard, header, checksums)
                algorithm = step.manifest.checksum_format
                self._checksums |= {name: (algorithm, c) for name, c in checksums.items()}
            self._table |= checksums
            for name in header.layout:
                self._sums.pop(name, None)
            self._sums |= {name: header.sums[name] for name in header.layout if name in header.sums}
            if step.manifest.is_full:
                self._take_dense(copy, header)
            else:
                self._take_changes(step, copy, header)
            self._bytes_read += copy.bytes_read
        if not self._held.is_everything and self._whole_bytes > len(step.manifest.shards) * _SMALL:
            _logger.info("%s is read whole: it has no digests of its parts", step.ref.directory)
        if found != set(step.manifest.weight_map):
            raise Corrupt(f"{step.ref.directory}: shards and weight map name different tensors")
        for name, checksum in doubles.items():
            if checksum != self._table.get(name):
                raise Corrupt(f"{step.ref.directory}: two shards have {name}, and they differ")

    def staged(self) -> Staged:
        """Read the plan and check a full checkpoint's final state; raises Corrupt or Stale."""
        for step in self._steps:
            self._take(step)
        if self._is_ours and not self._held.is_everything:
            self._check_table()
        full = self._verified() if self._plan.current is None else None
        return Staged(
            plan=self._plan,
            layout=self._held.layout(),
            full=full,
            deltas={name: tuple(deltas) for name, deltas in self._changes.items()},
            expected=self._expected(),
            bytes_read=self._bytes_read,
            parts=self._held,
            table=self._table,
            sums=self._sums,
            partial_digests=self._partial if full is None else {},
            partial_sums=self._partial_sums if full is None else {},
            budget=self._budget,
        )

    def _fetched(self, step: PlanStep, shard: str) -> tuple[ShardCopy, ShardHeader]:
        copy = self._store.shard(
            step.ref, step.manifest, shard, self._spool, lent_bytes=self._budget.lent_bytes
        )
        if self._read.is_everything or not copy.has_chunks:
            copy.fetch()
            self._whole_bytes += copy.bytes_read
        header = copy.header()
        if step.manifest.is_full:
            self._check_specs(header)
        required = (
            span for part in self._parts_in(header) for span in self._spans(step, header, part)
        )
        copy.fetch_parts(required)
        return copy, header

    def _parts_in(self, header: ShardHeader) -> list[EntryPart]:
        return [part for name in header.layout for part in self._read.parts.get(name, ())]

    def _check_specs(self, header: ShardHeader) -> None:
        for part in self._parts_in(header):
            found, known = header.layout[part.entry], self._read.entries[part.entry]
            if found != known:
                raise Corrupt(f"{part.entry} is {found}, and was {known} a moment ago")

    def _spans(self, step: PlanStep, header: ShardHeader, part: EntryPart) -> Iterator[ByteSpan]:
        begin, end = header.offsets[part.entry]
        if not step.manifest.is_full:
            yield ByteSpan(begin, end)
            return
        for run in runs(part.within, header.layout[part.entry].width_bytes):
            yield ByteSpan(begin + run.start, begin + run.stop)

    def _take_dense(self, copy: ShardCopy, header: ShardHeader) -> None:
        cut = {}
        for part in self._parts_in(header):
            entry = StoredEntry(
                copy.staged, header.offsets[part.entry][0], self._read.entries[part.entry]
            )
            self._stored[part.entry] = entry
            if not (part.within.is_whole or copy.has_chunks):
                cut[part.entry] = entry
        # All of it is here only now: later changes are applied to the held boxes alone.
        self._check_entries(entry_digests(cut, self._pool, self._budget))

    def _check_entries(self, digests: Mapping[str, str]) -> None:
        if any(self._table.get(entry) != digest for entry, digest in digests.items()):
            raise Corrupt(f"version {self._plan.target}: a tensor differs from the published one")

    def _take_changes(self, step: PlanStep, copy: ShardCopy, header: ShardHeader) -> None:
        """Decode every change, so that a broken change is found now; keep the changes that fit."""
        where = step.ref.directory
        unknown = sorted(set(header.layout) - set(self._read.entries))
        if unknown:
            raise Corrupt(f"{where} changes {unknown[0]!r}, which its base does not have")
        stored = {
            entry: StoredDelta(
                file=copy.staged,
                span=ByteSpan(*header.offsets[entry]),
                encoding=step.manifest.encoding_of(entry),
                spec=self._read.entries[entry],
                what=f"{where}, {entry}",
            )
            for entry in header.layout
            if entry in self._read.parts
        }
        if self._plan.current is None:
            # Changes on top of a full checkpoint are applied once, and soon.
            for entry, delta in stored.items():
                self._deltas.setdefault(entry, []).append(delta)
            return
        kept = self._plain(copy, header, stored)
        has_plain = bool(kept)
        kept |= self._decoded({name: delta for name, delta in stored.items() if name not in kept})
        for entry, deltas in kept.items():
            for part, change in zip(self._read.parts[entry], deltas, strict=True):
                self._changes.setdefault(part.of.tensor, []).append(change)
        waits = any(isinstance(delta, StoredDelta) for deltas in kept.values() for delta in deltas)
        if not has_plain and not waits:
            self._budget.give_back(copy.staged.kept_bytes)

    def _plain(
        self, copy: ShardCopy, header: ShardHeader, stored: Mapping[str, StoredDelta]
    ) -> dict[str, list[Delta]]:
        """Deltas that stay in their payload's memory, if they are most of the shard's bytes; by
        entry, one for each held part of it."""
        ours = {e: delta.spec for e, delta in stored.items() if delta.encoding.is_ours}
        if not ours or not copy.staged.kept_bytes:
            return {}
        data = copy.staged.read(ByteSpan(0, copy.staged.kept_bytes))
        plain = plain_deltas(data, header.offsets, ours)
        if 2 * sum(map(header.size_bytes, plain)) < sum(map(header.size_bytes, header.layout)):
            return {}
        return {e: placed(self._read.parts[e], delta, ours[e]) for e, delta in plain.items()}

    def _decoded(self, stored: Mapping[str, StoredDelta]) -> dict[str, list[Delta]]:
        """Like `_plain`: decoded deltas as far as they fit into memory, the others as stored."""

        def decoded(entry: str) -> list[Delta]:
            delta = stored[entry]
            return placed(self._read.parts[entry], delta.decoded(alone=True), delta.spec)

        def size_of(entry: str) -> int:
            return stored[entry].lent_bytes

        limit_bytes = self._budget.lent_bytes
        found = spread(self._pool, decoded, list(stored), size_of, limit_bytes=limit_bytes)
        kept: dict[str, list[Delta]] = {entry: [] for entry in stored}
        for entry, deltas in zip(stored, found, strict=True):
            for part, delta in zip(self._read.parts[entry], deltas, strict=True):
                size = decoded_bytes(delta)
                if part.is_all:
                    # Parts of the delta may be the payload's own bytes.
                    size += stored[entry].span.size_bytes
                again = replace(stored[entry], part=None if part.is_all else part)
                kept[entry].append(delta if self._budget.keep(size) else again)
        return kept

    def _verified(self) -> FullState:
        """Bring every entry to its final state, and check it."""
        advance(self._stored, self._deltas, self._read.parts, self._pool, self._budget)
        digests = {name: d for name, d in self._copied.items() if name not in self._deltas}
        made = {
            name: entry
            for name, entry in self._stored.items()
            if name not in digests and self._read.is_covered(name)
        }
        digests |= entry_digests(made, self._pool, self._budget)
        if self._read.is_everything:
            self._check_everything(digests)
            self._table = digests
        else:
            self._check_entries(digests)
        return FullState(self._held.layout(), self._held.by_tensor(), self._stored)

    def _check_everything(self, digests: Mapping[str, str]) -> None:
        published = self._plan.manifest.state_hash
        found = state_hash.combined(digests, self._read.entries)
        if published is not None and found != published:
            raise Corrupt(f"state {found} where {published} was published")
        for name, (algorithm, checksum) in self._foreign_checksums().items():
            stored = self._stored[name]
            bits = bits_from_bytes(stored.file.read(stored.whole), stored.spec)
            try:
                check_foreign(name, algorithm, checksum, bits)
            except Corrupt as error:
                if self._plan.steps[0].ref.version:
                    raise
                raise Corrupt(
                    f"{error}: a delta was damaged, or {self._store}'s base checkpoint is not the "
                    "one that its trainer started from"
                ) from error

    def _check_table(self) -> None:
        """Check that the shards' digests hash to the published state."""
        published = self._plan.manifest.state_hash
        is_complete = self._table.keys() == self._read.entries.keys()
        if not is_complete or state_hash.combined(self._table, self._read.entries) != published:
            raise Corrupt(f"digests of version {self._plan.target} do not combine to {published}")

    def _expected(self) -> Expected:
        if self._held.is_everything:
            return Expected(
                state_hash=self._plan.manifest.state_hash,
                checksums=self._foreign_checksums(),
                slicing=self._held.slicing,
            )
        return expected_of_parts(self._plan.manifest.state_hash, self._held, self._table)

    def _foreign_checksums(self) -> dict[str, tuple[str, str]]:
        return {} if self._plan.manifest.section else self._checksums


def _mapped_here(step: PlanStep, shard: str, header: ShardHeader) -> ShardHeader:
    """A shard's header without tensors that the index maps to another shard. Every rank of slime
    writes replicated tensors, and the second application of one XOR delta would undo the first."""
    shard_of = step.manifest.weight_map
    here = {
        name: spec for name, spec in header.layout.items() if shard_of.get(name, shard) == shard
    }
    return replace(header, layout=here)


def _check_given(
    step: PlanStep, shard: str, header: ShardHeader, checksums: Mapping[str, str]
) -> None:
    """Raises Corrupt or Unsupported if a tensor of a foreign delta could not be verified."""
    state_hash.check_algorithm(step.manifest.checksum_format)
    without = sorted(header.layout.keys() - checksums.keys())
    if without and not step.manifest.is_full:
        raise Corrupt(f"{step.ref.directory}/{shard} has no checksum of {without[0]}")
