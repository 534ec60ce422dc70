"""Production's figures in each arm.

Every figure rests on the requests that all arms replayed: a block with a job ends with its last
step and so replays more or less of the window than its neighbours, and what only one arm saw would
be compared with nothing. Failures are counted over everything that was sent. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from benchmarks.testbed.latencies import itl_of, ttft_of
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import attainment

A = TypeVar("A", bound=str)


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Production in one arm, pooled over its blocks; percentiles of the requests that every arm
    replayed."""

    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    requests: int
    """Requests that every arm replayed: the basis of the figures."""
    failed: int
    """Failed ones among all requests sent."""
    slo_attainment: float | None
    requests_sent: int = 0


@dataclass(frozen=True, slots=True)
class ArmRequests:
    """One arm's measured requests: all that were sent, and those that every arm replayed."""

    sent: tuple[ProductionRequest, ...]
    shared: tuple[ProductionRequest, ...]


def arms_of(requests: Sequence[ProductionRequest], arms: Iterable[A]) -> dict[A, ArmRequests]:
    """Warm-up blocks (negative) left out. An arm without requests narrows nothing."""
    sent = {arm: tuple(r for r in requests if r.arm == arm and r.block >= 0) for arm in arms}
    seen = [{_identity(r) for r in given} for given in sent.values() if given]
    common = set.intersection(*seen) if seen else set()
    return {
        arm: ArmRequests(given, tuple(r for r in given if _identity(r) in common))
        for arm, given in sent.items()
    }


def serving_of(arm: ArmRequests, *, ttft_slo_s: float, itl_slo_s: float) -> Serving:
    ttft, itl = ttft_of(arm.shared), itl_of(arm.shared)
    return Serving(
        ttft_p50_ms=_ms(ttft.percentile_s(50)),
        ttft_p99_ms=_ms(ttft.percentile_s(99)),
        itl_p50_ms=_ms(itl.percentile_s(50)),
        itl_p99_ms=_ms(itl.percentile_s(99)),
        requests=len(arm.shared),
        failed=sum(r.failed for r in arm.sent),
        slo_attainment=attainment(arm.shared, ttft_s=ttft_slo_s, itl_s=itl_slo_s),
        requests_sent=len(arm.sent),
    )


def ratio(above: float | None, below: float | None) -> float | None:
    """Ratio of two figures; None if either was not measured or `below` is 0."""
    return None if above is None or not below else above / below


def idle_s(requests: Iterable[ProductionRequest], *, start_s: float, end_s: float) -> float:
    """Seconds between the two times in which no request was in flight."""
    idle, busy_until_s = 0.0, start_s
    for due_s, over_s in sorted((r.due_s, _over_s(r)) for r in requests):
        idle += max(0.0, min(due_s, end_s) - busy_until_s)
        busy_until_s = max(busy_until_s, min(over_s, end_s))
    return idle + end_s - busy_until_s


def _over_s(request: ProductionRequest) -> float:
    """Time of the last token."""
    return request.due_s + (request.ttft_s or 0.0) + sum(request.itl_s)


def _identity(request: ProductionRequest) -> tuple[int, int]:
    return request.block, request.trace_index


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
