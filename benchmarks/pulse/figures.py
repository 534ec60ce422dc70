"""Cost of the pulse, from requests and counts. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from benchmarks.testbed.latency_ratios import latency_ratios
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.serving_figures import arms_of


class PulseArm(StrEnum):
    STOCK = "stock"
    PULSE = "pulse"
    METRICS = "metrics"
    TWIN = "twin"
    """A second server like the first: the noise floor, with what one process is unlike another."""


ARMS = tuple(PulseArm)
COMPARED = (PulseArm.PULSE, PulseArm.METRICS, PulseArm.TWIN)


@dataclass(slots=True)
class Figures:
    requests: list[ProductionRequest] = field(default_factory=list)
    closed: dict[PulseArm, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    """Requests per second of a closed loop, one value for each round."""
    core_s: dict[PulseArm, list[dict[str, float]]] = field(
        default_factory=lambda: {arm: [] for arm in ARMS}
    )
    """Core seconds for the replayed requests of each round, by process and thread."""

    def result(self) -> dict[str, Any]:
        """The two levels and, as the noise floor, `twin`: each over `stock`."""
        given = arms_of(self.requests, ARMS)
        result: dict[str, Any] = {
            "requests": {arm: len(given[arm].shared) for arm in ARMS},
            "failed": sum(request.failed for request in self.requests),
        }
        for arm in COMPARED:
            found = latency_ratios(given[arm], given[PulseArm.STOCK])
            ratios: dict[str, Any] = {
                name: {"ratio": ratio, "interval": found["intervals"][name]}
                for name, ratio in found["ratios"].items()
            }
            ratios["throughput"] = _by_round(self.closed[arm], self.closed[PulseArm.STOCK])
            ratios["core_time"] = _by_round(self._core_s(arm), self._core_s(PulseArm.STOCK))
            result[arm] = ratios
        result["core_ms_per_request"] = {
            arm: self._core_ms(arm, requests=len(given[arm].shared)) for arm in ARMS
        }
        return result

    def _core_s(self, arm: PulseArm) -> list[float]:
        return [sum(spent.values()) for spent in self.core_s[arm]]

    def _core_ms(self, arm: PulseArm, *, requests: int) -> dict[str, float]:
        """Core milliseconds per request, by process."""
        total: dict[str, float] = {}
        for spent in self.core_s[arm]:
            for name, seconds in spent.items():
                process = name.partition(": ")[0]
                total[process] = total.get(process, 0.0) + 1e3 * seconds
        return {name: ms / requests for name, ms in total.items()} if requests else {}


def _by_round(above: list[float], below: list[float]) -> dict[str, Any]:
    pairs = zip(above, below, strict=True) if above else ()  # An arm may be left out.
    ratios = sorted(one / other for one, other in pairs if other > 0.0)
    return {
        "ratio": median(ratios) if ratios else None,
        "range": (ratios[0], ratios[-1]) if ratios else None,
    }
