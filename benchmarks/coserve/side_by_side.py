"""One load of production's, alone and beside rollouts, in turn: what its users see of the guest."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.coserve.arms import SETTINGS, Arm
from benchmarks.coserve.rounds import Runner
from benchmarks.testbed.interleaving import interleaved
from benchmarks.testbed.latencies import ArmLatencies
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.round_ratios import STATISTICS, round_ratio
from benchmarks.testbed.trace import Arrival

_BEFORE_S = 3.0
_LOOK_S = 0.05

Seen = dict[Arm, list[ProductionRequest]]


@dataclass(slots=True)
class SideBySide:
    """`trials` of each kind."""

    runner: Runner
    trials: int
    patience_s: float = 60.0
    """A request without its last token by then has failed."""
    warmed_up: bool = False
    """Whether one uncounted run alone comes first: an engine's first run is no trial."""
    kv_usage_ratio: float = field(default=0.0)
    """Production's largest, of all trials."""

    async def run(self, name: str, arrivals: Sequence[Arrival]) -> Seen:
        seen: Seen = {Arm.ALONE: [], Arm.ROSEMUX: []}
        if self.warmed_up:
            await self._trial(Arm.ALONE, name, -1, arrivals, [])
        for arm, trial in interleaved(tuple(seen), self.trials):
            await self._trial(arm, name, trial, arrivals, seen[arm])
        return seen

    async def _trial(
        self,
        arm: Arm,
        name: str,
        trial: int,
        arrivals: Sequence[Arrival],
        requests: list[ProductionRequest],
    ) -> None:
        runner = self.runner
        async with runner.arranged(SETTINGS[arm]):
            await asyncio.sleep(_BEFORE_S)
            watch = asyncio.ensure_future(self._watch())
            try:
                client = replace(runner.client, record=requests.append, timeout_s=self.patience_s)
                start_s = runner.clock.now()
                # Each arm has prompts of its own: the second would find the first's cached.
                await client.replay(arrivals, arm=f"{name} {arm}", block=trial, start_s=start_s)
            finally:
                watch.cancel()

    async def _watch(self) -> None:
        while True:
            self.kv_usage_ratio = max(self.kv_usage_ratio, self.runner.pulse().kv_usage_ratio)
            await asyncio.sleep(_LOOK_S)


def compared(
    seen: Seen, of: Callable[[ProductionRequest], bool] = lambda _: True
) -> dict[str, Any]:
    """Requests of both arms, their failures, and TTFT ratios over alone for requests with `of`."""
    ttft = {arm: _ttft_of([r for r in requests if of(r)]) for arm, requests in seen.items()}
    above, below = ttft[Arm.ROSEMUX], ttft[Arm.ALONE]
    found: dict[str, Any] = {
        "requests": sum(len(requests) for requests in seen.values()),
        "failed": sum(r.failed for requests in seen.values() for r in requests),
    }
    for statistic, figure in STATISTICS.items():
        over = round_ratio(above, below, figure)
        found[f"ttft_{statistic}_ratio"] = over.ratio
        found[f"ttft_{statistic}_interval"] = over.interval
    return found


def _ttft_of(requests: Sequence[ProductionRequest]) -> ArmLatencies:
    """First-token latencies by trial: the requests of one trial met the same machine speed."""
    answered = [(r.ttft_s, r.block) for r in requests if r.ttft_s is not None]
    return ArmLatencies(
        np.array([ttft_s for ttft_s, _ in answered]), np.array([trial for _, trial in answered])
    )
