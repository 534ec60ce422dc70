"""Records what a policy decided: one journal file per policy, rotated with its snapshot.

A journal that cannot be written costs decisions in the journal, never one of their effects.
"""

import logging
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from harvester.contracts.journal import DISK_FAULTS, TAKEN, JournalWriter, Opened, config_hash
from harvester.distribution import rosemux_version

_log = logging.getLogger(__name__)
_LOOK_S = 1.0


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
        """`snapshot` is the state that the policy was restored to, where it does not begin new.

        Raises OSError for faults that do not pass by themselves.
        """
        self.policy = policy
        """The policy whose snapshot begins a new file."""
        self.missing = 0
        """Decisions that could not be written since the last one that was."""
        self.missing_total = 0
        """Decisions without a line in the journal."""
        self.fault = ""
        """Why the journal cannot be written; "" while it can."""
        self._config = config
        self._path = None if directory is None else directory / f"{policy.NAME}.jsonl"
        self._max_bytes = max_bytes
        self._writer: JournalWriter | None = None
        """Also None before the first line."""
        self._look_at_s = now
        try:
            self._begin(snapshot, now)
        except OSError as error:
            if error.errno not in DISK_FAULTS:
                raise
            self._failed(error.strerror or str(error))

    def decided(
        self, *, now: float, sample: msgspec.Struct, effects: tuple[msgspec.Struct, ...]
    ) -> dict[str, Any] | None:
        """The snapshot with which the next file begins, if this decision filled the file or earlier
        decisions are missing. None if it cannot be written: the decision counts as missing, and the
        next try is a second later.
        """
        if self._path is None:
            return None
        self.missing += 1
        self.missing_total += 1
        try:
            if self._writer is not None and self.missing == 1:
                self._writer.decided(now=now, sample=sample, effects=effects)
                self.missing, self.missing_total = 0, self.missing_total - 1
                if not self._writer.full:
                    return None
            # A snapshot of everything for each decision would cost more than the decisions.
            if self.fault and now < self._look_at_s:
                return None
            snapshot = self.policy.snapshot()
            self._begin(snapshot, now)
        except OSError as error:
            self._look_at_s = now + _LOOK_S
            self._failed(error.strerror or str(error))
            return None
        return snapshot

    def look(self, *, now: float) -> dict[str, Any] | None:
        """Once a second: whether the journal is still where a replay finds it, and another try
        after a fault, also where nothing is decided. Returns what `decided` does."""
        if now < self._look_at_s:
            return None
        self._look_at_s = now + _LOOK_S
        if self._writer is not None and not self._writer.in_place:
            self._writer.give_up()
            self._writer = None
            # The number of decisions that went with the file is not known: they count as one.
            self.missing, self.missing_total = self.missing + 1, self.missing_total + 1
            self._failed(TAKEN)
        if not self.fault:
            return None
        snapshot = self.policy.snapshot()
        try:
            self._begin(snapshot, now)
        except OSError as error:
            self._failed(error.strerror or str(error))
            return None
        return snapshot

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _begin(self, snapshot: dict[str, Any] | None, now: float) -> None:
        """Writes a first line, from which the journal goes on."""
        if self._path is None:
            return
        line = self._opened(snapshot, now)
        if self._writer is None:
            writer = JournalWriter(self._path, max_bytes=self._max_bytes)
            try:
                writer.opened(line)
            except OSError:
                writer.close()
                raise
            self._writer = writer
        elif self._writer.full:
            self._writer.rotate(line)
        else:
            self._writer.opened(line)
        if self.fault:
            notice = "%s: decisions are journalled again; %d are missing in all"
            _log.warning(notice, self.policy.NAME, self.missing_total)
        self.missing, self.fault = 0, ""

    def _failed(self, why: str) -> None:
        if not self.fault:
            _log.error("%s: decisions are not journalled: %s", self._path, why)
        self.fault = why

    def _opened(self, snapshot: dict[str, Any] | None, now: float) -> Opened:
        return Opened(
            actor="scheduler",
            policy=self.policy.NAME,
            config=self._config,
            config_hash=config_hash(self._config),
            snapshot=snapshot,
            missing=self.missing,
            t_s=now,
            version=rosemux_version(),
        )
