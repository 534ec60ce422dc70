"""The SLO of a run's production, and the test whether a request met it.

A request attains its SLO when its first token came within the TTFT edge, 99 % of its inter-token
latencies (all of them below a hundred) lie within the ITL edge, and it did not fail. Edges are
those of the engine's own histograms: an SLO between two edges cannot be read from production's
metrics. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.testbed.production_request import ProductionRequest

_RENARD_20 = (
    *(1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8),
    *(3.15, 3.55, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 8.0, 9.0),
)
"""Twenty to the decade (ISO 3): each an eighth above the one before, in round numbers."""
SLO_EDGES_TTFT_S = (
    *(0.001, 0.002, 0.005),
    *(round(step * decade, 6) for decade in (0.01, 0.1, 1.0) for step in _RENARD_20),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
SLO_EDGES_ITL_S = (
    *(round(step * decade, 6) for decade in (0.001, 0.01, 0.1) for step in _RENARD_20),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Both finer than vLLM's own, where one bucket is a factor of up to 2.5: of two hundred requests
between one and six must miss the SLO. The engine is started with them
(`--custom-histogram-buckets`, from vLLM 0.32)."""

ATTAINMENT_MIN = 0.97
ATTAINMENT_MAX = 0.998
MARGIN = 1.25
"""Least distance of an edge from the latencies, as a ratio: many requests within a quarter of an
edge show the machine's noise, since two replays of one trace differ by that much in a burst."""
_ITL_QUANTILE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    ttft_s: float
    itl_s: float


FIRST_LEVEL = ServiceLevel(ttft_s=0.25, itl_s=0.1)
"""Promised until production alone has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    ttft_s: float
    itl_s: float
    attainment: float
    """Share of the requests that attain it, among those it was chosen from."""
    in_band: bool
    """False where no pair of edges is attained by 97 to 99.8 %: then the nearest above, or below
    where even the widest edges fall short."""

    @property
    def level(self) -> ServiceLevel:
        return ServiceLevel(ttft_s=self.ttft_s, itl_s=self.itl_s)


def choose_slo(
    requests: Sequence[ProductionRequest],
    *,
    ttft_edges_s: Sequence[float] = SLO_EDGES_TTFT_S,
    itl_edges_s: Sequence[float] = SLO_EDGES_ITL_S,
) -> Slo:
    """The pair of edges, attained by 97 to 99.8 %, that the fewest requests meet or miss narrowly.

    The tightest of equals; tightest is the least product of both. Where no pair is within the
    band: the one above it that fewest attain, else the one below it that most do. Raises ValueError
    without requests.
    """
    if not requests:
        raise ValueError("an SLO is chosen from production's requests; there are none")
    share = _joint_attainment(requests, ttft_edges_s, itl_edges_s)
    surely = _joint_attainment(requests, ttft_edges_s, itl_edges_s, margin=MARGIN)
    nearly = _joint_attainment(requests, ttft_edges_s, itl_edges_s, margin=1.0 / MARGIN)
    narrow = nearly - surely
    tightness = np.log(ttft_edges_s)[:, None] + np.log(itl_edges_s)[None, :]
    in_band = (share >= ATTAINMENT_MIN) & (share <= ATTAINMENT_MAX)
    above = share > ATTAINMENT_MAX
    if in_band.any():
        place = _least(tightness, in_band & (narrow == narrow[in_band].min()))
    elif above.any():
        place = _least(tightness, above & (share == share[above].min()))
    else:
        place = _least(tightness, share == share.max())
    return Slo(
        ttft_s=ttft_edges_s[place[0]],
        itl_s=itl_edges_s[place[1]],
        attainment=float(share[place]),
        in_band=bool(ATTAINMENT_MIN <= share[place] <= ATTAINMENT_MAX),
    )


def attains(request: ProductionRequest, *, ttft_s: float, itl_s: float) -> bool:
    return _ttft_s(request) <= ttft_s and _itl_s(request) <= itl_s


def attainment(
    requests: Sequence[ProductionRequest], *, ttft_s: float, itl_s: float
) -> float | None:
    """Share of requests that attain both; None without requests."""
    if not requests:
        return None
    return sum(attains(r, ttft_s=ttft_s, itl_s=itl_s) for r in requests) / len(requests)


def _joint_attainment(
    requests: Sequence[ProductionRequest],
    ttft_edges_s: Sequence[float],
    itl_edges_s: Sequence[float],
    margin: float = 1.0,
) -> NDArray[np.float64]:
    """Share of requests that `margin` times as late are within each pair of edges, TTFT by ITL."""
    first = np.searchsorted(ttft_edges_s, [margin * _ttft_s(r) for r in requests])
    later = np.searchsorted(itl_edges_s, [margin * _itl_s(r) for r in requests])
    counts = np.zeros((len(ttft_edges_s) + 1, len(itl_edges_s) + 1))
    np.add.at(counts, (first, later), 1.0)
    within: NDArray[np.float64] = counts.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
    return within / len(requests)


def _least(tightness: NDArray[np.float64], among: NDArray[np.bool_]) -> tuple[int, int]:
    flat = int(np.argmin(np.where(among, tightness, np.inf)))
    row, column = divmod(flat, tightness.shape[1])
    return row, column


def _ttft_s(request: ProductionRequest) -> float:
    return math.inf if request.failed or request.ttft_s is None else request.ttft_s


def _itl_s(request: ProductionRequest) -> float:
    """The request's 99th percentile by nearest rank; 0 where it had one token."""
    if not request.itl_s:
        return 0.0
    rank = math.ceil(_ITL_QUANTILE * len(request.itl_s))
    return sorted(request.itl_s)[rank - 1]
