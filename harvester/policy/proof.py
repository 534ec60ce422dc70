"""Randomised slices of time without a grant, and the harm of harvesting that they show.

A request counts to the slice in which it arrived. Slices last ten times production's P99 time to
first token, and requests of a slice's first and last tenth count to none, so that hardly any
waits in slices of both kinds. Where few requests arrive they are long enough for quartiles. Whether
a slice is withheld depends on the seed, its time and the evidence so far, never on the load, and a
replay withholds the same ones. This module closes no gate; it reports `withheld` and `harmful`.
"""

import math
from collections.abc import Iterable, Iterator
from statistics import fmean

import msgspec
import xxhash

from harvester.policy.harm_test import SUSPICION, SUSPICION_OF_NEWCOMER, RiseLimit
from harvester.policy.settings import ProofSettings
from harvester.policy.slices import (
    EDGE_RATIO,
    Impact,
    LatencyEvidence,
    ProofSlice,
    SliceSamples,
    p99,
)

_P99_TIMES = 10.0
_SLICE_MOST_S = 120.0
_ANSWER_LEAST_S, _ANSWER_SLOS = 10.0, 4.0
"""Least time that an ended slice waits for its requests: in s, and in multiples of the TTFT SLO."""
_ENDED_KEPT = 300
"""Ended slices that are remembered: ten minutes, and more where slices are longer than 2 s."""
_QUARTILES_EXPECTED = 8.0
"""Requests that a slice is long enough for: nine slices of ten then have the least number."""
_RATE_MEMORY_S = 600.0
"""A night's few requests do not make long slices of the morning's load."""


class ProofState(msgspec.Struct, kw_only=True):
    slices: list[ProofSlice] = []
    """Current slice, previous slice, and older slices that may have requests in flight."""
    outlines: list[tuple[float, float, float | None]] = []
    """Outlines of the slices before those."""
    ttft: LatencyEvidence = msgspec.field(default_factory=LatencyEvidence)
    itl: LatencyEvidence = msgspec.field(default_factory=LatencyEvidence)
    rise_limit: RiseLimit = msgspec.field(default_factory=RiseLimit)
    judged_s: float = 0.0
    """Length of all slices that count."""
    requests: float = 0.0
    """Requests of slices that count, fading ..."""
    requests_s: float = 0.0
    """... and the time in which they arrived."""
    stopped_at_s: float | None = None


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

    @property
    def proving_left_s(self) -> float:
        """Time in slices that count until the slot has proven itself."""
        settings = self._settings
        left_s = settings.proving_s - self.state.judged_s
        return max(0.0, left_s) if settings.share_ratio > 0 else 0.0

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
        """`ProofSlice.stands_for` of a request's slice, by arrival; None if it counts to none.

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

    def _finished(self, now: float) -> Iterator[ProofSlice]:
        """Slices whose requests have had enough time to get their first token."""
        slices = self.state.slices
        while len(slices) > 1:
            first = slices[0]
            answer_s = max(first.length_s, self._answer_s)
            if first.begin_s <= now < first.end_s + answer_s:
                return
            yield slices.pop(0)

    def _judge(self, done: ProofSlice) -> None:
        if done.counts:
            state, kept = self.state, math.exp(-done.length_s / _RATE_MEMORY_S)
            state.judged_s += done.length_s
            state.requests = kept * state.requests + done.ttft.n
            state.requests_s = kept * state.requests_s + (1 - 2 * EDGE_RATIO) * done.length_s
            suspected = self._suspicion > SUSPICION
            rise_limit = state.rise_limit.at(suspected=suspected)
            rises = [
                evidence.add(
                    done,
                    samples,
                    allowed=self._allowed,
                    rise_limit=rise_limit,
                    newcomer=self._newcomer,
                )
                for evidence, samples in ((state.ttft, done.ttft), (state.itl, done.itl))
            ]
            risen = any(rises) and not suspected
            state.rise_limit.observe(risen=risen, slice_s=done.length_s)

    def _begin(self, now: float) -> ProofSlice:
        state, settings = self.state, self._settings
        number = int(now // settings.slice_s)
        waits_s = _P99_TIMES * p99(state.ttft.recent_s)
        # Earlier slices alone decide, so that no bet is on a length that follows from its requests.
        arrive_s = 0.0
        if state.requests >= _QUARTILES_EXPECTED:
            arrive_s = _QUARTILES_EXPECTED * state.requests_s / state.requests
            arrive_s /= 1 - 2 * EDGE_RATIO
        if arrive_s > _SLICE_MOST_S:
            arrive_s = 0.0  # Too few even then.
        longest_s = max(settings.slice_s, min(_SLICE_MOST_S, max(waits_s, arrive_s)))
        share = self._share()
        length_s = settings.slice_s * (number + math.ceil(longest_s / settings.slice_s)) - now
        if length_s < EDGE_RATIO * settings.slice_s:
            length_s += settings.slice_s  # No beat may meet the rest, which rounding makes 0.
        return ProofSlice(
            begin_s=now,
            length_s=length_s,
            withheld=_draw(number, settings.seed) < share,
            share=share,
            ttft=SliceSamples(p99_s=state.ttft.p99_s(allowed=self._allowed)),
            itl=SliceSamples(p99_s=state.itl.p99_s(allowed=self._allowed)),
        )

    @property
    def _newcomer(self) -> bool:
        return self.proving_left_s > 0

    @property
    def _suspicion(self) -> float:
        """Largest worth that any test's newest bet has, in stakes."""
        wealths = *self.state.ttft.wealths, *self.state.itl.wealths
        return max(wealth.newest for wealth in wealths)

    def _share(self) -> float:
        """Share of slices to withhold: more for a new guest, most for a suspected one."""
        settings = self._settings
        if not settings.share_ratio:
            return 0.0
        if self._suspicion > (SUSPICION_OF_NEWCOMER if self._newcomer else SUSPICION):
            return max(0.5, settings.share_ratio)
        if self._newcomer:
            return max(settings.proving_share_ratio, settings.share_ratio)
        return settings.share_ratio


def moved(state: ProofState) -> ProofState:
    """The state for another clock, without unfinished slices, which were not seen whole."""
    return msgspec.structs.replace(state, slices=[], outlines=[])


def _draw(number: int, seed: int) -> float:
    return xxhash.xxh3_64_intdigest(number.to_bytes(8, "little", signed=True), seed=seed) / 2**64
