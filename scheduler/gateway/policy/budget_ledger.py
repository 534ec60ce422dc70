"""Error budgets of services: what harvesting has spent of each, and each leased slot's allotment.

    budget    = share * (1 - SLO) * requests of 28 days, never below the minimum of misses
    spent     = misses charged to the sum of all slots; at least the sum of what each is charged
    allotment = what the slot is charged + its share, by traffic, of what is left
                and never more than what no other slot may still spend

An allotment counts as outstanding until the slot reports a newer one or a later lease epoch. A slot
that falls silent, or comes back without its history (another life), keeps what it might have spent
outstanding for 28 days: unknown history counts as spent. A life that goes on from an earlier copy
(a disk or a machine rolled back) is lost too, and begins a new account. `now` is the ledger's own
time, which passes only while a scheduler runs. Sends nothing and stores nothing itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from harvester.contracts.ids import Epoch
from harvester.contracts.served import BUDGET_HOURS, HOUR_S, Served, charged_misses
from harvester.contracts.wire.error_budget import Allotment, BudgetReport

_FRESH_S = 30.0
"""A leased slot with a newer report shares in the rest of the budget; its lease ends sooner."""
_DOUBTFUL_S = 30.0
"""Reports from before the last one, and no other ones for so long, are of a life that was rolled
back: a late reply comes once, and within the patience of a call."""
_TRAFFIC_HALF_S = 3600.0
"""Half-life of the traffic by which a budget is shared out."""


class LifeKey(msgspec.Struct, frozen=True, order=True):
    service: str
    life: str


class HourKey(msgspec.Struct, frozen=True, order=True):
    service: str
    hour: int


class SharedHour(msgspec.Struct, frozen=True, kw_only=True):
    """One hour of all slots of a production service."""

    served: Served = Served()
    excess: float = 0.0
    """Sum over slots: slots of unlike load are never compared with each other."""


class PendingAllotment(msgspec.Struct, frozen=True, kw_only=True):
    """An allotment that was sent and not yet reported as received."""

    allotment: Allotment
    epoch: Epoch | None
    """Epoch of the lease whose renewal carries it; None for a new lease's."""


class SlotAccount(msgspec.Struct, kw_only=True):
    """One life of one slot."""

    slot: str
    run: int
    seen: Served
    """Counts last reported by this run."""
    heard_s: float
    number: int = 0
    """Number of the newest allotment."""
    charged: float = 0.0
    limit: float | None = None
    """Charged misses at which the slot stops, as last reported; None without a lease."""
    pending: tuple[PendingAllotment, ...] = ()
    hour: int = -1
    in_hour: Served = Served()
    """Counts of the hour `hour`."""
    recent: float = 0.0
    """Requests, each worth half after an hour."""
    allowed_ratio: float = 0.0
    minimum_misses: float = 0.0
    doubted_s: float | None = None
    """Time of a report from before the last one, since which no later one came."""
    counted_run: int = 0
    """Runs up to this one earn nothing: an account before this one may have counted them."""

    @property
    def outstanding(self) -> float:
        """Misses that the slot may still spend, as far as is known."""
        issued = (each.allotment.misses for each in self.pending)
        return max(self.limit or 0.0, self.charged, *issued, 0.0) - self.charged


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBudget:
    """Error budget that the slots of a production service share, in misses of 28 days."""

    service: str
    budget: float
    spent: float
    outstanding: float
    """Allotted and not spent, or lost with a slot's history."""
    known_s: float

    @property
    def exhausted(self) -> bool:
        return self.spent > self.budget


class BudgetLedger:
    def __init__(
        self,
        accounts: dict[LifeKey, SlotAccount] | None = None,
        hours: dict[HourKey, SharedHour] | None = None,
    ) -> None:
        self.accounts = accounts or {}
        self.hours = hours or {}
        self.changed: set[LifeKey | HourKey] = set()
        """Keys of records that are new, changed or gone since they were stored."""
        self._budgets: dict[str, SharedBudget] = {}
        """Known since the last report."""

    def observe(self, report: BudgetReport, *, slot: str, epoch: Epoch, now: float) -> None:
        """Folds in one slot's report. `slot`: its name for people; `epoch`: that of its lease."""
        key = LifeKey(report.service, report.life)
        account = self.accounts.get(key)
        new = Served() if account is None else _increase(account, report)
        if account is not None:
            if new is None and not self._rolled_back(key, account, now):
                return
            forgotten = account.charged - report.charged
            if new is None:
                # Charges of the copy and new ones cannot be told apart.
                self._lose(key, account, account.charged, account.outstanding, now)
            elif report.run > account.run and forgotten > 0:
                self._lose(key, account, forgotten, 0.0, now)
        if account is None or new is None:
            # Counts from before have unknown ages: they earn nothing.
            account, new = _begun(account, report, slot, now), Served()
            self.accounts[key] = account
        account.doubted_s = None
        account.recent *= 0.5 ** ((now - account.heard_s) / _TRAFFIC_HALF_S)
        account.recent += new.requests
        account.slot, account.run, account.seen, account.heard_s = (
            *(slot, report.run, report.served),
            now,
        )
        account.charged, account.limit = report.charged, report.limit
        account.allowed_ratio = report.allowed_ratio
        account.minimum_misses = report.minimum_misses
        account.number = max(account.number, report.number)
        account.pending = tuple(
            each
            for each in account.pending
            if each.allotment.number > report.number and (each.epoch is None or each.epoch >= epoch)
        )
        self._add(key, account, new, int(now // HOUR_S))
        self.changed.add(key)
        self._budgets.pop(report.service, None)

    def _rolled_back(self, key: LifeKey, account: SlotAccount, now: float) -> bool:
        """Whether the life goes on from an earlier copy, after a report that is older than the last
        one."""
        if account.doubted_s is None:
            account.doubted_s = now
            self.changed.add(key)
        return now - account.doubted_s >= _DOUBTFUL_S

    def _lose(
        self, key: LifeKey, account: SlotAccount, charged: float, outstanding: float, now: float
    ) -> None:
        """Keep misses that a life is charged no more, and those that it may have spent unseen, as
        a lost life's: one account for each hour."""
        lost = LifeKey(key.service, f"{key.life}@{int(now // HOUR_S)}")
        if (known := self.accounts.get(lost)) is not None:
            charged, outstanding = charged + known.charged, outstanding + known.outstanding
        limit = charged + outstanding
        self.accounts[lost] = msgspec.structs.replace(
            account, heard_s=now, charged=charged, limit=limit, pending=(), recent=0.0
        )
        self.changed.add(lost)

    def forget(self, *, now: float) -> None:
        """Drop accounts and hours that are older than 28 days."""
        oldest = int(now // HOUR_S) - BUDGET_HOURS
        gone: list[LifeKey | HourKey] = [
            *(key for key, each in self.accounts.items() if each.heard_s < oldest * HOUR_S),
            *(key for key in self.hours if key.hour <= oldest),
        ]
        for key in gone:
            if isinstance(key, LifeKey):
                del self.accounts[key]
            else:
                del self.hours[key]
        if gone:
            self.changed.update(gone)
            self._budgets.clear()

    def allot(
        self, service: str, life: str, *, epoch: Epoch | None = None, now: float
    ) -> Allotment | None:
        """The allotment for a new lease, or for the renewal of this epoch's lease; unchanged until
        the slot has reported it. It allows nothing to a life that may have been rolled back. None
        for a life that has not reported.

        The account must be on disk before the allotment is sent.
        """
        key = LifeKey(service, life)
        account = self.accounts.get(key)
        if account is None:
            return None
        doubted = account.doubted_s is not None
        for sent in account.pending:
            if sent.epoch == epoch and not (doubted and sent.allotment.misses):
                return sent.allotment
        whole = self.budget(service, now=now)
        leased: list[SlotAccount] = []
        left = whole.budget - whole.spent
        for other, each in self._of(service):
            if other != key and each.limit is not None and now - each.heard_s < _FRESH_S:
                leased.append(each)
            elif other != key:
                left -= each.outstanding
        traffic = account.recent + sum(each.recent for each in leased)
        share = account.recent / traffic if traffic > 0 else 1 / (1 + len(leased))
        room = left - sum(each.outstanding for each in leased)
        account.number += 1
        allotment = Allotment(
            number=account.number,
            # If the budget is overdrawn, less than what is charged; otherwise each renewal would
            # permit another overdraft.
            misses=0.0 if doubted else max(0.0, account.charged + min(room, share * left)),
            budget=whole.budget,
            spent=whole.spent,
            known_s=whole.known_s,
        )
        sent = PendingAllotment(allotment=allotment, epoch=epoch)
        account.pending = (*account.pending, sent)
        self.changed.add(key)
        return allotment

    def budget(self, service: str, *, now: float) -> SharedBudget:
        found = self._budgets.get(service)
        if found is None:
            found = self._budgets[service] = self._budget(service, now)
        return found

    def budgets(self, *, now: float) -> list[SharedBudget]:
        return [self._budget(name, now) for name in sorted({key.service for key in self.accounts})]

    def _of(self, service: str) -> Iterable[tuple[LifeKey, SlotAccount]]:
        return ((key, each) for key, each in self.accounts.items() if key.service == service)

    def _budget(self, service: str, now: float) -> SharedBudget:
        accounts = [each for _, each in self._of(service)]
        hours = {key.hour: each for key, each in self.hours.items() if key.service == service}
        served = sum((each.served for each in hours.values()), Served())
        excess = [hours[at].excess for at in sorted(hours) if _compares(hours[at].served)]
        granted_hours = sum(bool(each.served.granted) for each in hours.values())
        # Misses are reported only by slots without proof slices, which have no excess.
        pooled = charged_misses(served, excess, granted_hours=granted_hours) + served.misses
        allowed = min((each.allowed_ratio for each in accounts), default=0.0) * served.requests
        return SharedBudget(
            service=service,
            budget=max(allowed, min((each.minimum_misses for each in accounts), default=0.0)),
            spent=max(pooled, sum(each.charged for each in accounts)),
            outstanding=sum(each.outstanding for each in accounts),
            known_s=now - min(hours) * HOUR_S if hours else 0.0,
        )

    def _add(self, life: LifeKey, account: SlotAccount, new: Served, hour: int) -> None:
        """Count to the service's hour; the slot's excess in it replaces the one before."""
        before = account.in_hour if account.hour == hour else Served()
        account.hour, account.in_hour = hour, before + new
        key = HourKey(life.service, hour)
        known = self.hours.get(key, SharedHour())
        self.hours[key] = SharedHour(
            served=known.served + new,
            excess=known.excess + account.in_hour.excess - before.excess,
        )
        self.changed.add(key)


def _begun(before: SlotAccount | None, report: BudgetReport, slot: str, now: float) -> SlotAccount:
    account = SlotAccount(slot=slot, run=report.run, seen=report.served, heard_s=now)
    if before is not None:
        account.number = before.number
        account.counted_run = max(before.run, before.counted_run)
    return account


def _increase(account: SlotAccount, report: BudgetReport) -> Served | None:
    """Counts since the account's last report; None for a report from before it."""
    if report.run > account.run:
        return report.served if report.run > account.counted_run else Served()
    if report.run < account.run:
        return None
    new = report.served - account.seen
    return new if min(msgspec.structs.astuple(new)) >= 0 else None


def _compares(served: Served) -> bool:
    return bool(served.granted and served.withheld)
