"""Keeps one local checkpoint directory at a version of a store, through kills and broken payloads.

    follower = Follower(Receiver("/weights/job-a"), "/local/policy")
    pulled = follower.pull()

Before the first byte changes, the new digest of every tensor is known and their combined hash is
the published one; the record says `applying` until the files themselves have been hashed. A pull
that finds an interrupted apply finishes it first.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements import state_hash
from weightsync.elements.bits import Bits
from weightsync.encoding.delta import apply_all
from weightsync.layout.apply_journal import Applying, Digests, Held
from weightsync.receive.checkpoint_directory import CheckpointDirectory
from weightsync.receive.staged import Staged, check_state
from weightsync.receiver import Receiver
from weightsync.transport.directory import local_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Result of one pull; the directory holds `version` now."""

    version: WeightVersion
    state_hash: str
    bytes_read: int
    tensors_written: int
    from_full: bool
    mended: bool
    """Whether the directory held no version before: an apply was interrupted, or a file had
    changed."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """The next state, verified on copies; the directory still holds the one before."""

    staged: Staged
    state_hash: str
    digests: Digests
    """xxh3-128 of every tensor after the write."""


class Follower(AbstractContextManager["Follower"]):
    """Owns one directory; a lock keeps a second owner out. Not thread-safe.

    After an exception `held` shows the directory's state: the old version, or None until the next
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
        """Raises ConfigError if the directory has another owner or holds other weights."""
        if not isinstance(receiver, Receiver):
            raise ConfigError(f"receiver {receiver!r}: give Receiver(store)")
        if receiver.is_partial:
            raise ConfigError("a checkpoint directory holds whole models: give no selection")
        self._receiver = receiver
        self._is_closed = False
        self._clock = clock or MonotonicClock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weight-follow")
        try:
            self._directory = CheckpointDirectory(local_path(directory), self._pool)
        except BaseException:
            self._pool.shutdown()
            raise
        if (held := self.held) is not None:
            receiver.adopt(held.version, held.state_hash)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory's lock; a later `pull` raises ConfigError."""
        self._is_closed = True
        self._pool.shutdown()
        self._directory.close()

    @property
    def held(self) -> Held | None:
        """Record of the directory's version; None while it holds no version."""
        return self._directory.held

    @property
    def interrupted(self) -> bool:
        """Whether the directory has content but no version: the next `pull` repairs it."""
        kept = self._directory
        return self.held is None and not (kept.record is None and kept.checkpoint is None)

    def newer(self, *, wait_s: float) -> WeightVersion | None:
        """The newest version if it differs from the held one or may be of another run, else None.

        Waits for it up to `wait_s` if the source announces versions; other sources are read once.
        """
        held = None if self.held is None else self.held.version
        return self._receiver.newer(held, wait_s=wait_s if self.announces else 0.0)

    @property
    def announces(self) -> bool:
        """Whether `newer` waits."""
        return self._receiver.announces

    def pull(self, version: WeightVersion | None = None) -> Pulled:
        """Bring the directory to `version`, or to the newest one.

        Raises Receiver's errors; Stale if the newest version is older than the held one (give
        `version` to go back) and from the same run of a trainer; Exhausted if the disk is full.
        """
        if self._is_closed:
            raise ConfigError(
                f"this follower of {self._directory.path} is closed: make another one"
            )
        started = self._clock.now()
        mended, rolled, rolled_bytes = self.interrupted, 0, 0
        if self.held is None:
            self._directory.examine()
            rolled, rolled_bytes = self._roll_forward()
        coming = self._newest_coming() if version is None else self._coming(version)
        plan = coming.staged.plan
        written = self._advance(coming)
        held = self._directory.end(plan.target, coming.state_hash, coming.digests)
        self._receiver.wrote_steps(coming.staged)
        return Pulled(
            version=held.version,
            state_hash=held.state_hash,
            bytes_read=rolled_bytes + coming.staged.bytes_read,
            tensors_written=rolled + written,
            from_full=coming.staged.full is not None,
            mended=mended,
            seconds=self._clock.now() - started,
        )

    def _newest_coming(self) -> _Coming:
        """The newest state; one that was pruned while it was read gives way to a newer one."""
        for _ in range(3):  # Each version is read from its beginning.
            target = self._target()
            try:
                return self._coming(target)
            except Stale:
                if self._target() == target:
                    raise
        return self._coming(self._target())

    def _target(self) -> WeightVersion:
        newest = self._receiver.latest()
        if newest is None:
            raise ConfigError(
                "the store holds no version yet: publish one first (a server's: .../stores/NAME)"
            )
        held = None if self.held is None else self.held.version
        if held is None or newest >= held or self._receiver.was_replaced(held, newest):
            return newest
        raise Stale(
            f"the store's newest version is {newest} and {self._directory.path} holds "
            f"{held}: check the store's address, or name the version to go back to"
        )

    def _roll_forward(self) -> tuple[int, int]:
        """Finish an interrupted apply if no tensor is torn; otherwise a full checkpoint will.
        Returns the tensors written and the bytes read for them."""
        record, checkpoint = self._directory.record, self._directory.checkpoint
        if not isinstance(record, Applying) or checkpoint is None:
            return 0, 0
        behind = record.behind(self._directory.digests)
        if behind is None or self._directory.contents_hash(record.after) != record.contents_hash:
            return 0, 0
        size_bytes = 0
        try:
            if behind:
                layout = checkpoint.layout()
                staged = self._receiver.prepare(record.base_version, record.version, held=layout)
                published = staged.plan.manifest.state_hash or record.state_hash
                if staged.full is not None or published != record.state_hash:
                    return 0, 0
                if not staged.deltas.keys() >= set(behind):
                    return 0, 0
                size_bytes = staged.bytes_read
                self._receiver.apply(_only(staged, behind), checkpoint)
            checkpoint.finish(record.after)
        except RoseMuxError:
            self._directory.examine()
            return 0, 0
        self._directory.end(record.version, record.state_hash, record.after)
        return len(behind), size_bytes

    def _coming(self, target: WeightVersion) -> _Coming:
        """The new state, by deltas from the held version, or from a full checkpoint."""
        held = self.held
        if held is not None and held.version <= target:
            checkpoint = self._directory.checkpoint
            layout = None if checkpoint is None else checkpoint.layout()
            staged = self._receiver.prepare(held.version, target, held=layout)
            if staged.full is None:
                try:
                    return self._tried_on_copies(staged)
                except Corrupt:
                    # The held state is not the one that the chain builds on, or a delta is damaged.
                    self._receiver.doubt(staged.plan)
                    staged = self._receiver.prepare(None, target)
        else:
            staged = self._receiver.prepare(None, target)
        if staged.full is None:
            raise Corrupt(f"version {target} leads to no full checkpoint")
        digests = state_hash.digests_of(
            staged.full, staged.layout, staged.full.__getitem__, self._pool
        )
        published = staged.expected.state_hash or state_hash.combined(digests, staged.layout)
        return _Coming(staged=staged, state_hash=published, digests=digests)

    def _tried_on_copies(self, staged: Staged) -> _Coming:
        """Apply a chain to copies. Raises Corrupt if the result is not the published state."""
        checkpoint = self._directory.checkpoint
        if checkpoint is None or checkpoint.layout() != staged.layout:
            raise Corrupt(f"{self._directory.path} holds other tensors than the store")
        digests = dict(self._directory.digests)

        def after(name: str) -> Bits:
            if name not in staged.deltas:
                return checkpoint.bits(name)
            bits = checkpoint.bits(name).copy()
            digests[name] = apply_all(staged.deltas[name], bits, hashed=True)
            return bits

        published = check_state(staged.expected, staged.layout, after, self._pool)
        staged = replace(staged, tried=True)
        return _Coming(staged=staged, state_hash=published, digests=digests)

    def _advance(self, coming: _Coming) -> int:
        """Write the tensors that differ and verify all; returns the number written."""
        staged, kept = coming.staged, self._directory
        if kept.checkpoint is None or kept.checkpoint.layout() != staged.layout:
            return self._rebuild(coming)
        behind = [n for n in staged.changed if kept.digests.get(n) != coming.digests[n]]
        if behind or kept.held is None:
            self._begin(coming)
            self._receiver.settle(_only(staged, behind), kept.checkpoint)
        return len(behind)

    def _rebuild(self, coming: _Coming) -> int:
        """Write new files: the first pull, a changed layout, or broken files."""
        staged = coming.staged
        if staged.full is None:
            raise ValueError("files are built from a full checkpoint only")
        self._begin(coming)
        files = self._directory.replace_files(staged.layout, staged.full.__getitem__)
        check_state(staged.expected, staged.layout, files.bits, self._pool)
        return len(coming.digests)

    def _begin(self, coming: _Coming) -> None:
        staged = coming.staged
        self._directory.begin(
            staged.plan.target,
            coming.state_hash,
            state_hash.combined(coming.digests, staged.layout),
            coming.digests,
            base=self.held if staged.full is None else None,
        )


def _only(staged: Staged, names: Collection[str]) -> Staged:
    """The same staging without the tensors that already hold their new state."""
    if staged.full is not None:
        layout = {name: staged.layout[name] for name in names}
        return replace(staged, full=staged.full.held(layout))
    return replace(staged, deltas={name: staged.deltas[name] for name in names})
