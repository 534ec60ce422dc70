"""The shell around the ledger of error budgets: its time, its rows on disk, reports and allotments.

An allotment is on disk before it is sent: a restarted scheduler knows what slots may still spend.
"""

import logging
import sqlite3
from collections.abc import Iterable

from harvester.contracts.clock import Clock
from harvester.contracts.ids import Epoch
from harvester.contracts.wire.error_budget import Allotment
from harvester.contracts.wire.leases import SlotOffer
from scheduler.gateway.gateway_state import SchedulerState
from scheduler.gateway.policy.budget_ledger import SharedBudget

_log = logging.getLogger(__name__)


class BudgetAllotments:
    def __init__(self, state: SchedulerState, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._ledger, kept_at_s = state.budgets()
        self.fault = ""
        """Why budgets cannot be stored; "" while they can."""
        self._from_s = clock.now() - kept_at_s

    def report(self, offers: Iterable[SlotOffer]) -> None:
        """Take in what agents report beside their offers."""
        now = self._now()
        for offer in offers:
            if offer.budget is not None:
                slot = f"{offer.node}.{offer.slot}"
                self._ledger.observe(offer.budget, slot=slot, epoch=offer.epoch, now=now)
        self._ledger.forget(now=now)
        self._keep(now)

    def allot(self, offer: SlotOffer | None, *, epoch: Epoch | None = None) -> Allotment | None:
        """Allotment for a new lease of the slot, or for the renewal of its lease of this epoch.
        None for an agent that reports no budget, and while nothing can be stored: a slot without
        an allotment spends nothing new."""
        if offer is None or offer.budget is None:
            return None
        now = self._now()
        report = offer.budget
        allotment = self._ledger.allot(report.service, report.life, epoch=epoch, now=now)
        return allotment if self._keep(now) else None

    def exhausted(self, offer: SlotOffer) -> bool:
        """Whether the slot's service has no error budget left."""
        report = offer.budget
        return report is not None and self._ledger.budget(report.service, now=self._now()).exhausted

    def all(self) -> list[SharedBudget]:
        return self._ledger.budgets(now=self._now())

    def _keep(self, now: float) -> bool:
        try:
            self._state.keep_budgets(self._ledger, at_s=now)
        except sqlite3.Error as error:
            if not self.fault:
                _log.error("error budgets cannot be stored, and none is allotted: %s", error)
            self.fault = str(error)
            return False
        self.fault = ""
        return True

    def _now(self) -> float:
        return self._clock.now() - self._from_s
