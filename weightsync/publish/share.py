"""One rank's share of a version: takes its tensors, compares, encodes and writes them.

Tensors are taken one after another, with a bound on the bytes in flight; the pool compares and
encodes while finished ones are written. The copy advances only after the store has the version.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import TypeAlias

from harvester.contracts.errors import ConfigError, Corrupt
from harvester.contracts.ids import WeightVersion, checked_name
from weightsync.elements.bits import Bits, bytes_of
from weightsync.encoding.codec import Encoded, Encoding, encode, encode_as
from weightsync.layout.box_sums import added_up, run_dims
from weightsync.layout.names import Kind, VersionRef
from weightsync.publish.agreement import (
    PublishOrder,
    PublishResult,
    RankEntries,
    RankReport,
    WrittenShare,
    entries_of,
)
from weightsync.publish.delta_shards import ShardFiles, full_shards
from weightsync.publish.last_published import LastPublished
from weightsync.publish.settings import WorkSettings
from weightsync.publish.store_writer import Draft
from weightsync.publish.trainer_state import Piece, TrainerState

_BATCH_BYTES = 1 << 20
_SMALL_BYTES = 8 << 10
"""Mean tensor size of a batch up to which it is compared inline."""


Compared: TypeAlias = tuple[str, Encoded | None]
"""An entry and its change; None if nothing changed."""


def compared(
    pieces: Iterable[Piece],
    compare: Callable[[str, Bits], Compared],
    pool: Executor,
    work: WorkSettings,
    *,
    own: bool,
) -> Iterator[Compared]:
    """Compares in batches: a hand-over takes longer than comparing a small tensor.

    Batches of tensors that take longer in Python than in a compiled loop are compared inline, since
    threads would only wait for each other's interpreter lock. `in_flight_bytes` of `work` bounds
    the bytes held at a time, above one batch per thread. `own`: see `Piece.bits`.
    """
    batch_bytes = min(_BATCH_BYTES, work.in_flight_bytes // (2 * work.threads))
    waiting: deque[tuple[int, Callable[[], list[Compared]]]] = deque()
    batch: list[tuple[str, Bits]] = []
    open_bytes = held_bytes = 0

    def compare_all(batch: list[tuple[str, Bits]]) -> list[Compared]:
        return [compare(entry, bits) for entry, bits in batch]

    def hand_over() -> None:
        if open_bytes > _SMALL_BYTES * len(batch):
            waiting.append((open_bytes, pool.submit(compare_all, batch).result))
            return
        done = compare_all(batch)
        waiting.append((open_bytes, lambda: done))

    for piece in pieces:
        size_bytes = piece.spec.size_bytes
        while len(waiting) >= work.threads and held_bytes + size_bytes > work.in_flight_bytes:
            done_bytes, done = waiting.popleft()
            yield from done()
            held_bytes -= done_bytes
        batch.append((piece.entry, piece.bits(own=own)))
        open_bytes += size_bytes
        held_bytes += size_bytes
        if open_bytes >= batch_bytes:
            hand_over()
            batch, open_bytes = [], 0
    hand_over()
    while waiting:
        yield from waiting.popleft()[1]()


class RankShare:
    """Compares and encodes within the bounds of `work`, on `pool`. `sums`: whether versions have
    the sum of each tensor, by which holders of parts verify them together."""

    def __init__(
        self,
        copy: LastPublished,
        encoding: Encoding,
        work: WorkSettings,
        *,
        rank: int,
        pool: Executor,
        sums: bool,
    ) -> None:
        self._copy = copy
        self._encoding = encoding
        self._has_sums = sums
        self._new_sums: dict[str, int] = {}
        """Sums of the entries that the last delta changes."""
        self._work = work
        self._rank = rank
        self._pool = pool
        self._is_reported = False

    def report(self, state: TrainerState) -> RankReport:
        """The base that a delta of `state` can build on."""
        if self._copy.version is None or not self._copy.fits(state):
            return RankReport(0, "", encoding=self._encoding)
        entries = None if self._is_reported else entries_of(self._copy.contents)
        return RankReport(self._copy.version, self._copy.state_hash, entries, self._encoding)

    def take(self, state: TrainerState) -> RankEntries:
        """Copy all tensors, for a full version."""
        self._copy.fill(state, self._pool)
        return entries_of(self._copy.contents)

    def write_full(self, draft: Draft) -> WrittenShare:
        """Write the copy as a full checkpoint."""
        contents = self._copy.contents
        self._new_sums = {}
        if self._has_sums:
            self._copy.sum_up(self._pool)
        sums = {e: self._copy.sum_of(e) for e in contents.layout} if self._has_sums else {}
        shards = full_shards(
            draft,
            contents.layout,
            lambda entry: bytes_of(self._copy.bits(entry)).data,
            contents.digests,
            sums,
            rank=self._rank,
        )
        return WrittenShare(shards, {})

    def write_anchor(self, draft: Draft) -> WrittenShare:
        """Verify the copy and write it in full. Without this check a wrong copy would go unnoticed
        until the anchor is needed. Raises Corrupt."""
        if not self._copy.is_true(self._pool):
            self._copy.forget()
            raise Corrupt("the publisher's copy is not its last version; a full version follows")
        return self.write_full(draft)

    def write_delta(self, draft: Draft, state: TrainerState) -> WrittenShare:
        """Write what differs from the copy; raises ConfigError if an iterable has other entries."""
        files = ShardFiles(
            draft,
            rank=self._rank,
            limit_bytes=self._work.shard_bytes,
            may_pack=self._encoding.is_ours,
        )
        digests: dict[str, str] = {}
        self._new_sums = {}
        if self._has_sums and not self._copy.sums:
            # A copy that was taken over: its record has none.
            self._copy.sum_up(self._pool)
        expected = set(self._copy.contents.layout) - set(self._copy.ties)
        pieces, own = self._expected_pieces(state, expected), not state.is_lasting
        for entry, encoded in compared(pieces, self._compare, self._pool, self._work, own=own):
            if encoded is None:
                continue
            new_sum = None
            if encoded.sum_change is not None:
                new_sum = added_up((self._copy.sum_of(entry), encoded.sum_change))
                self._new_sums[entry] = new_sum
            for name in self._copy.names_of(entry):
                digests[name] = encoded.digest
                files.add(name, encoded, new_sum)
        if expected:
            raise self._other_layout(f"{min(expected)} is missing")
        return WrittenShare(files.finish(), digests)

    def advance(
        self, order: PublishOrder, outcome: PublishResult, written: WrittenShare, draft: Draft
    ) -> None:
        """Advance the copy to the published version."""
        version = WeightVersion(order.version)
        if order.base:
            directory = VersionRef(Kind.WEIGHT, version).directory
            names = {
                shard.file: checked_name(outcome.shards[shard.file], what="shard")
                for shard in written.shards
            }
            encodings = {
                e: encoding for shard in written.shards for e, encoding in shard.encodings.items()
            }
            shards = (draft.written(file, f"{directory}/{name}") for file, name in names.items())
            self._copy.advance(shards, encodings, self._pool)
        self._copy.commit(version, outcome.state_hash, written.digests, self._new_sums)
        self._is_reported = True

    def _expected_pieces(self, state: TrainerState, expected: set[str]) -> Iterator[Piece]:
        """The pieces to compare, in the order of the state, each of which leaves `expected`."""
        for piece in state:
            if piece.entry in self._copy.skipped:
                continue
            # A state dict was checked whole when it was offered.
            if not state.is_lasting:
                self._check(piece)
            if piece.entry in self._copy.ties:
                raise self._other_layout(
                    f"{piece.entry} no longer shares memory with the tensor it was tied to"
                )
            if piece.entry not in expected:
                raise ConfigError(f"{piece.entry} is given twice")
            expected.discard(piece.entry)
            yield piece

    def _compare(self, entry: str, new: Bits) -> Compared:
        old = self._copy.bits(entry)
        dims = run_dims(self._copy.box(entry)) if self._has_sums else None
        if self._encoding is Encoding.ROSEMUX:
            return entry, encode(old, new, dims)
        return entry, encode_as(self._encoding, old, new, dims)

    def _check(self, piece: Piece) -> None:
        contents = self._copy.contents
        expected = (contents.layout.get(piece.entry), contents.slices.get(piece.entry))
        if expected != (piece.spec, piece.record):
            raise self._other_layout(f"{piece.entry} is new or has another dtype or shape")

    def _other_layout(self, what: str) -> ConfigError:
        version = self._copy.version
        self._copy.forget()
        return ConfigError(
            f"{what} since version {version}: publish all of it again, as a full version"
        )
