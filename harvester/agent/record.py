"""A slot's files on disk: its journal, line by line, and its durable state.

Neither ever stops the agent. Where one cannot be written `fault` says why, once in the log and at
every beat to the policy; both are tried again until there is room.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from harvester.agent.state_file import StateFile
from harvester.contracts.errors import Corrupt
from harvester.contracts.journal import DISK_FAULTS, TAKEN, JournalWriter, Opened
from harvester.policy.effects import Effect
from harvester.policy.idle_forecast import ForecastState, IdleForecaster
from harvester.policy.sample import SlotSample
from harvester.policy.slot import SlotPolicy

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
_SAVE_S = 60.0
"""Interval at which an unchanged state is saved ..."""
_SAVE_SPENT_S = 1.0
"""... and one with new production misses. A slot that resumes stays closed for longer."""


class SlotRecord:
    def __init__(
        self,
        slot: str,
        journal: Path,
        *,
        max_bytes: int,
        state: StateFile,
        first_line: Callable[[], Opened],
    ) -> None:
        self._slot = slot
        self._path = journal
        self._max_bytes = max_bytes
        self._state = state
        self._first_line = first_line
        self._journal: JournalWriter | None = None
        self._journal_fault = self._state_fault = self._logged = ""
        self._retry_at_s = self._resave_at_s = 0.0
        self._saved: tuple[object, ...] | None = None
        self._saved_at_s = self._saved_misses = 0.0
        self._missing = 0
        self.missing_total = 0
        """Decisions missing in the journal."""
        self.saved = False
        """Whether this run of the agent is on disk: else the next one has its number."""

    @property
    def fault(self) -> str:
        """Why something cannot be written; "" while all can."""
        return self._journal_fault or self._state_fault

    def resume(self, policy: SlotPolicy, *, now: float) -> ForecastState | None:
        """Restore an earlier agent's state; an unknown one quarantines and spends the budget.
        Returns the learned seasons; an unknown state has none."""
        try:
            left = self._state.load(now=now)
            if left is not None:
                policy.resume(left, now=now)
                return left.forecast
            if self._path.exists() and self._path.stat().st_size:
                raise Corrupt("there is a journal but no state file")
        except Corrupt as error:
            _log.error("slot %s: history not known: %s", self._slot, error)
            self._state.put_aside()
            policy.quarantine(f"history not known: {error}")
            policy.guards.budget.lose_history(now=now)
        return None

    def begin(self) -> None:
        """Write the first line. Raises OSError for faults that do not pass by themselves."""
        try:
            self._begin()
        except OSError as error:
            if error.errno not in DISK_FAULTS:
                raise
            self._journal_fault = _fault_of("journal", error)
        self._log_fault()

    def look(self, *, now: float) -> bool:
        """Before a beat, once a second: whether the journal is still where a replay finds it, and
        another try after a fault. Returns whether it looked."""
        if now < self._retry_at_s:
            return False
        self._retry_at_s = now + _RETRY_S
        if self._journal_fault:
            self.reopen()
        elif self._journal is not None and not self._journal.in_place:
            # The state may be gone too: it is saved at once.
            self._journal_fault, self._saved = f"journal: {TAKEN}", None
            self._log_fault()
            self._journal.give_up()
            self._journal = None
        return True

    def reopen(self) -> None:
        """Go on with a first line, which holds the whole state."""
        try:
            self._begin()
            self._journal_fault = ""
        except OSError as error:
            self._journal_fault = _fault_of("journal", error)
        self._log_fault()

    def decided(self, *, now: float, sample: SlotSample, effects: tuple[Effect, ...]) -> str:
        """Why these effects are not recorded; "" if they are."""
        if self._journal is None or self._journal_fault:
            return self._miss()
        try:
            self._journal.decided(now=now, sample=sample, effects=effects)
        except OSError as error:
            self._journal_fault = _fault_of("journal", error)
            self._log_fault()
            return self._miss()
        if self._journal.full:
            self.reopen()
        return ""

    def save(
        self, policy: SlotPolicy, forecaster: IdleForecaster, *, now: float, last: bool = False
    ) -> None:
        """Save the durable state when it is due: at once after a changed verdict."""
        verdicts, (_, misses, _) = policy.durable_verdicts, policy.accounted
        patience_s = _SAVE_S if misses == self._saved_misses else _SAVE_SPENT_S
        due = last or verdicts != self._saved or now - self._saved_at_s >= patience_s
        if not due or (now < self._resave_at_s and not last):
            return
        try:
            state = msgspec.structs.replace(policy.durable(), forecast=forecaster.state())
            self._state.save(state, now=now)
        except OSError as error:
            self._state_fault, self._resave_at_s = _fault_of("state", error), now + _RETRY_S
        else:
            self._state_fault, self._saved, self.saved = "", verdicts, True
            self._saved_at_s, self._saved_misses = now, misses
        self._log_fault()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _begin(self) -> None:
        line = msgspec.structs.replace(self._first_line(), missing=self._missing)
        if self._journal is None:
            self._journal = JournalWriter(self._path, max_bytes=self._max_bytes, packed=True)
        if self._journal.full:
            self._journal.rotate(line)
        else:
            self._journal.opened(line)
        self._missing = 0

    def _miss(self) -> str:
        self._missing += 1
        self.missing_total += 1
        return self.fault

    def _log_fault(self) -> None:
        """Log each change of the fault once."""
        if self.fault == self._logged:
            return
        if self.fault:
            _log.error("slot %s is withdrawn: %s", self._slot, self.fault)
        else:
            _log.warning(
                "slot %s: journal and state are written again; %d decisions are missing in all",
                self._slot,
                self.missing_total,
            )
        self._logged = self.fault


def _fault_of(what: str, error: OSError) -> str:
    return f"{what}: {error.strerror or error}"
