"""Two orders of phases under the same jobs: dollars, kept SLOs, the worst 20 iterations and CPU.

`credit` starts the job with the least credit, and may leave a node idle for a tight one; `fcfs` is
first come, first served. Planner, forecasts and simulated groups run the same order. One run after
the other in one process, each seed with the other order first.
"""

from collections.abc import Sequence
from time import process_time
from typing import Any, Final

import msgspec

from benchmarks.rollmux.pieces import Pieces
from scheduler.sim.rollmux.arms import ArmResult, run_arm, summary
from scheduler.sim.rollmux.baselines import solo_d
from scheduler.sim.rollmux.workload import Drift, w1

ORDERS: Final = {"credit": "ours", "fcfs": "ours_fcfs"}
"""Arms by the order that they run."""
_FEW: Final = 3
"""Seeds of W2 and of each drift."""


class OrderRun(msgspec.Struct, frozen=True, kw_only=True):
    solo_d_ratio: float
    """Solo-D's dollars over this order's."""
    arm: ArmResult
    cpu_s: float


class OrderedSeed(msgspec.Struct, frozen=True, kw_only=True):
    order: str
    seed: int
    drift: Drift = Drift.NONE
    wide_ratio: float = 0.0

    @property
    def key(self) -> str:
        return f"order-{self.order}-{self.seed}-{self.drift}-{self.wide_ratio:g}"

    def run(self) -> OrderRun:
        jobs = w1(self.seed, drift=self.drift, wide_ratio=self.wide_ratio)
        began_s = process_time()
        found = summary(jobs, run_arm(ORDERS[self.order], jobs, seed=self.seed))
        cpu_s = process_time() - began_s
        ratio = solo_d(jobs).dollars / found.dollars
        return OrderRun(solo_d_ratio=ratio, arm=found, cpu_s=cpu_s)


def order_figures(seeds: Sequence[int], pieces: Pieces) -> list[dict[str, Any]]:
    """W1 on all seeds; W2, and W1 under each drift, on the first few."""
    rows = []
    for drift, wide_ratio in (
        (Drift.NONE, 0.0),
        (Drift.NONE, 0.1),
        (Drift.INCREASING, 0.0),
        (Drift.DECREASING, 0.0),
        (Drift.MIXED, 0.0),
    ):
        plain = drift is Drift.NONE and not wide_ratio
        for seed in seeds if plain else seeds[:_FEW]:
            for order in sorted(ORDERS, reverse=bool(seed % 2)):
                one = OrderedSeed(order=order, seed=seed, drift=drift, wide_ratio=wide_ratio)
                found = pieces.kept(one.key, one.run, OrderRun)
                rows.append(msgspec.to_builtins(one) | msgspec.to_builtins(found))
    return rows
