"""From requests and counts to what the pulse costs. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from scheduler.demo.bootstrap import itl_of, ratio_interval, ttft_of
from scheduler.demo.records import ProductionRequest
from scheduler.demo.serving_figures import arms_of, ratio


class Arm(StrEnum):
    STOCK = "stock"
    PULSE = "pulse"
    METRICS = "metrics"
    STOCK_AGAIN = "stock_again"


ARMS = tuple(Arm)
COMPARED = (Arm.PULSE, Arm.METRICS, Arm.STOCK_AGAIN)


@dataclass(slots=True)
class Figures:
    requests: list[ProductionRequest] = field(default_factory=list)
    closed: dict[Arm, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    """Requests per second of a closed loop, one value for each round."""

    def result(self, *, seed: int) -> dict[str, Any]:
        """The two levels and, as the noise floor, `stock_again`: each over `stock`."""
        given = arms_of(self.requests, ARMS)
        result: dict[str, Any] = {
            "requests": {arm: len(given[arm].shared) for arm in ARMS},
            "failed": sum(request.failed for request in self.requests),
        }
        below = given[Arm.STOCK].shared
        for arm in COMPARED:
            ratios: dict[str, Any] = {}
            for name, of in (("ttft", ttft_of), ("itl", itl_of)):
                above, under = of(given[arm].shared), of(below)
                for percent in (50, 99):
                    ratios[f"{name}_p{percent}"] = {
                        "ratio": ratio(above.percentile_s(percent), under.percentile_s(percent)),
                        "interval": ratio_interval(above, under, percent=percent, seed=seed),
                    }
            pairs = zip(self.closed[arm], self.closed[Arm.STOCK], strict=True)
            speeds = sorted(one / other for one, other in pairs if other > 0.0)
            ratios["throughput"] = {
                "ratio": median(speeds) if speeds else None,
                "range": (speeds[0], speeds[-1]) if speeds else None,
            }
            result[arm] = ratios
        return result
