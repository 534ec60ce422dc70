"""The arms that only benchmarks run, beside those of `rosemux simulate`."""

from dataclasses import replace
from typing import Final

from benchmarks.rollmux.hourly import HourlyPlanner
from benchmarks.rollmux.optimal_hosting import KnownJob, Optimum, PinnedPlanner
from harvester.contracts.errors import ConfigError
from scheduler.model import Pool
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.sim.rollmux import arms
from scheduler.sim.rollmux.arms import ArmSettings
from scheduler.sim.rollmux.workload import NODE_TYPES, SimulatedJob

OPTIMUM_JOBS_MAX: Final = 12


def our_planner() -> GroupPlanner:
    """The shipped planner, without a runtime around it and with unlimited nodes."""
    pools = {pool: PoolNodes(type=kind, names=()) for pool, kind in NODE_TYPES.items()}
    config = ClusterConfig(rollout=pools[Pool.ROLLOUT], training=pools[Pool.TRAINING])
    return GroupPlanner(config.judge, config.types, config.planner)


def _resubmitting_planner(config: ClusterConfig) -> GroupPlanner:
    """Our planner with the paper's answer to a node's failure."""
    return GroupPlanner(config.judge, config.types, replace(config.planner, resubmits=True))


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
    "ours_resubmit": ArmSettings(lambda config, _jobs, _seed: _resubmitting_planner(config)),
    "hourly": ArmSettings(lambda config, jobs, _seed: HourlyPlanner(config, jobs)),
    "optimum": ArmSettings(lambda _config, jobs, _seed: _optimum_planner(jobs)),
}
