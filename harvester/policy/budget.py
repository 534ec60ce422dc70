"""The part of production's error budget that harvesting may spend, and when it must stop.

Every SLO miss whose request overlapped a guest step counts as harvesting's. The allowance is
`share * (1 - SLO) * requests` of the last 28 days; time without known traffic grants none, so an
unknown history counts as spent. Harvesting also stops at half of the burn rates at which SREs page
(SRE Workbook, "Alerting on SLOs": 14.4 over 1 h and 5 m, 6 over 6 h and 30 m).
"""

from dataclasses import dataclass

import msgspec

from harvester.policy.settings import BudgetSettings

_MINUTE_S = 60.0
_HOUR_S = 3600.0
_MINUTES = 6 * 60
_HOURS = 28 * 24


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnWindow:
    """Stop while both windows burn faster than `rate` times the whole budget's even pace."""

    rate: float
    long_minutes: int
    short_minutes: int


BURN_WINDOWS = (
    BurnWindow(rate=14.4 / 2, long_minutes=60, short_minutes=5),
    BurnWindow(rate=6.0 / 2, long_minutes=360, short_minutes=30),
)
RESUME_RATIO = 0.5
"""A burn stop ends below this share of the rate that caused it."""


class Ring(msgspec.Struct, kw_only=True):
    """Counts per period in constant memory; `head` is the period's number since time zero."""

    period_s: float
    requests: list[float]
    misses: list[float]
    head: int = -1

    def __post_init__(self) -> None:
        if not self.period_s > 0 or not len(self.requests) == len(self.misses) > 0:
            raise ValueError("a ring needs a period and as many requests as misses")

    def moved(self, periods: int) -> "Ring":
        """The same counts, that many periods later."""
        by = periods % len(self.requests)
        requests, misses = (
            counts[-by:] + counts[:-by] if by else counts for counts in (self.requests, self.misses)
        )
        return Ring(
            period_s=self.period_s, requests=requests, misses=misses, head=self.head + periods
        )

    def add(self, *, requests: float, misses: float, now: float) -> None:
        self.advance(now)
        slot = self.head % len(self.requests)
        self.requests[slot] += requests
        self.misses[slot] += misses

    def advance(self, now: float) -> None:
        period = int(now // self.period_s)
        size = len(self.requests)
        for skipped in range(max(self.head + 1, period - size + 1), period + 1):
            self.requests[skipped % size] = self.misses[skipped % size] = 0.0
        self.head = max(self.head, period)

    def last(self, periods: int) -> tuple[float, float]:
        """Requests and misses of the newest `periods` periods, the running one included."""
        size = len(self.requests)
        slots = [(self.head - back) % size for back in range(min(periods, size))]
        return sum(self.requests[s] for s in slots), sum(self.misses[s] for s in slots)


def _ring(period_s: float, size: int) -> Ring:
    return Ring(period_s=period_s, requests=[0.0] * size, misses=[0.0] * size)


class BudgetState(msgspec.Struct, kw_only=True):
    minutes: Ring = msgspec.field(default_factory=lambda: _ring(_MINUTE_S, _MINUTES))
    hours: Ring = msgspec.field(default_factory=lambda: _ring(_HOUR_S, _HOURS))
    stopped_at_s: float | None = None
    reason: str = ""
    judged_minute: int = -1


class ErrorBudget:
    def __init__(self, settings: BudgetSettings, state: BudgetState | None = None) -> None:
        self._settings = settings
        self.state = state or BudgetState()

    @property
    def stopped(self) -> bool:
        return self.state.stopped_at_s is not None

    @property
    def reason(self) -> str:
        return self.state.reason

    @property
    def allowance(self) -> float:
        """Misses that harvesting may cause in the window."""
        requests, _ = self.state.hours.last(_HOURS)
        settings = self._settings
        return settings.share_ratio * (1 - settings.slo_target_ratio) * requests

    @property
    def spent(self) -> float:
        return self.state.hours.last(_HOURS)[1]

    def burn_rate(self, minutes: int) -> float:
        """Misses over the even pace of the service's whole budget; 0 under minimum traffic."""
        requests, misses = self.state.minutes.last(minutes)
        if requests < self._settings.minimum_requests or misses < self._settings.minimum_misses:
            return 0.0
        return misses / requests / (1 - self._settings.slo_target_ratio)

    def observe(self, *, requests: float, misses: float, now: float) -> bool:
        """Fold new counts in; True while harvesting must stop."""
        state = self.state
        for ring in (state.minutes, state.hours):
            ring.add(requests=requests, misses=misses, now=now)
        # Without a new miss only the passing of time can change the verdict, minute by minute.
        if misses > 0 or state.judged_minute != state.minutes.head:
            state.judged_minute = state.minutes.head
            self._judge(now)
        return self.stopped and self._settings.enforced

    def stop(self, reason: str, *, now: float) -> None:
        """Stop harvesting for the hold time, as after a breach."""
        self.state.stopped_at_s, self.state.reason = now, reason

    def _judge(self, now: float) -> None:
        state = self.state
        if state.stopped_at_s is None:
            state.reason = self._breach(1.0)
            if state.reason:
                state.stopped_at_s = now
        elif now - state.stopped_at_s >= self._settings.hold_s and not self._breach(RESUME_RATIO):
            state.stopped_at_s = None
            state.reason = ""

    def _breach(self, strictness: float) -> str:
        spent, allowance = self.spent, self.allowance
        if spent >= self._settings.minimum_misses and spent > allowance:
            return f"{spent:.0f} misses of {allowance:.1f} allowed in 28 d"
        for window in BURN_WINDOWS:
            long = self.burn_rate(window.long_minutes)
            short = self.burn_rate(window.short_minutes)
            if min(long, short) >= window.rate * strictness:
                return f"budget burns at {long:.1f} times its pace over {window.long_minutes} min"
        return ""
