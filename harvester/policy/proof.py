"""Randomised slices of time without a grant, and the harm of harvesting that they show.

A request counts to the slice in which it arrived. Slices last ten times production's P99 time to
first token, and requests of a slice's first and last tenth count to none, so that hardly any
waits in slices of both kinds. Where few requests arrive they are long enough for quartiles. Whether
a slice is withheld depends on the seed, its time and the evidence so far, never on the load, and a
replay withholds the same ones. This module closes no gate; it reports `withheld` and `harmful`.
"""

import math
from collections.abc import Iterable, Iterator
from statistics import NormalDist, fmean

import msgspec
import xxhash

from harvester.policy.harm_test import (
    SUSPICION,
    SUSPICION_OF_NEWCOMER,
    BetWealth,
    QuantileTest,
    ThresholdTest,
)
from harvester.policy.settings import ProofSettings

_P99_TIMES = 10.0
_SLICE_MOST_S = 120.0
_ANSWER_LEAST_S, _ANSWER_SLOS = 10.0, 4.0
"""Least time that an ended slice waits for its requests: in s, and in multiples of the TTFT SLO."""
_ENDED_KEPT = 300
"""Ended slices that are remembered: ten minutes, and more where slices are longer than 2 s."""
_EDGE_RATIO = 0.1
"""Part at a slice's beginning and at its end whose arrivals count to no slice."""
_RECENT = 1024
"""Latencies beside the guest, from which the P99 is taken."""
_TAIL_LEAST = 100
"""Latencies before there is a P99 of them."""
_SLICE_KEPT = 256
_SLICE_RECENT = 64
"""Most latencies that one slice adds to the recent ones, which therefore span many slices."""
_QUARTILES_LEAST = 5
_QUARTILES_EXPECTED = 8.0
"""Requests that a slice is long enough for: nine slices of ten then have the least number."""
_RATE_MEMORY_S = 600.0
"""A night's few requests do not make long slices of the morning's load."""
_IMPACT_MEMORY_S = 12 * 3600.0


class SliceSum(msgspec.Struct, kw_only=True):
    """Fading sums over slices of a kind: n samples of sum x, and products for the variance. Each
    slice is weighed by the inverse of its chance to be of this kind: a quiet first half hour, of
    which more is withheld, would else make production's own busy time the guest's."""

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


class Slice(msgspec.Struct, kw_only=True):
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
        edge_s = _EDGE_RATIO * self.length_s
        return self.begin_s + edge_s, self.end_s - edge_s, self.stands_for

    def holds(self, arrival_s: float) -> bool:
        """Whether a request that arrived then counts to this slice."""
        edge_s = _EDGE_RATIO * self.length_s
        return edge_s <= arrival_s - self.begin_s < self.length_s - edge_s


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
        return _p99(self.recent_s) / allowed if len(self.recent_s) >= _TAIL_LEAST else 0.0

    def add(self, done: Slice, samples: SliceSamples, *, allowed: float) -> None:
        if not samples.n:
            return
        if len(samples.kept_s) >= _QUARTILES_LEAST:
            ordered_s = sorted(samples.kept_s)
            for quarters, quartile in enumerate(self._quartiles, start=1):
                quartile_s = ordered_s[quarters * len(ordered_s) // 4]
                alone_s = quartile_s if done.withheld else quartile_s / allowed
                quartile.observe(
                    max(alone_s, 1e-9),
                    withheld=done.withheld,
                    share=done.share,
                    slice_s=done.length_s,
                )
        for test, above in (
            (self.p99 if samples.p99_s else None, samples.above_p99),
            (self.slo, samples.misses),
        ):
            if test is not None:
                test.observe(
                    requests=samples.n,
                    above=above,
                    withheld=done.withheld,
                    share=done.share,
                    slice_s=done.length_s,
                )
        kept = math.exp(-done.length_s / _IMPACT_MEMORY_S)
        total = self.withheld if done.withheld else self.granted
        weight = 1.0 / (done.share if done.withheld else 1.0 - done.share)
        total.add(n=weight * samples.n, x=weight * samples.x, kept=kept)
        if not done.withheld:
            some_s = samples.kept_s[:: 1 + len(samples.kept_s) // _SLICE_RECENT]
            self.recent_s = [*self.recent_s, *some_s][-_RECENT:]

    @property
    def _quartiles(self) -> tuple[QuantileTest, ...]:
        return self.lower_quartile, self.median, self.upper_quartile

    @property
    def wealths(self) -> tuple[BetWealth, ...]:
        tests: tuple[QuantileTest | ThresholdTest, ...] = *self._quartiles, self.p99, self.slo
        return tuple(wealth for test in tests for wealth in test.wealths)

    @property
    def evidence(self) -> float:
        """Worth of the bets where all stakes are 1: a third of these is on the quartiles."""
        quartiles = fmean(map(_worth, self._quartiles))
        return fmean((quartiles, _worth(self.p99), _worth(self.slo)))

    def impact(self, settings: ProofSettings) -> "Impact | None":
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


class ProofState(msgspec.Struct, kw_only=True):
    slices: list[Slice] = []
    """Current slice, previous slice, and older slices that may have requests in flight."""
    outlines: list[tuple[float, float, float | None]] = []
    """Outlines of the slices before those."""
    ttft: LatencyEvidence = msgspec.field(default_factory=LatencyEvidence)
    itl: LatencyEvidence = msgspec.field(default_factory=LatencyEvidence)
    judged_s: float = 0.0
    """Length of all slices that count."""
    requests: float = 0.0
    """Requests of slices that count, fading ..."""
    requests_s: float = 0.0
    """... and the time in which they arrived."""
    stopped_at_s: float | None = None


class Impact(msgspec.Struct, frozen=True, kw_only=True):
    """Latency beside the guest over latency alone, minus 1, with its confidence interval."""

    ratio: float
    low: float
    high: float


class Proof:
    def __init__(
        self,
        settings: ProofSettings,
        state: ProofState | None = None,
        *,
        ttft_slo_s: float,
        itl_slo_s: float,
    ) -> None:
        self._settings = settings
        self._slo_s = ttft_slo_s, itl_slo_s
        self._allowed = 1.0 + settings.limit_ratio
        self._answer_s = max(_ANSWER_LEAST_S, min(_SLICE_MOST_S, _ANSWER_SLOS * ttft_slo_s))
        """Time for which a request of an ended slice is waited for, at least."""
        self.state = state or ProofState()
        self._judged = True
        """Whether the evidence may be new."""

    @property
    def harmful(self) -> bool:
        return self.state.stopped_at_s is not None

    @property
    def evidence(self) -> float:
        """Times that the tests' stakes have grown; harvesting stops at `evidence_limit`."""
        return fmean((self.state.ttft.evidence, self.state.itl.evidence))

    @property
    def evidence_limit(self) -> float:
        return 1.0 / self._settings.error_ratio

    @property
    def slice_s(self) -> float:
        """Length of the running slice."""
        slices = self.state.slices
        return slices[-1].length_s if slices else self._settings.slice_s

    @property
    def withheld_share(self) -> float:
        """Chance with which the running slice was withheld; 0 before the first one."""
        slices = self.state.slices
        return slices[-1].share if slices else 0.0

    def impact(self) -> dict[str, Impact | None]:
        state, settings = self.state, self._settings
        return {"ttft": state.ttft.impact(settings), "itl": state.itl.impact(settings)}

    def withheld(self, *, now: float) -> bool:
        """Whether the slice at `now` is withheld; begins it if the one before has ended."""
        slices = self.state.slices
        if not slices or now >= slices[-1].end_s or now < slices[-1].begin_s:
            slices.append(self._begin(now))
        return slices[-1].withheld

    def stands_for(self, arrival_s: float) -> float | None:
        """`Slice.stands_for` of the slice in which a request arrived; None if it counts to none.

        A request that waited for longer than slices are remembered counts as beside the guest.
        """
        outlines = self.state.outlines
        if len(outlines) == _ENDED_KEPT and arrival_s < outlines[0][0]:
            return 0.0
        for one in reversed(self.state.slices):
            if one.begin_s <= arrival_s:
                return one.stands_for if one.holds(arrival_s) else None
        found = (
            stands_for
            for begin_s, end_s, stands_for in reversed(outlines)
            if begin_s <= arrival_s < end_s
        )
        return next(found, None)

    def observe(
        self,
        *,
        ttft_s: Iterable[float],
        itl_s: Iterable[float],
        eligible: bool,
        leased: bool,
        now: float,
    ) -> None:
        """Fold in the latencies (s) of a beat.

        A slice, granted or withheld, counts if all of it was `eligible`, and some of it `leased`.
        Neither may follow from which slices are withheld, so that both sides see the same
        production.
        """
        state = self.state
        self.withheld(now=now)
        state.slices[-1].eligible &= eligible
        state.slices[-1].leased |= leased
        for name, latencies_s, slo_s in zip(
            ("ttft", "itl"), (ttft_s, itl_s), self._slo_s, strict=True
        ):
            for latency_s in latencies_s:
                one = next((s for s in reversed(state.slices) if s.holds(now - latency_s)), None)
                if one is not None:
                    allowed = 1.0 if one.withheld else self._allowed
                    getattr(one, name).add(latency_s, slo_s=slo_s, allowed=allowed)
        for done in self._finished(now):
            state.outlines = [*state.outlines, done.outline][-_ENDED_KEPT:]
            self._judge(done)
            self._judged = True
        if state.stopped_at_s is None:
            if self._judged and self.evidence >= self.evidence_limit:
                state.stopped_at_s = now
            self._judged = False
        elif now - state.stopped_at_s >= self._settings.hold_s:
            # The evidence that caused the stop is spent: harvesting needs a new proof.
            self.state = ProofState()

    def _finished(self, now: float) -> Iterator[Slice]:
        """Slices whose requests have had enough time to get their first token."""
        slices = self.state.slices
        while len(slices) > 1:
            first = slices[0]
            answer_s = max(first.length_s, self._answer_s)
            if first.begin_s <= now < first.end_s + answer_s:
                return
            yield slices.pop(0)

    def _judge(self, done: Slice) -> None:
        if done.counts:
            state, kept = self.state, math.exp(-done.length_s / _RATE_MEMORY_S)
            state.judged_s += done.length_s
            state.requests = kept * state.requests + done.ttft.n
            state.requests_s = kept * state.requests_s + (1 - 2 * _EDGE_RATIO) * done.length_s
            state.ttft.add(done, done.ttft, allowed=self._allowed)
            state.itl.add(done, done.itl, allowed=self._allowed)

    def _begin(self, now: float) -> Slice:
        state, settings = self.state, self._settings
        number = int(now // settings.slice_s)
        waits_s = _P99_TIMES * _p99(state.ttft.recent_s)
        # Earlier slices alone decide, so that no bet is on a length that follows from its requests.
        arrive_s = 0.0
        if state.requests >= _QUARTILES_EXPECTED:
            arrive_s = _QUARTILES_EXPECTED * state.requests_s / state.requests
            arrive_s /= 1 - 2 * _EDGE_RATIO
        if arrive_s > _SLICE_MOST_S:
            arrive_s = 0.0  # Too few even then.
        longest_s = max(settings.slice_s, min(_SLICE_MOST_S, max(waits_s, arrive_s)))
        share = self._share()
        length_s = settings.slice_s * (number + math.ceil(longest_s / settings.slice_s)) - now
        if length_s < _EDGE_RATIO * settings.slice_s:
            length_s += settings.slice_s  # No beat may meet the rest, which rounding makes 0.
        return Slice(
            begin_s=now,
            length_s=length_s,
            withheld=_draw(number, settings.seed) < share,
            share=share,
            ttft=SliceSamples(p99_s=state.ttft.p99_s(allowed=self._allowed)),
            itl=SliceSamples(p99_s=state.itl.p99_s(allowed=self._allowed)),
        )

    def _share(self) -> float:
        """More while nothing is known of the guest, and much more while it is under suspicion."""
        settings = self._settings
        if not settings.share_ratio:
            return 0.0
        newcomer = self.state.judged_s < settings.proving_s
        suspicion = SUSPICION_OF_NEWCOMER if newcomer else SUSPICION
        wealths = *self.state.ttft.wealths, *self.state.itl.wealths
        if max(wealth.newest for wealth in wealths) > suspicion:
            return max(0.5, settings.share_ratio)
        if newcomer:
            return max(settings.proving_share_ratio, settings.share_ratio)
        return settings.share_ratio


def moved(state: ProofState) -> ProofState:
    """For another clock: without slices under way, which were not seen whole."""
    return msgspec.structs.replace(state, slices=[], outlines=[])


def _worth(test: QuantileTest | ThresholdTest) -> float:
    return fmean(wealth.stakes for wealth in test.wealths)


def _p99(latencies_s: list[float]) -> float:
    ordered = sorted(latencies_s)
    return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0


def _draw(number: int, seed: int) -> float:
    return xxhash.xxh3_64_intdigest(number.to_bytes(8, "little", signed=True), seed=seed) / 2**64
