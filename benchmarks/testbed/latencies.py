"""Latencies of one arm's requests, each with the round in which it was measured. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.testbed.production_request import ProductionRequest


@dataclass(frozen=True, slots=True)
class ArmLatencies:
    """One kind of latency of one arm."""

    values_s: NDArray[np.float64]
    rounds: NDArray[np.int64]
    """The round of each value."""

    def percentile_s(self, percent: float) -> float | None:
        return float(np.percentile(self.values_s, percent)) if len(self.values_s) else None


def ttft_of(requests: Iterable[ProductionRequest]) -> ArmLatencies:
    """First-token latencies of the requests that had a first token and did not fail, in s."""
    return _latencies(
        (r.block, () if r.ttft_s is None else (r.ttft_s,), r.failed) for r in requests
    )


def itl_of(requests: Iterable[ProductionRequest]) -> ArmLatencies:
    return _latencies((r.block, r.itl_s, r.failed) for r in requests)


def _latencies(found: Iterable[tuple[int, Sequence[float], bool]]) -> ArmLatencies:
    kept = [(number, value) for number, values, failed in found if not failed for value in values]
    return ArmLatencies(
        np.array([value for _, value in kept], dtype=float),
        np.array([number for number, _ in kept], dtype=np.int64),
    )
