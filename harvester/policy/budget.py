"""The part of production's error budget that harvesting may spend, and when it must stop.

The proof's withheld slices show what production misses by itself, hour by hour: misses that surely
exceed these are charged to harvesting. Without a proof every miss beside a guest step is. The
allowance is `share * (1 - SLO) * requests` of the last 28 days; time without known traffic grants
none, so an unknown history counts as spent. A slot whose scheduler keeps the budget of its service
has an allotment in the place of the allowance, in force while its lease is. Harvesting also stops
at half of the burn rates at which SREs page (SRE Workbook, "Alerting on SLOs": 14.4 over 1 h and 5
m, 6 over 6 h and 30 m).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from harvester.contracts.served import (
    BUDGET_HOURS,
    COUNTS,
    HOUR_S,
    NONE_SERVED,
    Served,
    charged_misses,
)
from harvester.contracts.wire.error_budget import Allotment
from harvester.policy.own_misses import believable_rate, late_rate
from harvester.policy.settings import BudgetSettings

_MINUTE_S = 60.0
_MINUTES = 6 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnWindow:
    """Stop while both windows burn faster than `rate` times the whole budget's even pace."""

    rate: float
    long_minutes: int
    short_minutes: int

    @property
    def guard(self) -> str:
        return f"burn_{self.long_minutes // 60}h"


BURN_WINDOWS = (
    BurnWindow(rate=14.4 / 2, long_minutes=60, short_minutes=5),
    BurnWindow(rate=6.0 / 2, long_minutes=360, short_minutes=30),
)
RESUME_RATIO = 0.5
"""A burn stop ends below this share of the rate that caused it."""


_UNPROVEN_WITHHELD = 6.0
"""Expected withheld slices, the sum of their probabilities, above which the lack of any withheld
request is not chance: that has a probability of 0.25 %."""
_SLICES = "slices", "withheld_slices"
_KEPT = *COUNTS, *_SLICES
_REQUESTS = "granted", "granted_misses", "withheld", "withheld_misses"
_BEATS = "granted_beats", "granted_late_beats", "withheld_beats", "withheld_late_beats"


class Ring(msgspec.Struct, kw_only=True):
    """Counts per period in constant memory; `head` is the period's number since time zero."""

    period_s: float
    requests: list[float]
    misses: list[float]
    granted: list[float] = []
    granted_misses: list[float] = []
    granted_beats: list[float] = []
    granted_late_beats: list[float] = []
    withheld: list[float] = []
    withheld_misses: list[float] = []
    withheld_beats: list[float] = []
    withheld_late_beats: list[float] = []
    slices: list[float] = []
    """Slices of the proof, also parts of them."""
    withheld_slices: list[float] = []
    """Mean number of them that are withheld, by their chances."""
    head: int = -1

    def __post_init__(self) -> None:
        size = len(self.requests)
        for name in _KEPT[2:]:
            if not getattr(self, name):
                setattr(self, name, [0] * size)
        if not self.period_s > 0 or not size or any(len(each) != size for each in self._counts):
            raise ValueError("a ring needs a period, and all of its counts the same length")

    @property
    def _counts(self) -> tuple[list[float], ...]:
        return tuple(getattr(self, name) for name in _KEPT)

    def moved(self, periods: int) -> "Ring":
        """The same counts, that many periods later."""
        by = periods % len(self.requests)
        turned = {
            name: counts[-by:] + counts[:-by] if by else counts
            for name, counts in zip(_KEPT, self._counts, strict=True)
        }
        return Ring(period_s=self.period_s, head=self.head + periods, **turned)

    def add(self, served: Served, *, slices: float = 0.0, share: float = 0.0, now: float) -> None:
        """`share`: chance with which these slices are withheld."""
        self.advance(now)
        place = self.head % len(self.requests)
        self.slices[place] += slices
        self.withheld_slices[place] += slices * share
        for name in () if served == NONE_SERVED else COUNTS:
            if count := getattr(served, name):
                getattr(self, name)[place] += count

    def advance(self, now: float) -> None:
        period, size = int(now // self.period_s), len(self.requests)
        if period <= self.head:
            return
        for skipped in range(max(self.head + 1, period - size + 1), period + 1):
            for counts in self._counts:
                counts[skipped % size] = 0
        self.head = period

    def periods(self) -> list[Served]:
        """Periods that had requests of both kinds."""
        both = zip(self.granted, self.withheld, strict=True)
        places = [place for place, (one, other) in enumerate(both) if one and other]
        return [Served(**{name: getattr(self, name)[place] for name in COUNTS}) for place in places]

    def last(self, periods: int) -> Served:
        """Sums of the newest `periods` periods, the running one included."""
        return Served(**dict(zip(COUNTS, map(sum, self.newest(COUNTS, periods)), strict=True)))

    def shares(self, periods: int) -> list[float]:
        """Chances with which slices of the newest periods were withheld; 0 where not known."""
        both = zip(*self.newest(_SLICES, periods), strict=True)
        return [withheld / slices if slices else 0.0 for slices, withheld in both]

    def newest(self, names: Sequence[str], periods: int) -> list[list[float]]:
        """Counts of the newest `periods` periods, for each of the names."""
        size = len(self.requests)
        end = self.head % size + 1
        begin = end - min(periods, size)
        each = [getattr(self, name) for name in names]
        if begin >= 0:
            return [counts[begin:end] for counts in each]
        return [counts[begin:] + counts[:end] for counts in each]


def _ring(period_s: float, size: int) -> Ring:
    return Ring(period_s=period_s, requests=[0] * size, misses=[0] * size)


class BudgetState(msgspec.Struct, kw_only=True):
    minutes: Ring = msgspec.field(default_factory=lambda: _ring(_MINUTE_S, _MINUTES))
    hours: Ring = msgspec.field(default_factory=lambda: _ring(HOUR_S, BUDGET_HOURS))
    stopped_at_s: float | None = None
    reason: str = ""
    judged_minute: int = -1
    observed_at_s: float | None = None
    guard: str = ""
    """The guard that stopped harvesting: `error_budget` or a burn's."""
    allotment: Allotment | None = None
    """The allotment taken last; None while no scheduler keeps the service's budget."""
    limit: float | None = None
    """Charged misses that the allotment of the lease in force allows; None without a lease."""
    unknown_at_s: float | None = None
    """Time at which the history was lost: `minimum_misses` count as spent for a whole window."""


class ErrorBudget:
    def __init__(
        self, settings: BudgetSettings, state: BudgetState | None = None, *, proven: bool = True
    ) -> None:
        """`proven`: whether slices are withheld, which show what production misses by itself."""
        self._settings = settings
        self._proven = proven
        self.state = state or BudgetState()
        self._month: tuple[float, float] | None = None
        """Requests and charged misses of 28 days, once asked for since the last beat."""

    @property
    def stopped(self) -> bool:
        return self.state.stopped_at_s is not None

    @property
    def reason(self) -> str:
        return self.state.reason

    @property
    def allowance(self) -> float:
        """Misses that harvesting may cause in the window."""
        return self.allowed_ratio * self._whole()[0]

    @property
    def limit(self) -> float | None:
        """Charged misses above which harvesting stops; None without a lease while a scheduler keeps
        the service's budget: nothing can be spent."""
        return self.allowance if self.state.allotment is None else self.state.limit

    @property
    def allowed_ratio(self) -> float:
        """Misses that harvesting may cause for each request of production."""
        return self._settings.share_ratio * (1 - self._settings.slo_target_ratio)

    def evidence(self, served: Served) -> Served:
        """The counts that a service's budget is charged by."""
        if self._proven:
            return msgspec.structs.replace(served, misses=0.0)
        return Served(requests=served.requests, misses=served.misses)

    @property
    def spent(self) -> float:
        """Misses charged to harvesting in the window."""
        return self._whole()[1]

    def _whole(self) -> tuple[float, float]:
        if self._month is None:
            hours = self.state.hours
            served = hours.last(BUDGET_HOURS)
            if not self._proven:
                charged = served.misses
            else:
                excess = [hour.excess for hour in hours.periods()]
                granted_hours = sum(map(bool, hours.granted))
                charged = charged_misses(served, excess, granted_hours=granted_hours)
            self._month = served.requests, charged
        return self._month

    def burn_rate(self, minutes: int, *, baseline_minutes: int | None = None) -> float:
        """Misses that withheld slices of the baseline (the window itself) do not explain, over the
        even pace of the service's whole budget; 0 under minimum traffic."""
        served, settings = self.state.minutes.last(minutes), self._settings
        misses = served.granted_misses + served.granted_late_beats
        misses = misses if self._proven else served.misses
        least = max(1.0, settings.minimum_requests)
        if served.requests < least or misses < settings.minimum_misses:
            return 0.0
        rate = served.misses / served.requests
        if self._proven:
            ring, baseline = self.state.minutes, baseline_minutes or minutes
            if not any(ring.newest(("withheld",), baseline)[0]):
                # Slices of two minutes leave every fifth hour without a withheld one.
                baseline = _MINUTES
                granted, withheld, due = ring.newest(
                    ("granted", "withheld", "withheld_slices"), baseline
                )
                # Minutes without a lease have slices too.
                missing = sum([n for one, n in zip(granted, due, strict=True) if one])
                if not any(withheld) and missing < _UNPROVEN_WITHHELD:
                    return 0.0
            rate = sum(self._rate_over(names, minutes, baseline) for names in (_REQUESTS, _BEATS))
        return rate / (1 - settings.slo_target_ratio)

    def _rate_over(self, names: Sequence[str], minutes: int, baseline_minutes: int) -> float:
        """Share of late ones among granted requests, beyond production's own believable share."""
        ring = self.state.minutes
        granted, late, *_ = ring.newest(names, minutes)
        if not any(late):
            return 0.0
        baseline = ring.newest((*names, "slices"), baseline_minutes)
        own = believable_rate(*baseline, shares=ring.shares(baseline_minutes))
        return max(0.0, late_rate(granted, late, ring.shares(minutes)) - own)

    def observe(
        self,
        served: Served,
        *,
        now: float,
        slice_s: float = _MINUTE_S,
        withheld_share: float = 0.0,
        leased: bool = False,
        allotment: Allotment | None = None,
    ) -> bool:
        """Fold new counts in; True while harvesting must stop. `slice_s`, `withheld_share`: length
        of the proof's running slice, and the chance with which it was withheld, 0 where not known;
        `allotment`: of the lease."""
        state = self.state
        elapsed_s = 0.0 if state.observed_at_s is None else now - state.observed_at_s
        slices = min(max(0.0, elapsed_s), _MINUTE_S) / slice_s
        state.observed_at_s = now
        self._month = None
        if state.unknown_at_s is not None and now - state.unknown_at_s >= BUDGET_HOURS * HOUR_S:
            state.unknown_at_s = None
        for ring in (state.minutes, state.hours):
            ring.add(served, slices=slices, share=withheld_share, now=now)
        # Without a new miss only time can change the verdict, minute by minute.
        missed = served.misses + served.granted_misses + served.granted_late_beats
        changed = self._follow(allotment, leased=leased)
        if changed or missed > 0 or state.judged_minute != state.minutes.head:
            state.judged_minute = state.minutes.head
            self._judge(now)
        return self.stopped and self._settings.enforced

    def _follow(self, allotment: Allotment | None, *, leased: bool) -> bool:
        """Take the lease's allotment over; True if what may be spent has changed."""
        before, state = self.state.limit, self.state
        if allotment is not None:
            state.limit, changed = allotment.misses, allotment != state.allotment
            state.allotment = allotment
            return changed or state.limit != before
        if not leased or state.allotment is None:
            state.limit = None
        elif state.limit is None:
            # A restarted agent's lease before its renewal, or a scheduler that allots nothing.
            state.limit = self.spent
        return state.limit != before

    def lose_history(self, *, now: float) -> None:
        """Count `minimum_misses` as spent, and stop until traffic has earned as many."""
        self.state.unknown_at_s, self.state.judged_minute = now, -1

    def _judge(self, now: float) -> None:
        state = self.state
        if state.stopped_at_s is None:
            state.guard, state.reason = self._breach(1.0)
            if state.reason:
                state.stopped_at_s = now
        elif (
            now - state.stopped_at_s >= self._settings.hold_s and not self._breach(RESUME_RATIO)[1]
        ):
            state.stopped_at_s = None
            state.guard = state.reason = ""

    @property
    def charge(self) -> tuple[float, float]:
        """Misses charged to harvesting, and the limit above which they stop it: both of the service
        if it has overspent, else of the slot."""
        state, least = self.state, float(self._settings.minimum_misses)
        if self.limit is None:
            return self.spent, self.spent
        if state.allotment is not None:
            service = state.allotment.spent, state.allotment.budget
            # A slot spends no more than the whole error budget of its own requests, whatever a
            # caller allots. The scheduler counts the allotment; future requests raise this bound.
            own = (1 - self._settings.slo_target_ratio) * self._whole()[0]
            return (
                service
                if service[0] > service[1]
                else (self.spent, min(self.limit, max(own, least)))
            )
        if state.unknown_at_s is not None:
            return self.spent + least, self.limit
        # Fewer than the least are no trend.
        return self.spent, max(self.limit, math.nextafter(least, 0.0))

    def _overspent(self) -> str:
        """Why nothing more may be spent in 28 days; empty if something may."""
        (charged, allowed), state = self.charge, self.state
        if charged <= allowed:
            return ""
        if state.allotment is not None and charged == state.allotment.spent:
            return f"{charged:.1f} misses of {allowed:.1f} allowed the service in 28 d"
        word = "allowed" if state.allotment is None else "allotted"
        unknown = "" if state.unknown_at_s is None else ", history not known"
        return f"{charged:.1f} misses of {allowed:.1f} {word} in 28 d{unknown}"

    def _breach(self, strictness: float) -> tuple[str, str]:
        """The guard that is breached, and the reason; empty if none is."""
        if overspent := self._overspent():
            return "error_budget", overspent
        for window in BURN_WINDOWS:
            minutes, least = window.long_minutes, window.rate * strictness
            burns = self.burn_rate(minutes)
            # The short window only tells whether it still burns.
            if burns >= least <= self.burn_rate(window.short_minutes, baseline_minutes=minutes):
                reason = f"budget burns at {burns:.1f} times its pace over {minutes} min"
                return window.guard, reason
        return "", ""
