"""A checkpoint directory with its record of the version that it verifiably holds.

It claims a version only while the files match the record. Decides nothing about the source of
weights; follower.py does.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

from harvester.contracts.errors import Corrupt, Unsupported
from harvester.contracts.ids import WeightVersion
from harvester.platform.file_lock import locked
from weightsync.elements import state_hash
from weightsync.elements.bits import Bits, Layout
from weightsync.layout.apply_journal import (
    Applying,
    ApplyRecord,
    Digests,
    Held,
    read_record,
    write_record,
)
from weightsync.layout.durable import refusals
from weightsync.receive.checkpoint import Checkpoint, check_ours, sweep, write_checkpoint

_LOCK_FILE = ".rosemux-lock"


class CheckpointDirectory:
    """Owns one directory; a lock keeps a second owner out."""

    def __init__(self, directory: Path, pool: Executor) -> None:
        """Raises ConfigError if the directory has another owner or holds other weights."""
        self.path = directory
        self._pool = pool
        with refusals(directory):
            directory.mkdir(parents=True, exist_ok=True)
            taken = f"another receiver keeps {directory} already"
            self._lock = locked(directory / _LOCK_FILE, taken=taken)
        self.record: ApplyRecord | None = None
        self.checkpoint: Checkpoint | None = None
        """The files; None without a whole checkpoint."""
        self.digests: Digests = {}
        """xxh3-128 of each tensor in the files."""
        try:
            self.examine()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    @property
    def held(self) -> Held | None:
        """The record of the directory's version; None while it holds no version."""
        return self.record if isinstance(self.record, Held) else None

    def examine(self) -> None:
        """Read and hash everything; a record that the files contradict is withdrawn."""
        sweep(self.path)
        self.record, self.checkpoint, self.digests = None, None, {}
        try:
            record = read_record(self.path)
            if record is None:
                check_ours(self.path)
                return
        except Corrupt:
            record = None
        with suppress(Corrupt, Unsupported):
            self.checkpoint = Checkpoint(self.path)
            layout = self.checkpoint.layout()
            self.digests = state_hash.digests_of(layout, layout, self.checkpoint.bits, self._pool)
        self.record = record
        if isinstance(record, Held) and record.contents_hash != self.contents_hash(self.digests):
            # The files changed by themselves: no version until they match it again.
            version, contents = record.version, record.contents_hash
            self.begin(version, record.state_hash, contents, record.digests, base=None)

    def begin(
        self, version: WeightVersion, state_hash: str, contents_hash: str, after: Digests,
        *, base: Held | None,
    ) -> None:  # fmt: skip
        """Record the start of an apply: from here on the directory holds no version. Raises
        Exhausted; the directory then still holds the old version."""
        record = Applying(
            version=version,
            state_hash=state_hash,
            contents_hash=contents_hash,
            base_version=base.version if base else None,
            base_state_hash=base.state_hash if base else None,
            sequence=self._next_sequence(),
            before=base.digests if base else {},
            after=after,
        )
        write_record(self.path, record)
        self.record = record

    def replace_files(self, layout: Layout, read: Callable[[str], Bits]) -> Checkpoint:
        """Replace any present files with new ones."""
        self.checkpoint = None
        write_checkpoint(self.path, layout, read)
        self.checkpoint = Checkpoint(self.path)
        return self.checkpoint

    def end(self, version: WeightVersion, state_hash: str, digests: Digests) -> Held:
        """Record the verified version; writes nothing if the record already says so."""
        held = self.held
        if held is None or (held.version, held.digests) != (version, digests):
            held = Held(
                version=version,
                state_hash=state_hash,
                contents_hash=self.contents_hash(digests),
                sequence=self._next_sequence(),
                digests=digests,
            )
            write_record(self.path, held)
        self.record, self.digests = held, digests
        return held

    def contents_hash(self, digests: Digests) -> str:
        """Hash of names, dtypes, shapes and digests; "" if these are not the files' tensors."""
        if self.checkpoint is None or digests.keys() != self.checkpoint.layout().keys():
            return ""
        return state_hash.combined(digests, self.checkpoint.layout())

    def _next_sequence(self) -> int:
        return 1 if self.record is None else self.record.sequence + 1
