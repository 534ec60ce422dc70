"""A slot's files on disk: its journal, line by line, and its durable state.

Neither ever stops the agent. Where one cannot be written `unrecorded` says why, once in the log and
at every beat to the policy; both are tried again until there is room.
"""

import logging
from pathlib import Path
from typing import Any

import msgspec

from harvester.agent.state_file import StateFile
from harvester.contracts.errors import Corrupt
from harvester.contracts.journal import TAKEN
from harvester.platform.decision_journal import RETRY_S, DecisionJournal
from harvester.policy.idle_forecast import ForecastState, IdleForecaster
from harvester.policy.slot import SlotPolicy

_log = logging.getLogger(__name__)

_SAVE_S = 60.0
"""Interval at which an unchanged state is saved ..."""
_SAVE_SPENT_S = 1.0
"""... and one with new production misses. A slot that resumes stays closed for longer."""


class SlotRecord(DecisionJournal):
    policy: SlotPolicy

    def __init__(
        self, slot: str, journal: Path, policy: SlotPolicy, *, max_bytes: int, state: StateFile
    ) -> None:
        config, actor = msgspec.to_builtins(policy.settings), f"agent:{slot}"
        super().__init__(journal, policy, config, actor=actor, max_bytes=max_bytes, packed=True)
        self._slot = slot
        self._journal = journal
        self._state = state
        self._state_fault = self._logged = ""
        self._resave_at_s = 0.0
        self._saved: tuple[object, ...] | None = None
        self._saved_at_s = self._saved_misses = 0.0
        self.run_saved = False
        """Whether this run of the agent is on disk: else the next one has its number."""

    @property
    def unrecorded(self) -> str:
        """Why something cannot be written; "" while all can."""
        return f"journal: {self.fault}" if self.fault else self._state_fault

    def resume(self, *, now: float) -> ForecastState | None:
        """Restore an earlier agent's state; an unknown one quarantines and spends the budget.
        Returns the learned seasons; an unknown state has none."""
        try:
            left = self._state.load(now=now)
            if left is not None:
                self.policy.resume(left, now=now)
                return left.forecast
            if self._journal.exists() and self._journal.stat().st_size:
                raise Corrupt("there is a journal but no state file")
        except Corrupt as error:
            _log.error("slot %s: history not known: %s", self._slot, error)
            self._state.put_aside()
            self.policy.quarantine(f"history not known: {error}")
            self.policy.guards.budget.lose_history(now=now)
        return None

    def check(self, *, now: float) -> dict[str, Any] | None:
        snapshot = super().check(now=now)
        if self.fault == TAKEN:
            self._saved = None  # The state may be gone too: it is saved at once.
        return snapshot

    def save(self, forecaster: IdleForecaster, *, now: float, last: bool = False) -> None:
        """Save the durable state when it is due: at once after a changed verdict."""
        verdicts, (_, misses, _) = self.policy.durable_verdicts, self.policy.accounted
        patience_s = _SAVE_S if misses == self._saved_misses else _SAVE_SPENT_S
        due = last or verdicts != self._saved or now - self._saved_at_s >= patience_s
        if not due or (now < self._resave_at_s and not last):
            return
        try:
            state = msgspec.structs.replace(self.policy.durable(), forecast=forecaster.state())
            self._state.save(state, now=now)
        except OSError as error:
            self._state_fault = f"state: {error.strerror or error}"
            self._resave_at_s = now + RETRY_S
        else:
            self._state_fault, self._saved, self.run_saved = "", verdicts, True
            self._saved_at_s, self._saved_misses = now, misses
        self.log_fault()

    def log_fault(self) -> None:
        """Log each change of the fault once."""
        if self.unrecorded == self._logged:
            return
        if self.unrecorded:
            _log.error("slot %s is withdrawn: %s", self._slot, self.unrecorded)
        else:
            _log.warning(
                "slot %s: journal and state are written again; %d decisions are missing in all",
                self._slot,
                self.missing_total,
            )
        self._logged = self.unrecorded
