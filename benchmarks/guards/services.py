"""Simulated services and guests: latencies alone and beside the guest, and stalls."""

import random
from collections.abc import Callable
from dataclasses import dataclass

Latency = Callable[[random.Random], float]
"""A latency in s."""


def lognormal(median_s: float, sigma: float) -> Latency:
    return lambda rng: median_s * rng.lognormvariate(0.0, sigma)


def longer(base: Latency, *, share: float, more_s: float) -> Latency:
    """The same latencies, of which a share is longer by `more_s`."""
    return lambda rng: base(rng) + (more_s if rng.random() < share else 0.0)


def scaled(base: Latency, ratio: float) -> Latency:
    return lambda rng: ratio * base(rng)


def either(share: float, one: Latency, other: Latency) -> Latency:
    """A share of latencies of one kind, the rest of the other."""
    return lambda rng: one(rng) if rng.random() < share else other(rng)


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """Times in which the engine answers nothing; requests that arrive wait for the end."""

    every_s: float
    """Mean of the time between two, which is exponential."""
    length_s: float


@dataclass(frozen=True, kw_only=True)
class Overloads:
    """Times in which all latencies are longer, one at the end of each period."""

    every_h: float
    length_min: float
    ratio: float

    def at(self, hours: float) -> float:
        """Factor on latencies, `hours` after the start."""
        rest_min = 60.0 * (self.every_h - hours % self.every_h)
        return self.ratio if rest_min <= self.length_min else 1.0


_NO_OVERLOADS = Overloads(every_h=1.0, length_min=0.0, ratio=1.0)


@dataclass(frozen=True, kw_only=True)
class Service:
    alone: Latency
    """Times to first token."""
    beside: Latency
    """The same beside the guest."""
    days: float
    """Length of one run."""
    runs: int
    harm_begins_h: float = 0.0
    own_stalls: Stalls | None = None
    overloads: Overloads = _NO_OVERLOADS
    queue_busy: float = 0.0
    """Share of the time in which a queue of one request at a time is busy; 0 without a queue."""
    guest_stalls: Stalls | None = None
    itl_alone: Latency
    itl_beside: Latency
    load_sigma: float = 0.0
    """Spread of a factor on all latencies, which follows its own past for about a minute."""
    ttft_slo_s: float = 1.0
    requests_per_s: float = 5.0
    fades_s: float = 0.0
    """Time in which harm builds up and fades, as heat and caches do; withheld slices have it too.
    Until then the share of requests that are harmed rises and falls."""

    @property
    def harmful(self) -> bool:
        return self.days < 1.0


_FAST = lognormal(0.2, 0.5)
_ITL = lognormal(0.02, 0.2)
_WHOLE_RUNS, _WEEK = 4, 7.0
"""Harmless services run for 28 days in all."""


def _harm(
    alone: Latency,
    beside: Latency,
    *,
    after_h: float = 0.0,
    slo_s: float = 1.0,
    itl: Latency = _ITL,
    stalls: Stalls | None = None,
    load_sigma: float = 0.0,
    requests_per_s: float = 5.0,
    fades_s: float = 0.0,
) -> Service:
    return Service(
        load_sigma=load_sigma,
        requests_per_s=requests_per_s,
        fades_s=fades_s,
        alone=alone,
        beside=beside,
        itl_alone=_ITL,
        itl_beside=itl,
        guest_stalls=stalls,
        days=(after_h + 4.0) / 24,
        runs=30,
        harm_begins_h=after_h,
        ttft_slo_s=slo_s,
    )


def _harmless(
    ttft: Latency,
    *,
    sigma: float = 0.0,
    ratio: float = 1.0,
    stalls: Stalls | None = None,
    overloads: Overloads = _NO_OVERLOADS,
    queue_busy: float = 0.0,
    requests_per_s: float = 5.0,
) -> Service:
    return Service(
        requests_per_s=requests_per_s,
        queue_busy=queue_busy,
        overloads=overloads,
        alone=ttft,
        beside=scaled(ttft, ratio),
        itl_alone=_ITL,
        itl_beside=scaled(_ITL, ratio),
        own_stalls=stalls,
        days=_WEEK,
        runs=_WHOLE_RUNS,
        load_sigma=sigma,
    )


def _rises(*, after_h: float) -> dict[str, Service]:
    """TTFT of a median of 1.2 s becomes 2.2 s, for spreads of latencies and swings of load."""
    begins = f" after {after_h:.0f} h" if after_h else ""
    return {
        f"TTFT 1.2 s becomes 2.2 s{begins}, sigma {sigma}, load {load}": _harm(
            lognormal(1.2, sigma),
            lognormal(2.2, sigma),
            slo_s=2.5,
            after_h=after_h,
            load_sigma=load,
        )
        for load in (0.0, 0.5)
        for sigma in (0.1, 0.5, 1.0)
    }


def _own_misses(share: float, *, more_s: float = 1.5) -> Service:
    return _harmless(longer(lognormal(0.2, 0.3), share=share, more_s=more_s))


def _groups(middle_s: float) -> Latency:
    """Three groups of requests: 55, 30 and 15 % of them."""
    others = either(2 / 3, lognormal(middle_s, 0.2), lognormal(1.0, 0.3))
    return either(0.55, lognormal(0.1, 0.2), others)


_LONG_TAIL = longer(_FAST, share=0.01, more_s=1.0)

SERVICES: dict[str, Service] = {
    **_rises(after_h=0.0),
    **_rises(after_h=2.0),
    "P99 of TTFT doubled, median as before": _harm(_FAST, _LONG_TAIL),
    "P99 of TTFT doubled after 2 h": _harm(_FAST, _LONG_TAIL, after_h=2.0),
    "ITL 20 ms becomes 37 ms": _harm(_FAST, _FAST, itl=lognormal(0.037, 0.2)),
    "one answer of a hundred 5 s late": _harm(_FAST, longer(_FAST, share=0.01, more_s=5.0)),
    "the guest stalls the engine 3 s, each 2 min": _harm(
        _FAST, _FAST, stalls=Stalls(every_s=120.0, length_s=3.0)
    ),
    "a quarter 6 s late, slices of 30 s": _harm(
        lognormal(1.0, 0.5), longer(lognormal(1.0, 0.5), share=0.25, more_s=6.0), slo_s=6.0
    ),
    "TTFT 60 ms becomes 110 ms, a request in 5 s": _harm(
        lognormal(0.06, 0.3), lognormal(0.11, 0.3), slo_s=0.5, requests_per_s=0.2
    ),
    "TTFT 300 ms becomes 550 ms for a middle 30 %": _harm(_groups(0.3), _groups(0.55), slo_s=2.5),
    "TTFT + 84 % that fades over 60 s": _harm(
        lognormal(0.2, 0.3), lognormal(0.368, 0.3), fades_s=60.0
    ),
    "steady": _harmless(_FAST),
    "load swings": _harmless(_FAST, sigma=0.5),
    "own misses 0.05 %": _own_misses(0.0005),
    "own misses 0.2 %": _own_misses(0.002),
    "own misses 0.8 %": _own_misses(0.008),
    "own misses 3 %": _own_misses(0.03),
    "own misses of 12 s, 0.5 %": _own_misses(0.005, more_s=12.0),
    "own stalls of 3 s, each 10 min": _harmless(_FAST, stalls=Stalls(every_s=600.0, length_s=3.0)),
    "overload of 40 min, each 6 h": _harmless(
        _FAST, sigma=0.5, overloads=Overloads(every_h=6.0, length_min=40.0, ratio=5.0)
    ),
    "overload of 28 min, each hour": _harmless(
        _FAST, overloads=Overloads(every_h=1.0, length_min=28.0, ratio=3.0)
    ),
    "a queue, busy for 85 %": _harmless(lognormal(0.1, 0.3), queue_busy=0.85),
    "8 % longer beside the guest": _harmless(_FAST, ratio=1.08),
    "8 % longer, a request in 5 s": _harmless(lognormal(0.06, 0.3), ratio=1.08, requests_per_s=0.2),
}
