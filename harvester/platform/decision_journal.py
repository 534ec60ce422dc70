"""The journal of a policy that runs: written where it can be, tried again each second where not.

A journal that cannot be written costs lines, never the process. Its `fault` says why; what that
means for the policy's effects is the caller's decision.
"""

import math
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from harvester.contracts.journal import DISK_FAULTS, TAKEN, JournalWriter, Opened, config_hash
from harvester.distribution import rosemux_version

RETRY_S = 1.0


class JournalledPolicy(Protocol):
    NAME: ClassVar[str]

    def snapshot(self) -> dict[str, Any]: ...


class DecisionJournal:
    """One file, which goes on with the policy's snapshot where it is rotated or lacks decisions."""

    def __init__(
        self,
        path: Path | None,
        policy: JournalledPolicy,
        config: dict[str, Any],
        *,
        actor: str,
        max_bytes: int,
        packed: bool = False,
    ) -> None:
        """Records nothing without a path."""
        self.policy = policy
        """The policy whose snapshot begins the next file."""
        self.missing = 0
        """Decisions that could not be written since the last one that was."""
        self.missing_total = 0
        """Decisions without a line in the journal."""
        self.fault = ""
        """Why the journal cannot be written; "" while it can."""
        self._path = path
        self._actor, self._config = actor, config
        self._restart_needed: tuple[str, ...] = ()
        self._max_bytes, self._packed = max_bytes, packed
        self._writer: JournalWriter | None = None
        self._follows = False
        """Whether the next decision follows from the last first line and the lines after it."""
        self._retry_at_s = -math.inf

    def begin(self, snapshot: dict[str, Any] | None, *, now: float) -> None:
        """Write the first line; `snapshot` is the state to which the policy was restored, None if
        it is new. Raises OSError for faults that do not pass by themselves."""
        try:
            self._go_on(snapshot, now)
        except OSError as error:
            if error.errno not in DISK_FAULTS:
                raise
            self._failed(error, now)

    def decided(
        self, *, now: float, sample: msgspec.Struct, effects: tuple[msgspec.Struct, ...]
    ) -> dict[str, Any] | None:
        """The snapshot with which the journal goes on, if this decision filled the file or earlier
        ones are missing; else None. A decision that cannot be written counts as missing."""
        if self._path is None:
            return None
        self._miss()
        if self._writer is not None and self._follows and self.missing == 1:
            try:
                self._writer.decided(now=now, sample=sample, effects=effects)
            except OSError as error:
                self._failed(error, now)
                return None
            self.missing, self.missing_total = 0, self.missing_total - 1
            if not self._writer.full:
                return None
        # A snapshot of everything for each decision would cost more than the decisions.
        return None if self.fault and now < self._retry_at_s else self.begin_anew(now=now)

    def check(self, *, now: float) -> dict[str, Any] | None:
        """Once a second, also where nothing is decided: another try after a fault, and whether the
        journal is still where a replay finds it. Returns what `decided` does."""
        if now < self._retry_at_s:
            return None
        self._retry_at_s = now + RETRY_S
        retries = bool(self.fault)
        if self._writer is not None and not self._writer.in_place:
            self._writer.give_up()
            self._writer, self._follows = None, False
            # The number of decisions that went with the file is not known: they count as one.
            self._miss()
            self._change(TAKEN)
        return self.begin_anew(now=now) if retries else None

    def reconfigure(
        self,
        policy: JournalledPolicy,
        config: dict[str, Any],
        *,
        restart_needed: tuple[str, ...],
        now: float,
    ) -> None:
        """`restart_needed`: fields of the configuration file that are not in force."""
        self.policy, self._config, self._restart_needed = policy, config, restart_needed
        self._follows = False
        self.begin_anew(now=now)

    def begin_anew(self, *, now: float) -> dict[str, Any] | None:
        """Go on with a first line that holds the whole state: returned, None without success."""
        snapshot = self.policy.snapshot()
        try:
            self._go_on(snapshot, now)
        except OSError as error:
            self._failed(error, now)
            return None
        return snapshot

    def log_fault(self) -> None:
        """Called when `fault` has changed."""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _go_on(self, snapshot: dict[str, Any] | None, now: float) -> None:
        if self._path is None:
            return
        line = Opened(
            actor=self._actor,
            policy=self.policy.NAME,
            config=self._config,
            config_hash=config_hash(self._config),
            snapshot=snapshot,
            restart_needed=self._restart_needed,
            missing=self.missing,
            t_s=now,
            version=rosemux_version(),
        )
        if self._writer is None:
            self._writer = JournalWriter(self._path, max_bytes=self._max_bytes, packed=self._packed)
        if self._writer.full:
            self._writer.rotate(line)
        else:
            self._writer.opened(line)
        self.missing, self._follows = 0, True
        self._change("")

    def _miss(self) -> None:
        self.missing += 1
        self.missing_total += 1

    def _failed(self, error: OSError, now: float) -> None:
        self._retry_at_s = now + RETRY_S
        self._change(error.strerror or str(error))

    def _change(self, fault: str) -> None:
        if fault != self.fault:
            self.fault = fault
            self.log_fault()
