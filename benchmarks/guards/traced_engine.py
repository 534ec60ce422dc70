"""Production that serves a trace of arrivals: a simulated engine with continuous batching.

One step at a time: a prefill of the oldest waiting request, else one token of each running one.
Bursts make queues, and latencies of neighbouring requests have the same cause, as in real engines.
Reads no clock.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from benchmarks.testbed.trace import Trace
from harvester.policy.production import Latencies, ProductionView

_PREFILL_S, _PREFILL_S_PER_TOKEN = 0.008, 0.00006
_DECODE_S, _DECODE_S_PER_REQUEST = 0.006, 0.0004
_OUTPUT_RATIO = 0.1
"""Outputs are cut to a tenth: decoding would else be nearly all of a step's work."""
_SEEN = 32
"""Latencies of a kind in one pulse."""
_PAUSE_S = 1.0
"""Between the trace's last request and its first one again."""
_SPEED_STEPS = 25
_ATTAINED_RATIO = 0.998
_BUSY_RATIO = 0.66
_WEEK = 7.0


@dataclass(frozen=True, kw_only=True)
class TracedService:
    trace: Trace
    busy_ratio: float
    """Share of the time in which the engine works alone, by the speed of the replay."""
    slower_ratio: float
    """Length of the engine's steps beside the guest, over that alone."""
    days: float
    runs: int
    harm_begins_h: float = 0.0

    @property
    def harmful(self) -> bool:
        return self.slower_ratio > 1.0

    @cached_property
    def speed_ratio(self) -> float:
        """Speed of the replay, at which the engine alone is busy for `busy_ratio`."""
        low, high = 1e-3, 1e3
        for _ in range(_SPEED_STEPS):
            middle = (low * high) ** 0.5
            if TracedEngine(self.trace, middle).whole().busy_ratio < self.busy_ratio:
                low = middle
            else:
                high = middle
        return low

    @cached_property
    def slo_s(self) -> tuple[float, float]:
        """TTFT and ITL, each attained by 99.8 % of the requests or tokens alone."""
        alone = TracedEngine(self.trace, self.speed_ratio).whole()
        ttft_s, itl_s = (
            float(np.quantile(each, _ATTAINED_RATIO)) for each in (alone.ttft_s, alone.itl_s)
        )
        return ttft_s, itl_s


@dataclass(slots=True)
class _TracedRequest:
    arrival_s: float
    input_tokens: int
    tokens_left: int
    last_token_s: float = 0.0


@dataclass
class TracedEngine:
    """The trace again and again, from `offset_s` on."""

    trace: Trace
    speed_ratio: float
    offset_s: float = 0.0
    busy_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    """Since the last beat, as `itl_s`."""
    itl_s: list[float] = field(default_factory=list)
    _clock_s: float = 0.0
    _next: int = 0
    _rounds: int = 0
    _waiting: deque[_TracedRequest] = field(default_factory=deque)
    _running: list[_TracedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._length_s = self.trace.duration_s / self.speed_ratio + _PAUSE_S
        self._next = int(
            np.searchsorted(self.trace.t_s, (self.offset_s % self._length_s) * self.speed_ratio)
        )
        self._rounds = int(self.offset_s // self._length_s)
        if self._next == len(self.trace.t_s):
            self._next, self._rounds = 0, self._rounds + 1

    @property
    def busy_ratio(self) -> float:
        return self.busy_s / self._clock_s

    def whole(self) -> "TracedEngine":
        """Serves the whole trace once."""
        self.advance(self._length_s, slower_ratio=1.0)
        return self

    def beat(self, *, slower_ratio: float, itl_slo_s: float, until_s: float) -> ProductionView:
        """The view of production in the time up to `until_s`, since its start."""
        self.advance(until_s, slower_ratio=slower_ratio)
        ttft_s, itl_s = self.ttft_s, self.itl_s
        self.ttft_s, self.itl_s = [], []
        late = [each for each in itl_s if each > itl_slo_s]
        return ProductionView(
            condition=None,
            ttft=Latencies(seen_s=tuple(ttft_s), total=len(ttft_s)),
            itl=Latencies(seen_s=tuple(itl_s[-_SEEN:]), total=len(itl_s)),
            itl_late=Latencies(seen_s=tuple(late[-_SEEN:]), total=len(late)),
            decoded=float(len(self._running)),
        )

    def advance(self, until_s: float, *, slower_ratio: float) -> None:
        """Steps that begin before `until_s`; the last one may end after it."""
        while self._clock_s < until_s:
            self._arrive()
            if self._waiting or self._running:
                self._step(slower_ratio)
            else:
                self._clock_s = min(until_s, self._arrival_s)

    @property
    def _arrival_s(self) -> float:
        """The next arrival."""
        at_s = float(self.trace.t_s[self._next]) / self.speed_ratio
        return at_s + self._rounds * self._length_s - self.offset_s

    def _arrive(self) -> None:
        while (arrival_s := self._arrival_s) <= self._clock_s:
            output_tokens = int(_OUTPUT_RATIO * self.trace.output_tokens[self._next])
            input_tokens = int(self.trace.input_tokens[self._next])
            self._waiting.append(_TracedRequest(arrival_s, input_tokens, max(1, output_tokens)))
            self._next += 1
            if self._next == len(self.trace.t_s):
                self._next, self._rounds = 0, self._rounds + 1

    def _step(self, slower_ratio: float) -> None:
        prefilled = self._waiting.popleft() if self._waiting else None
        length_s = _DECODE_S_PER_REQUEST * len(self._running)
        if prefilled is None:
            length_s += _DECODE_S
        else:
            length_s += _PREFILL_S + _PREFILL_S_PER_TOKEN * prefilled.input_tokens
        self.busy_s += slower_ratio * length_s
        self._clock_s += slower_ratio * length_s
        for request in self._running:
            self.itl_s.append(self._clock_s - request.last_token_s)
            request.last_token_s = self._clock_s
            request.tokens_left -= 1
        if prefilled is not None:
            self.ttft_s.append(self._clock_s - prefilled.arrival_s)
            prefilled.last_token_s = self._clock_s
            prefilled.tokens_left -= 1
            self._running.append(prefilled)
        self._running = [request for request in self._running if request.tokens_left > 0]


def traced_services(trace: Trace) -> dict[str, TracedService]:
    """A harmless guest, and one beside which each step of the engine takes longer, after 2 h."""
    harmless = TracedService(
        trace=trace, busy_ratio=_BUSY_RATIO, slower_ratio=1.0, days=_WEEK, runs=4
    )
    harmful = {
        f"{trace.name}, steps {slower_ratio} times as long after 2 h": replace(
            harmless, slower_ratio=slower_ratio, days=6.0 / 24, runs=30, harm_begins_h=2.0
        )
        for slower_ratio in (1.2, 1.4)
    }
    return {f"{trace.name}, busy 66 %": harmless} | harmful
