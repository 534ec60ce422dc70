"""All arms on one workload: dollars, kept promises, and prices over time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from scheduler.rollmux.cluster.runtime import PhaseRuntime
from scheduler.sim.rollmux.arms import ARMS, SLO_COUNTS_QUEUEING, arm_result, run_arm
from scheduler.sim.rollmux.baselines import UNSHARED
from scheduler.sim.rollmux.driver import not_watched
from scheduler.sim.rollmux.ledger import Ledger, RunResult, slowdown
from scheduler.sim.rollmux.workload import NODE_TYPES, PAPER_WORLD, SimulatedJob

BINS: Final = 240


@dataclass(slots=True)
class GroupSizes:
    """Numbers of groups by size, recorded whenever nodes have changed hands."""

    sizes: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """Time, and groups of one job, of two, and so on from then."""

    def record(self, runtime: PhaseRuntime, now: float) -> None:
        planner = runtime.cluster.planner
        counts = [0] * planner.packer.limits.group_jobs
        for group in planner.table.groups.values():
            if group.pinned:
                counts[len(group.pinned) - 1] += 1
        self.sizes.append((now, tuple(counts)))


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dollars: float
    over_ours: float
    slo_attainment: float
    moves: int | None = None
    """Moves of jobs; None for arms that never share a node."""
    worst_window: float | None = None
    """Largest slow-down over 20 iterations in a row, as a ratio of the SLO."""
    windows_kept: int | None = None
    """Jobs that kept their SLO in their worst 20 iterations too."""
    windows_above_goal: int | None = None
    """Jobs that were more than 1.3 times slower there than their SLO."""
    slowdowns_over_slo: tuple[float, ...] = ()
    """Slow-down over SLO of every job, ascending; above 1 the SLO was missed."""
    dollars_per_hour: tuple[float, ...] = ()
    """Mean of each bin of the run."""


class ArmComparison(msgspec.Struct, frozen=True, kw_only=True):
    simulated: bool = True
    slo_counts_queueing: bool = SLO_COUNTS_QUEUEING
    jobs: int
    seed: int
    hours: float
    """Time from the first arrival to the last end in any arm, in hours."""
    arms: tuple[ArmSummary, ...]
    group_sizes: tuple[tuple[float, ...], ...]
    """Number of our groups in each bin, per group size from one job on: `[size - 1][bin]`."""

    def arm(self, name: str) -> ArmSummary:
        return next(arm for arm in self.arms if arm.name == name)


def compare(
    jobs: list[SimulatedJob],
    *,
    seed: int,
    record: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[ArmComparison, Ledger]:
    """The comparison, and our arm's ledger, which holds its events with `record`.

    `on_progress` is called with each arm's name before it runs.
    """
    runs: dict[str, RunResult] = {}
    sizes = GroupSizes()
    for name, arm in ARMS.items():
        on_progress(name)
        ours = name == "ours"
        watch = sizes.record if ours else not_watched
        runs[name] = run_arm(arm, jobs, seed=seed, record=record and ours, watch=watch)
    begin_s, end_s = jobs[0].arrival_s, max(run.end_s for run in runs.values())
    edges_s = np.linspace(begin_s, end_s, BINS + 1)
    ledger = runs["ours"].ledger
    arms = [_shared(name, run, jobs, ledger.dollars, edges_s) for name, run in runs.items()]
    for name, price in UNSHARED.items():
        spent = price(jobs, PAPER_WORLD)
        arms.append(
            ArmSummary(
                name=name,
                dollars=spent.dollars,
                over_ours=spent.dollars / ledger.dollars,
                slo_attainment=spent.attained / len(jobs),
                dollars_per_hour=_rate(_alone(jobs), edges_s) if name == "solo_d" else (),
            )
        )
    comparison = ArmComparison(
        jobs=len(jobs),
        seed=seed,
        hours=(end_s - begin_s) / 3600,
        arms=tuple(arms),
        group_sizes=_sizes(sizes.sizes, edges_s),
    )
    return comparison, ledger


def _shared(
    name: str, run: RunResult, jobs: list[SimulatedJob], ours: float, edges_s: np.ndarray
) -> ArmSummary:
    """An arm whose jobs share nodes; `ours` are our dollars."""
    ratios = (
        slowdown(one, run.ledger.ended_s[one.job.job], PAPER_WORLD) / one.job.slo for one in jobs
    )
    found = arm_result(jobs, run)
    return ArmSummary(
        name=name,
        dollars=found.dollars,
        over_ours=found.dollars / ours,
        slo_attainment=found.kept / len(jobs),
        moves=found.moves,
        worst_window=found.worst_window,
        windows_kept=found.windows_kept,
        windows_above_goal=found.windows_above_goal,
        slowdowns_over_slo=tuple(sorted(ratios)),
        dollars_per_hour=_rate(run.ledger.priced, edges_s),
    )


def _alone(jobs: list[SimulatedJob]) -> list[tuple[float, float, float]]:
    """Start, end and price per hour of every job on dedicated nodes, from its arrival on."""
    return [
        (
            one.arrival_s,
            one.arrival_s + one.solo_s(PAPER_WORLD),
            sum(
                phase.nodes * NODE_TYPES[pool].price_per_hour
                for pool, phase in zip(NODE_TYPES, one.job.phases, strict=True)
            ),
        )
        for one in jobs
    ]


def _rate(priced: Sequence[tuple[float, float, float]], edges_s: np.ndarray) -> tuple[float, ...]:
    """Mean dollars an hour between each two edges."""
    left, right = edges_s[:-1], edges_s[1:]
    rate = np.zeros(len(left))
    for from_s, until_s, price_per_hour in priced:
        inside = np.minimum(right, until_s) - np.maximum(left, from_s)
        rate += np.clip(inside, 0.0, None) / (right - left) * price_per_hour
    return tuple(rate.tolist())


def _sizes(
    seen: Sequence[tuple[float, tuple[int, ...]]], edges_s: np.ndarray
) -> tuple[tuple[float, ...], ...]:
    """Groups of each size at the middle of each bin."""
    times_s = np.array([t_s for t_s, _ in seen])
    counts = np.array([counts for _, counts in seen])
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2
    last = np.searchsorted(times_s, middles_s, side="right") - 1
    rows = np.where(last[:, None] >= 0, counts[np.maximum(last, 0)], 0)
    return tuple(tuple(map(float, column)) for column in rows.T.tolist())
