"""One seed of the workload under every arm: its cost, and the SLOs it kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from harvester.contracts.ids import NodeId
from scheduler.model import Pool
from scheduler.rollmux.beliefs.tail import PAPER_THRESHOLD
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.rollmux.cluster.runtime import PhaseRuntime, RuntimeConfig
from scheduler.rollmux.forecast.scenarios import ROUNDING
from scheduler.rollmux.permits.terms import PermitsConfig
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.sim.rollmux.baselines import GreedyPlanner, RandomPlanner, paper_planner
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
from scheduler.sim.rollmux.driver import Driver, Watch, not_watched
from scheduler.sim.rollmux.ledger import Ledger, RunResult, attained, worst_window
from scheduler.sim.rollmux.workload import NODE_TYPES, PAPER_WORLD, SimulatedJob, World

WINDOW_GOAL: Final = 1.3
"""Goal, not a promise, for a job's slow-down over its worst 20 iterations, relative to its SLO."""
SLO_COUNTS_QUEUEING: Final = True
"""Every slow-down here counts from a job's arrival, so that a wait for nodes is part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    dollars: float
    jobs: int
    kept: int
    """Jobs with completion over realised solo time within their SLO."""
    kept_profiled: int
    """Jobs kept by the same measure against the solo time at declared maxima."""
    kept_falsely: int
    """Jobs with an SLO that the control reported as kept, and that was not."""
    worst_window: float
    """Largest slow-down over 20 iterations in a row, as a ratio of the SLO."""
    windows_kept: int
    """Jobs with their worst 20 iterations within their SLO too."""
    windows_above_goal: int
    moves: int
    events: int
    failures: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class ArmSettings:
    """Deviations from the shipped settings."""

    planner: Callable[[ClusterConfig, list[SimulatedJob], int], GroupPlanner] | None = None
    """Makes the planner; None: the shipped one."""
    tail_ratio: float | None = None


ARMS: Final = {
    "ours": ArmSettings(),
    "rollmux_paper": ArmSettings(lambda _config, _jobs, _seed: paper_planner(), PAPER_THRESHOLD),
    "random": ArmSettings(lambda _config, _jobs, seed: RandomPlanner(seed), PAPER_THRESHOLD),
    "greedy": ArmSettings(lambda _config, _jobs, _seed: GreedyPlanner(), PAPER_THRESHOLD),
}
_NEVER_S: Final = 1e9
"""Timeout that never expires: the driver leaves out beats that only report life."""


def runtime_of(
    arm: ArmSettings, jobs: list[SimulatedJob], *, seed: int, harvesting: bool = False
) -> PhaseRuntime:
    """The shipped runtime with as many nodes as the jobs can ever hold at once."""
    cluster = ClusterConfig(
        rollout=_nodes(Pool.ROLLOUT, sum(one.job.phases[0].nodes for one in jobs)),
        training=_nodes(Pool.TRAINING, sum(one.job.phases[1].nodes for one in jobs)),
        tail_ratio=arm.tail_ratio,
        slo_counts_queueing=SLO_COUNTS_QUEUEING,
        gone_s=_NEVER_S,
        harvesting=harvesting,
    )
    config = RuntimeConfig(permits=PermitsConfig(lease_s=_NEVER_S), cluster=cluster)
    planner = None if arm.planner is None else arm.planner(cluster, jobs, seed)
    return PhaseRuntime(config, planner)


def _nodes(pool: Pool, count: int) -> PoolNodes:
    """Twice the nodes of all jobs: a job that moves holds its old and its new ones."""
    kind = NODE_TYPES[pool]
    names = tuple(NodeId(f"{kind.type}-{number}") for number in range(1, 2 * count + 1))
    return PoolNodes(type=kind, names=names)


def run_arm(
    arm: ArmSettings,
    jobs: list[SimulatedJob],
    *,
    seed: int,
    world: World = PAPER_WORLD,
    record: bool = False,
    disruptions: Disruptions = UNDISTURBED,
    watch: Watch = not_watched,
) -> RunResult:
    """`watch` is called whenever nodes have changed hands."""
    runtime = runtime_of(arm, jobs, seed=seed)
    ledger = Ledger(record=record)
    driver = Driver(jobs, runtime, world=world, disruptions=disruptions, ledger=ledger, watch=watch)
    return driver.run()


def arm_result(jobs: list[SimulatedJob], run: RunResult, world: World = PAPER_WORLD) -> ArmResult:
    """Result of a run, over the jobs that were not given up.

    Raises AssertionError if any other job did not end or a node stayed up.
    """
    done = [one for one in jobs if one.job.job in run.ledger.ended_s]
    if len(done) + run.counts.given_up != len(jobs) or run.ledger.nodes_up:
        raise AssertionError("every job ends and every node goes down")
    kept = {one.job.job for one in done if attained(one, run.ledger.ended_s[one.job.job], world)}
    windows = [worst_window(one, run.ledger.iteration_ends_s[one.job.job], world) for one in done]
    return ArmResult(
        dollars=run.ledger.dollars,
        jobs=len(done),
        kept=len(kept),
        kept_profiled=sum(
            _kept_profiled(one, run.ledger.ended_s[one.job.job], world) for one in done
        ),
        kept_falsely=len(run.ledger.reported_kept - kept),
        worst_window=max(windows),
        windows_kept=sum(one <= 1.0 + ROUNDING for one in windows),
        windows_above_goal=sum(one > WINDOW_GOAL for one in windows),
        moves=run.counts.moves,
        events=run.counts.events,
        failures=run.counts.failures,
        restarts=run.counts.restarts,
    )


def _kept_profiled(one: SimulatedJob, ended_s: float, world: World) -> bool:
    iteration_s = sum(phase.max_s for phase in one.job.phases) + world.sync_s
    profiled_s = world.cold_start_s + one.iterations * iteration_s
    return ended_s - one.arrival_s <= one.job.slo * profiled_s
