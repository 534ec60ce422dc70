"""Records what a policy decided: one journal file per policy, rotated with its snapshot."""

from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from harvester.contracts.journal import JournalWriter, Opened, config_hash


class JournalledPolicy(Protocol):
    NAME: ClassVar[str]

    def snapshot(self) -> dict[str, Any]: ...


class DecisionLog:
    """Journal of a policy's decisions; without a directory it records nothing."""

    def __init__(
        self,
        directory: Path | None,
        policy: JournalledPolicy,
        config: dict[str, Any],
        *,
        max_bytes: int,
        now: float,
        snapshot: dict[str, Any] | None = None,
    ) -> None:
        """`snapshot` is the state that the policy was restored to, where it does not begin new."""
        self.policy = policy
        """The policy whose snapshot begins a new file."""
        self.missing = 0
        """Decisions that could not be written since the last one that was."""
        self._config = config
        self._writer: JournalWriter | None = None
        if directory is not None:
            path = directory / f"{policy.NAME}.jsonl"
            self._writer = JournalWriter(path, max_bytes=max_bytes)
            self._writer.opened(self._opened(snapshot, now))

    def decided(
        self, *, now: float, sample: msgspec.Struct, effects: tuple[msgspec.Struct, ...]
    ) -> dict[str, Any] | None:
        """The snapshot that what follows begins with, where this has filled the file or decisions
        before it are missing.

        Raises OSError where it cannot be written.
        """
        if self._writer is None:
            return None
        self.missing += 1
        if self.missing == 1:
            self._writer.decided(now=now, sample=sample, effects=effects)
            self.missing = 0
            if not self._writer.full:
                return None
        snapshot = self.policy.snapshot()
        if self._writer.full:
            self._writer.rotate(self._opened(snapshot, now))
        else:
            self._writer.opened(self._opened(snapshot, now))
        self.missing = 0
        return snapshot

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self, snapshot: dict[str, Any] | None, now: float) -> Opened:
        return Opened(
            actor="scheduler",
            policy=self.policy.NAME,
            config=self._config,
            config_hash=config_hash(self._config),
            snapshot=snapshot,
            missing=self.missing,
            t_s=now,
        )
