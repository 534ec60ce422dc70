"""Slices of time, the latencies of their requests, and the evidence of harm that these add up to.

Reads no clock; which slices are withheld is the proof's (`harvester/policy/proof.py`).
"""

import math
from statistics import NormalDist, fmean

import msgspec

from harvester.policy.harm_test import BetWealth, QuantileTest, ThresholdTest
from harvester.policy.settings import ProofSettings

EDGE_RATIO = 0.1
"""Part at a slice's beginning and at its end whose arrivals count to no slice."""
_RECENT = 1024
"""Latencies beside the guest, from which the P99 is taken."""
_TAIL_LEAST = 100
"""Latencies before there is a P99 of them."""
_SLICE_KEPT = 256
_SLICE_RECENT = 64
"""Most latencies that one slice adds to the recent ones, which therefore span many slices."""
_QUARTILES_LEAST = 5
_IMPACT_MEMORY_S = 12 * 3600.0


class SliceSum(msgspec.Struct, kw_only=True):
    """Fading sums over slices of a kind: n samples of sum x, and products for the variance. Each
    slice is weighed by the inverse of its chance to be of this kind. Otherwise a quiet first half
    hour, of which more is withheld, would make later busy time look like the guest's harm."""

    slices: float = 0.0
    n: float = 0.0
    x: float = 0.0
    nn: float = 0.0
    nx: float = 0.0
    xx: float = 0.0

    def add(self, *, n: float, x: float, kept: float) -> None:
        self.slices = kept * self.slices + 1
        self.n = kept * self.n + n
        self.x = kept * self.x + x
        self.nn = kept * self.nn + n * n
        self.nx = kept * self.nx + n * x
        self.xx = kept * self.xx + x * x

    @property
    def mean(self) -> float:
        return self.x / self.n

    @property
    def variance(self) -> float:
        """Variance of the ratio estimator x/n over slices (Cochran, Sampling Techniques, 6.4)."""
        residual = self.xx - 2 * self.mean * self.nx + self.mean**2 * self.nn
        correction = self.slices / (self.slices - 1)
        return max(0.0, residual) * correction / self.n**2


class SliceSamples(msgspec.Struct, kw_only=True):
    """Latencies of one kind in one slice."""

    p99_s: float = 0.0
    """The P99 before the slice; 0 while unknown."""
    n: int = 0
    x: float = 0.0
    above_p99: int = 0
    misses: int = 0
    kept_s: list[float] = []

    def add(self, latency_s: float, *, slo_s: float, allowed: float) -> None:
        """`allowed`: latencies may be this many times as long without being harm."""
        self.n += 1
        self.x += latency_s
        self.above_p99 += latency_s > allowed * self.p99_s
        self.misses += latency_s > allowed * slo_s
        if len(self.kept_s) < _SLICE_KEPT:
            self.kept_s.append(latency_s)


class ProofSlice(msgspec.Struct, kw_only=True):
    begin_s: float
    length_s: float
    withheld: bool
    share: float
    """Chance with which it was withheld."""
    ttft: SliceSamples
    itl: SliceSamples
    eligible: bool = True
    leased: bool = False
    """Whether a lease was in force in some of it."""

    @property
    def counts(self) -> bool:
        return self.eligible and self.leased

    @property
    def end_s(self) -> float:
        return self.begin_s + self.length_s

    @property
    def stands_for(self) -> float | None:
        """Granted requests for which each of a withheld slice's stands: the odds, before the draw,
        that the slice is granted. 0 for a granted slice, None for one that does not count."""
        if not self.counts:
            return None
        return (1.0 - self.share) / self.share if self.withheld else 0.0

    @property
    def outline(self) -> tuple[float, float, float | None]:
        """Begin and end, in s, of arrivals that count to this slice; what they stand for."""
        edge_s = EDGE_RATIO * self.length_s
        return self.begin_s + edge_s, self.end_s - edge_s, self.stands_for

    def holds(self, arrival_s: float) -> bool:
        """Whether a request that arrived then counts to this slice."""
        edge_s = EDGE_RATIO * self.length_s
        return edge_s <= arrival_s - self.begin_s < self.length_s - edge_s


class Impact(msgspec.Struct, frozen=True, kw_only=True):
    """Latency beside the guest over latency alone, minus 1, with its confidence interval."""

    ratio: float
    low: float
    high: float


class LatencyEvidence(msgspec.Struct, kw_only=True):
    """Latencies of one kind, of all slices, and the tests on them.

    Harm to a quarter of the requests or more, short, middle or long ones, moves a quartile.
    """

    granted: SliceSum = msgspec.field(default_factory=SliceSum, name="granted_weighed")
    withheld: SliceSum = msgspec.field(default_factory=SliceSum, name="withheld_weighed")
    recent_s: list[float] = []
    """Recent latencies beside the guest."""
    lower_quartile: QuantileTest = msgspec.field(default_factory=QuantileTest)
    median: QuantileTest = msgspec.field(default_factory=QuantileTest)
    upper_quartile: QuantileTest = msgspec.field(default_factory=QuantileTest)
    p99: ThresholdTest = msgspec.field(default_factory=ThresholdTest)
    slo: ThresholdTest = msgspec.field(default_factory=ThresholdTest)

    def p99_s(self, *, allowed: float) -> float:
        """The P99 without harm if the allowed harm happens; 0 while unknown."""
        return p99(self.recent_s) / allowed if len(self.recent_s) >= _TAIL_LEAST else 0.0

    def add(
        self,
        done: ProofSlice,
        samples: SliceSamples,
        *,
        allowed: float,
        rise_limit: float,
        newcomer: bool,
    ) -> bool:
        """Fold in a slice that has ended. Whether it shows a rise of the latencies."""
        if not samples.n:
            return False
        risen = False
        if len(samples.kept_s) >= _QUARTILES_LEAST:
            ordered_s = sorted(samples.kept_s)
            for quarters, quartile in enumerate(self._quartiles, start=1):
                quartile_s = ordered_s[quarters * len(ordered_s) // 4]
                alone_s = quartile_s if done.withheld else quartile_s / allowed
                risen |= quartile.observe(
                    max(alone_s, 1e-9),
                    withheld=done.withheld,
                    share=done.share,
                    slice_s=done.length_s,
                    rise_limit=rise_limit,
                )
        for test, above in (
            (self.p99 if samples.p99_s else None, samples.above_p99),
            (self.slo, samples.misses),
        ):
            if test is not None:
                risen |= test.observe(
                    requests=samples.n,
                    above=above,
                    withheld=done.withheld,
                    share=done.share,
                    slice_s=done.length_s,
                    rise_limit=rise_limit,
                    newcomer=newcomer,
                )
        kept = math.exp(-done.length_s / _IMPACT_MEMORY_S)
        total = self.withheld if done.withheld else self.granted
        weight = 1.0 / (done.share if done.withheld else 1.0 - done.share)
        total.add(n=weight * samples.n, x=weight * samples.x, kept=kept)
        if not done.withheld:
            some_s = samples.kept_s[:: 1 + len(samples.kept_s) // _SLICE_RECENT]
            self.recent_s = [*self.recent_s, *some_s][-_RECENT:]
        return risen

    @property
    def _quartiles(self) -> tuple[QuantileTest, ...]:
        return self.lower_quartile, self.median, self.upper_quartile

    @property
    def wealths(self) -> tuple[BetWealth, ...]:
        tests: tuple[QuantileTest | ThresholdTest, ...] = *self._quartiles, self.p99, self.slo
        return tuple(wealth for test in tests for wealth in test.wealths)

    @property
    def evidence(self) -> float:
        """Worth of all bets at total stakes of 1: a third each on quartiles, P99 and SLO."""
        quartiles = fmean(map(_worth, self._quartiles))
        return fmean((quartiles, _worth(self.p99), _worth(self.slo)))

    def impact(self, settings: ProofSettings) -> Impact | None:
        """The impact; None below the minimum of slices of either kind."""
        granted, withheld = self.granted, self.withheld
        if min(granted.slices, withheld.slices) < settings.minimum_slices:
            return None
        if granted.x <= 0 or withheld.x <= 0:
            return None
        ratio = granted.mean / withheld.mean
        relative = granted.variance / granted.mean**2 + withheld.variance / withheld.mean**2
        z = NormalDist().inv_cdf((1 + settings.confidence_ratio) / 2)
        half = z * ratio * relative**0.5
        return Impact(ratio=ratio - 1, low=ratio - half - 1, high=ratio + half - 1)


def _worth(test: QuantileTest | ThresholdTest) -> float:
    return fmean(wealth.stakes for wealth in test.wealths)


def p99(latencies_s: list[float]) -> float:
    ordered = sorted(latencies_s)
    return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0
