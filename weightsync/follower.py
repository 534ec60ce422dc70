"""Keeps one local checkpoint directory at a version of a store, through kills and broken payloads.

    follower = CheckpointFollower(Receiver("/weights/job-a"), "/local/policy")
    pulled = follower.pull()

Before the first byte changes, the digests of the coming state are known and its hash is the
published one; the record says `applying` until what is really in the files has been hashed. At
start the files are hashed too: a version is claimed only while the directory is one.
"""

import fcntl
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync import state_hash
from weightsync.apply_journal import (
    Applying,
    Digests,
    Held,
    Record,
    Repair,
    read_record,
    repairs,
    write_record,
)
from weightsync.bits import Bits
from weightsync.checkpoint import Checkpoint, check_ours, sweep, write_checkpoint
from weightsync.delta import checked_apply
from weightsync.durable import storage_error
from weightsync.receiver import Receiver
from weightsync.staging import Staged, check_state

_LOCK_FILE = ".rosemux-lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What one pull did; the directory holds `version` now."""

    version: WeightVersion
    state_hash: str
    bytes_read: int
    tensors_written: int
    from_full: bool
    mended: bool
    """The directory was no version before: an apply had been interrupted, or a file had changed."""
    seconds: float


class CheckpointFollower:
    """Owns one directory; a lock keeps a second owner out. Not thread-safe.

    After an exception the directory is what `held` says: the old version, or none until the next
    `pull` has repaired it.
    """

    def __init__(
        self,
        receiver: Receiver,
        directory: Path | str,
        *,
        threads: int = 2,
        clock: Clock | None = None,
    ) -> None:
        """Raises ConfigError where the directory has another owner or holds other weights."""
        self._receiver = receiver
        self._directory = Path(directory)
        self._clock = clock or MonotonicClock()
        self._lock = _locked(self._directory)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weight-follow")
        self._checkpoint: Checkpoint | None = None
        self._record: Record | None = None
        self._now: Digests = {}
        try:
            self._examine()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the directory's lock back."""
        self._pool.shutdown()
        self._lock.close()

    @property
    def held(self) -> Held | None:
        """What the directory holds; None while that is no version."""
        return self._record if isinstance(self._record, Held) else None

    @property
    def interrupted(self) -> bool:
        """There are weights, but of no version: the next `pull` repairs them."""
        return self.held is None and self._now != {}

    def newest(self) -> WeightVersion | None:
        """The newest published version; None before the first one."""
        return self._receiver.latest()

    def pull(self, version: WeightVersion | None = None) -> Pulled:
        """Brings the directory to `version`, or to the newest one.

        Raises what Receiver raises; Stale where the store's newest version is older than the one
        that is held (give `version` to go back); Exhausted where the disk is full.
        """
        started = self._clock.now()
        mended = self.interrupted
        rolled, rolled_bytes = (0, 0)
        if self.held is None:
            self._examine()
            rolled, rolled_bytes = self._roll_forward()
        target = self._target(version)
        staged, after = self._prepared(target)
        written = self._advance(staged, after)
        held = self._end(target, after)
        return Pulled(
            version=target,
            state_hash=held.state_hash,
            bytes_read=rolled_bytes + staged.plan.size_bytes,
            tensors_written=rolled + written,
            from_full=staged.full is not None,
            mended=mended,
            seconds=self._clock.now() - started,
        )

    def _examine(self) -> None:
        """Looks at what is there; afterwards `_record` says `held` only where the files agree."""
        sweep(self._directory)
        self._record, self._checkpoint, self._now = None, None, {}
        try:
            record = read_record(self._directory)
            if record is None:
                check_ours(self._directory)
                return
        except Corrupt:
            record = None
        try:
            self._checkpoint = Checkpoint(self._directory)
        except (Corrupt, Unsupported):
            return
        self._now = self._digests()
        if isinstance(record, Held) and record.state_hash != self._combined(self._now):
            record = _doubted(record)
            write_record(self._directory, record)
        self._record = record

    def _roll_forward(self) -> tuple[int, int]:
        """Finishes an interrupted apply where no tensor is torn; else a full checkpoint will.

        Returns how many tensors it wrote and how many bytes it read for them.
        """
        record, checkpoint = self._record, self._checkpoint
        if not isinstance(record, Applying) or checkpoint is None:
            return 0, 0
        needed = repairs(record, self._now)
        if Repair.REWRITE in needed.values() or needed.keys() != self._now.keys():
            return 0, 0
        behind = [name for name, what in needed.items() if what is Repair.ROLL_FORWARD]
        size_bytes = 0
        try:
            if behind:
                plan = self._receiver.plan(record.base_version, record.version)
                staged, size_bytes = self._receiver.stage(plan), plan.size_bytes
                if staged.full is not None:
                    return 0, 0
                self._receiver.apply(_only(staged, behind), checkpoint)
            checkpoint.finish(record.after)
            if self._combined(record.after) != record.state_hash:
                raise Corrupt(f"{self._directory}: the record's digests are not its state's")
        except RoseMuxError:
            self._examine()
            return 0, 0
        self._end(record.version, record.after)
        return len(behind), size_bytes

    def _target(self, version: WeightVersion | None) -> WeightVersion:
        if version is not None:
            return version
        newest = self.newest()
        if newest is None:
            raise ConfigError("the store holds no version yet: publish one first")
        if self.held is not None and newest < self.held.version:
            raise Stale(
                f"the store's newest version is {newest} and {self._directory} holds "
                f"{self.held.version}: is it another store? To go back, name the version"
            )
        return newest

    def _prepared(self, target: WeightVersion) -> tuple[Staged, Digests]:
        """What to write, and every tensor's digest once it is written; nothing is touched."""
        held = self.held
        if held is not None and held.version <= target:
            staged = self._receiver.prepare(held.version, target)
            if staged.full is None:
                try:
                    return staged, self._digests_after(staged)
                except Corrupt:
                    # The held state is not what the chain builds on.
                    pass
        staged = self._receiver.prepare(None, target)
        if staged.full is None:
            raise Corrupt(f"version {target} leads to no full checkpoint")
        return staged, state_hash.digests_of(staged.full, staged.full.__getitem__, self._pool)

    def _digests_after(self, staged: Staged) -> Digests:
        """Applies a chain to copies. Raises Corrupt where the end is not the published state."""
        checkpoint = self._checkpoint
        if checkpoint is None or checkpoint.layout() != staged.layout:
            raise Corrupt(f"{self._directory} holds other tensors than the store")

        def digest(name: str) -> str:
            bits = checkpoint.bits(name).copy()
            for delta in staged.deltas[name]:
                checked_apply(delta, bits)
            _check_foreign(staged, name, bits)
            return state_hash.digest_of(bits)

        changed = dict(zip(staged.changed, self._pool.map(digest, staged.changed), strict=True))
        after = self._now | changed
        if staged.expected.state_hash not in {None, state_hash.combined(after, staged.layout)}:
            raise Corrupt(f"{self._directory} is not what version {staged.plan.target} builds on")
        return after

    def _advance(self, staged: Staged, after: Digests) -> int:
        """Writes the tensors that differ and verifies all; returns how many were written."""
        if self._checkpoint is None or self._checkpoint.layout() != staged.layout:
            return self._rebuild(staged, after)
        behind = [name for name in staged.changed if self._now.get(name) != after[name]]
        if behind or self.held is None:
            self._begin(staged, after)
            self._receiver.settle(_only(staged, behind), self._checkpoint)
        return len(behind)

    def _rebuild(self, staged: Staged, after: Digests) -> int:
        """New files: the first pull, other tensors than before, or files that are broken."""
        if staged.full is None:
            raise ValueError("files are built from a full checkpoint only")
        self._begin(staged, after)
        self._checkpoint = None
        write_checkpoint(self._directory, staged.layout, staged.full.__getitem__)
        self._checkpoint = Checkpoint(self._directory)
        check_state(staged.expected, staged.layout, self._checkpoint.bits, self._pool)
        return len(after)

    def _begin(self, staged: Staged, after: Digests) -> None:
        base = self.held if staged.full is None else None
        record = Applying(
            version=staged.plan.target,
            state_hash=state_hash.combined(after, staged.layout),
            base_version=base.version if base else None,
            base_state_hash=base.state_hash if base else None,
            sequence=self._next_sequence(),
            before=base.digests if base else {},
            after=after,
        )
        write_record(self._directory, record)
        self._record = record

    def _end(self, version: WeightVersion, digests: Digests) -> Held:
        """The files are verified; where they were this version already, nothing is written."""
        held = self.held
        if held is None or (held.version, held.digests) != (version, digests):
            held = Held(
                version=version,
                state_hash=self._combined(digests),
                sequence=self._next_sequence(),
                digests=digests,
            )
            write_record(self._directory, held)
        self._record, self._now = held, digests
        return held

    def _next_sequence(self) -> int:
        return 1 if self._record is None else self._record.sequence + 1

    def _digests(self) -> Digests:
        if self._checkpoint is None:
            return {}
        return state_hash.digests_of(self._checkpoint.layout(), self._checkpoint.bits, self._pool)

    def _combined(self, digests: Digests) -> str:
        """No state's hash where the digests are of other tensors than the files'."""
        if self._checkpoint is None or digests.keys() != self._checkpoint.layout().keys():
            return ""
        return state_hash.combined(digests, self._checkpoint.layout())


def _locked(directory: Path) -> IO[bytes]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / _LOCK_FILE).open("wb")
    except OSError as error:
        raise storage_error(error, directory) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(f"another receiver keeps {directory} already") from error
    return lock


def _doubted(held: Held) -> Applying:
    """Files that changed by themselves are no version until they are that one again."""
    return Applying(
        version=held.version,
        state_hash=held.state_hash,
        base_version=None,
        base_state_hash=None,
        sequence=held.sequence + 1,
        before={},
        after=held.digests,
    )


def _only(staged: Staged, names: Collection[str]) -> Staged:
    """The same state with fewer tensors to write: the others hold it already."""
    if staged.full is not None:
        return replace(staged, full={name: staged.full[name] for name in names})
    return replace(staged, deltas={name: staged.deltas[name] for name in names})


def _check_foreign(staged: Staged, name: str, bits: Bits) -> None:
    """A foreign store has no hash of the whole state, but checksums of what it changed."""
    if name in staged.expected.checksums:
        algorithm, checksum = staged.expected.checksums[name]
        if state_hash.foreign_checksum(algorithm, bits) != checksum:
            raise Corrupt(f"{name}: not the {algorithm} checksum that was published")
