"""A load that production has never shown: from nothing to ten times the mean within a second.

The guest has learned, and the agent has judged, from hours of something else. Alone and beside
rollouts take turns.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.coserve.arms import SETTINGS, Arm
from benchmarks.coserve.reclaim import percentile
from benchmarks.coserve.rounds import Runner
from scheduler.demo.records import ProductionRequest
from scheduler.demo.serving_figures import ratio
from scheduler.demo.trace import Arrival

TIMES = 10.0
_BEFORE_S = 3.0
_WITHIN_S = 1.0


@dataclass(slots=True)
class Surges:
    runner: Runner

    async def run(self, trials: int, arrivals: Sequence[Arrival], *, rate: float) -> dict[str, Any]:
        """`trials` of each kind; `rate` is the mean of before, in requests per second."""
        count = max(1, min(len(arrivals), round(TIMES * rate * _WITHIN_S)))
        surge = [
            replace(arrival, t_s=_WITHIN_S * place / count)
            for place, arrival in enumerate(arrivals[:count])
        ]
        seen: dict[Arm, list[ProductionRequest]] = {Arm.ALONE: [], Arm.ROSEMUX: []}
        for turn in range(trials):
            for arm, requests in seen.items():
                await self._trial(arm, turn, surge, requests)
        return {
            "requests": len(surge) * trials,
            "failed": sum(r.failed for requests in seen.values() for r in requests),
        } | {
            f"ttft_p{percent}_ratio": ratio(
                _ttft(seen[Arm.ROSEMUX], percent), _ttft(seen[Arm.ALONE], percent)
            )
            for percent in (50, 99)
        }

    async def _trial(
        self, arm: Arm, turn: int, surge: list[Arrival], requests: list[ProductionRequest]
    ) -> None:
        runner = self.runner
        async with runner.arranged(SETTINGS[arm]):
            await asyncio.sleep(_BEFORE_S)
            client = replace(runner.client, record=requests.append)
            await client.replay(surge, arm="surge", block=turn, start_s=runner.clock.now())


def _ttft(requests: list[ProductionRequest], percent: int) -> float | None:
    return percentile([r.ttft_s for r in requests if r.ttft_s is not None], percent)
