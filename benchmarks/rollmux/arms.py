"""The arms that only benchmarks run, beside those of `rosemux simulate`."""

from typing import Final

from benchmarks.rollmux.hourly import HourlyPlanner
from benchmarks.rollmux.optimal_hosting import KnownJob, Optimum, PinnedPlanner
from benchmarks.rollmux.resubmitting import ResubmittingPlanner
from harvester.contracts.errors import ConfigError
from scheduler.model import Pool
from scheduler.rollmux.beliefs.tail import PAPER_THRESHOLD
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.sim.rollmux import arms
from scheduler.sim.rollmux.arms import ArmSettings
from scheduler.sim.rollmux.baselines import paper_planner
from scheduler.sim.rollmux.workload import NODE_TYPES, SimulatedJob

OPTIMUM_JOBS_MAX: Final = 12


def our_planner() -> GroupPlanner:
    """The shipped planner, without a runtime around it and with unlimited nodes."""
    pools = {pool: PoolNodes(type=kind, names=()) for pool, kind in NODE_TYPES.items()}
    config = ClusterConfig(rollout=pools[Pool.ROLLOUT], training=pools[Pool.TRAINING])
    return GroupPlanner(config.judge, config.types, config.planner)


def _optimum_planner(jobs: list[SimulatedJob]) -> GroupPlanner:
    """The exact optimum of a few jobs that are all there from the beginning.

    Raises ConfigError for more than `OPTIMUM_JOBS_MAX` jobs.
    """
    if len(jobs) > OPTIMUM_JOBS_MAX:
        raise ConfigError(f"the optimum is found for {OPTIMUM_JOBS_MAX} jobs, not {len(jobs)}")
    _, hostings = Optimum([KnownJob.of(one) for one in jobs]).cheapest()
    return PinnedPlanner(jobs, hostings)


ARMS: Final = {
    **arms.ARMS,
    "rollmux_paper": ArmSettings(
        lambda _config, _jobs, _seed: paper_planner(ResubmittingPlanner), PAPER_THRESHOLD
    ),
    "ours_resubmit": ArmSettings(
        lambda config, _jobs, _seed: ResubmittingPlanner(config.judge, config.types, config.planner)
    ),
    "hourly": ArmSettings(lambda config, jobs, _seed: HourlyPlanner(config, jobs)),
    "optimum": ArmSettings(lambda _config, jobs, _seed: _optimum_planner(jobs)),
}
