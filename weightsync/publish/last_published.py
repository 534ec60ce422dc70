"""The publisher's own copy of the last published state, with which the next is compared.

It advances by the written deltas, after the store has them. A copy that outlived its process is
used only if every entry hashes to its record and the record is of the store's newest version;
otherwise it is discarded. Never reads a trainer's tensor twice.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from harvester.contracts.errors import ConfigError, RoseMuxError
from harvester.contracts.ids import WeightVersion
from harvester.platform.file_lock import locked
from weightsync.elements.batches import each
from weightsync.elements.bits import (
    Bits,
    Bytes,
    TensorSpec,
    bits_from_bytes,
    bytes_of,
    checked_spec,
)
from weightsync.elements.state_hash import digests_of
from weightsync.encoding.codec import Encoding, apply_own
from weightsync.encoding.delta import checked_apply
from weightsync.encoding.plain import PlainDelta, plain_deltas
from weightsync.layout.box_sums import box_sum
from weightsync.layout.durable import read_plain, refusals, storage_error
from weightsync.layout.shard import ShardHeader, shard_data, shard_header
from weightsync.layout.slices import SliceRecord, whole_box
from weightsync.layout.tables import MAX_TABLE_BYTES
from weightsync.publish.trainer_state import Piece, TrainerState

_LOG = logging.getLogger(__name__)
_ALIGN_BYTES = 64
RECORD_FORMAT = 1


class MappedFile:
    """`copy-RANK.bin` and its record `copy-RANK.json` in one directory, under a lock.

    Entries lie in order of arrival, each at a multiple of 64 bytes.
    """

    def __init__(self, directory: Path, *, rank: int) -> None:
        self._data = directory / f"copy-{rank:05d}.bin"
        self._record = self._data.with_suffix(".json")
        taken = f"{directory} is another publisher's copy_dir"
        with refusals(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = locked(self._data.with_suffix(".lock"), taken=taken)

    def close(self) -> None:
        self._lock.close()

    def fill(self, pieces: Iterable[Piece]) -> dict[str, Bits]:
        """Replace the content. Raises Exhausted if the disk is full: a hole in a mapped file would
        kill the process."""
        self.drop()
        specs: dict[str, TensorSpec] = {}
        try:
            with self._data.open("wb") as file:
                for piece in pieces:
                    specs[piece.entry] = piece.spec
                    file.write(bytes_of(piece.bits(own=False)).data)
                    file.write(bytes(_padding(piece.spec)))
            return self.mapped(specs)
        except OSError as error:
            self.drop()
            raise storage_error(error, self._data) from error

    def mapped(self, specs: Mapping[str, TensorSpec]) -> dict[str, Bits]:
        """The entries, mapped from the file; raises OSError, or ValueError if the size differs."""
        size = sum(spec.size_bytes + _padding(spec) for spec in specs.values())
        if self._data.stat().st_size != size:
            raise ValueError(f"{self._data} has not {size} bytes")
        # An empty file cannot be mapped.
        whole = np.asarray(np.memmap(self._data, np.uint8, "r+") if size else np.empty(0, np.uint8))
        bits: dict[str, Bits] = {}
        at = 0
        for entry, spec in specs.items():
            bits[entry] = bits_from_bytes(whole[at : at + spec.size_bytes], spec)
            at += spec.size_bytes + _padding(spec)
        return bits

    def record(self, text: bytes) -> None:
        temporary = self._record.with_suffix(".tmp")
        temporary.write_bytes(text)
        temporary.rename(self._record)

    def recorded(self) -> bytes:
        """The record; raises OSError without a record."""
        return read_plain(self._record, MAX_TABLE_BYTES)

    def forget_record(self) -> None:
        self._record.unlink(missing_ok=True)

    def drop(self) -> None:
        self.forget_record()
        self._data.unlink(missing_ok=True)


def _padding(spec: TensorSpec) -> int:
    return -spec.size_bytes % _ALIGN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Entries of a version: all of them, or one rank's."""

    layout: dict[str, TensorSpec] = field(default_factory=dict)
    slices: dict[str, SliceRecord] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class _MappedContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a mapped file's content."""

    format: int
    version: int
    state_hash: str
    lie: list[tuple[str, str, tuple[int, ...]]]
    """Entry, dtype and shape, in file order."""
    digests: dict[str, str]
    slices: dict[str, SliceRecord]
    ties: dict[str, str]
    skipped: list[str]


class LastPublished:
    """One rank's entries. `version` is None if there is no state to compare with.

    `file`: a copy that outlives the process; None keeps it in memory.
    """

    def __init__(self, file: MappedFile | None) -> None:
        self._file = file
        self._clear()

    def _clear(self) -> None:
        self.version: WeightVersion | None = None
        self.state_hash = ""
        self.contents = Contents()
        self.ties: dict[str, str] = {}
        """Name to the entry that has the same bits in the same memory."""
        self.skipped: set[str] = set()
        """Entries that another rank publishes."""
        self.sums: dict[str, int] = {}
        """Sum of every entry (box_sums.py), by the name that its bits are held under; empty until
        `sum_up`."""
        self._bits: dict[str, Bits] = {}
        self._specs: dict[str, TensorSpec] = {}

    def forget(self) -> None:
        """Drop the copy, so that the next version is a full one."""
        self._clear()
        if self._file is not None:
            self._file.drop()

    def close(self) -> None:
        self._clear()
        if self._file is not None:
            self._file.close()

    def bits(self, entry: str) -> Bits:
        return self._bits[self.ties.get(entry, entry)]

    def names_of(self, entry: str) -> tuple[str, ...]:
        """An entry and the names that are tied to it."""
        return (entry, *(name for name, first in self.ties.items() if first == entry))

    def fits(self, state: TrainerState) -> bool:
        """Whether a state dict has the same entries; always True for an iterable."""
        if not state.is_lasting:
            return True
        coming = {piece.entry: (piece.spec, piece.record) for piece in state.pieces}
        here = {e: (spec, self.contents.slices.get(e)) for e, spec in self._specs.items()}
        for entry in self.skipped:
            coming.pop(entry, None)
            here.pop(entry, None)
        return (state.ties, coming) == (self.ties, here)

    def fill(self, state: TrainerState, pool: Executor) -> None:
        """Copy all tensors; `hold` then sets their version."""
        self.forget()
        specs: dict[str, TensorSpec] = {}
        slices: dict[str, SliceRecord] = {}

        def noted() -> Iterator[Piece]:
            for piece in state:
                if piece.entry in specs:
                    raise ConfigError(f"{piece.entry} is given twice")
                specs[piece.entry] = piece.spec
                if piece.record is not None:
                    slices[piece.entry] = piece.record
                yield piece

        if self._file is None:
            self._bits = {piece.entry: piece.bits(own=True) for piece in noted()}
        else:
            self._bits = self._file.fill(noted())
        self._specs, self.ties = specs, dict(state.ties)
        digests = digests_of(specs, specs, self.bits, pool)
        digests |= {name: digests[first] for name, first in self.ties.items()}
        self._know(slices, digests)

    def box(self, entry: str) -> SliceRecord:
        """An entry's place in its tensor."""
        return self.contents.slices.get(entry) or whole_box(entry, self._specs[entry])

    def sum_up(self, pool: Executor) -> None:
        """Find all sums from the bits. One that was counted wrong since would have every engine of
        several ranks refuse the trainer's versions."""
        entries = sorted(self.contents.layout.keys() - self.ties.keys())
        found = each(
            pool,
            lambda entry: box_sum(self._bits[entry], self.box(entry)),
            entries,
            lambda entry: self._specs[entry].size_bytes,
        )
        counted, self.sums = self.sums, dict(zip(entries, found, strict=True))
        if wrong := [entry for entry in counted if counted[entry] != self.sums.get(entry)]:
            _LOG.warning("%s and %d more had wrong sums until now", wrong[0], len(wrong) - 1)

    def sum_of(self, entry: str) -> int:
        """The sum of an entry, or of what it is tied to; see `sum_up`."""
        return self.sums[self.ties.get(entry, entry)]

    def skip(self, entries: Iterable[str]) -> None:
        """Leave entries to another rank from now on."""
        self.skipped |= set(entries)
        for entry in self.skipped:
            self._bits.pop(entry, None)
        known = self.contents
        self._know(
            {entry: record for entry, record in known.slices.items() if entry not in self.skipped},
            {entry: digest for entry, digest in known.digests.items() if entry not in self.skipped},
        )

    def advance(
        self, shards: Iterable[Bytes], encodings: Mapping[str, Encoding], pool: Executor
    ) -> None:
        """Apply the deltas of a published version; `hold` then sets the version."""
        self.version = None
        for shard in shards:
            header = shard_header(shard)
            moving = [entry for entry in header.layout if entry in self._bits]
            ours = {e: self._specs[e] for e in moving if encodings[e].is_ours}
            plain = plain_deltas(shard, header.offsets, ours)

            def move(
                entry: str,
                data: Bytes = shard,
                header: ShardHeader = header,
                plain: Mapping[str, PlainDelta] = plain,
            ) -> None:
                bits = self._bits[entry]
                if entry in plain:
                    checked_apply(plain[entry], bits)
                    return
                payload = shard_data(data, header, entry).data
                apply_own(encodings[entry], payload, self._specs[entry], bits)

            each(pool, move, moving, lambda entry: self._specs[entry].size_bytes)

    def commit(
        self,
        version: WeightVersion,
        state_hash: str,
        digests: Mapping[str, str],
        sums: Mapping[str, int],
    ) -> None:
        """Set the version that the copy now is; `digests` and `sums` are the changed ones."""
        self.contents.digests.update(digests)
        self.sums.update(sums)
        self.version, self.state_hash = version, state_hash
        if self._file is not None:
            try:
                self._file.record(msgspec.json.encode(self._record(version)))
            except OSError as error:
                # The version is published: only a next process would need the record.
                self._file.forget_record()
                _LOG.warning("version %d: no copy for a restart: %s", version, error)

    def _record(self, version: WeightVersion) -> _MappedContent:
        return _MappedContent(
            format=RECORD_FORMAT,
            version=version,
            state_hash=self.state_hash,
            lie=[(entry, spec.dtype, spec.shape) for entry, spec in self._specs.items()],
            digests=self.contents.digests,
            slices=self.contents.slices,
            ties=self.ties,
            skipped=sorted(self.skipped),
        )

    def adopt(self, latest: int, state_hash: str, pool: Executor) -> None:
        """Take over an earlier process's copy, if it is exactly the store's newest version."""
        if self._file is None:
            return
        try:
            record = msgspec.json.decode(self._file.recorded(), type=_MappedContent)
            found = (record.format, record.version, record.state_hash)
            if found == (RECORD_FORMAT, latest, state_hash):
                self._take_over(self._file, record)
                if self.is_true(pool):
                    self.version, self.state_hash = WeightVersion(record.version), state_hash
                    return
        except (OSError, ValueError, KeyError, RoseMuxError):
            pass
        self.forget()

    def _take_over(self, file: MappedFile, record: _MappedContent) -> None:
        self._specs = {
            entry: checked_spec(dtype, shape, what=f"copy of {entry!r}")
            for entry, dtype, shape in record.lie
        }
        self._bits = file.mapped(self._specs)
        self.ties, self.skipped = record.ties, set(record.skipped)
        self._know(record.slices, record.digests)

    def is_true(self, pool: Executor) -> bool:
        """Whether every entry still has its published digest."""
        entries = self.contents.layout.keys() - self.ties.keys()
        found = digests_of(entries, self.contents.layout, self.bits, pool)
        return all(self.contents.digests[entry] == digest for entry, digest in found.items())

    def _know(self, slices: dict[str, SliceRecord], digests: dict[str, str]) -> None:
        layout = {name: self._specs[self.ties.get(name, name)] for name in sorted(digests)}
        self.contents = Contents(layout=layout, slices=slices, digests=digests)
