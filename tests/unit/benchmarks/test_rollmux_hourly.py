"""Hourly regrouping: the baseline under drift judges a move as our reviews do."""

from benchmarks.rollmux.hourly import HOUR_S, HourlyPlanner
from scheduler.model import Pool
from scheduler.rollmux.cluster.config import ClusterConfig, PoolNodes
from scheduler.sim.rollmux.workload import NODE_TYPES, w1


def test_hourly_regrouping_counts_the_time_for_which_a_moved_job_loads() -> None:
    pools = {pool: PoolNodes(type=kind, names=()) for pool, kind in NODE_TYPES.items()}
    config = ClusterConfig(rollout=pools[Pool.ROLLOUT], training=pools[Pool.TRAINING])
    jobs = w1(0, jobs=2)
    planner = HourlyPlanner(config, jobs)
    for one in jobs:
        planner.place_job(one.job, now=0.0)
    planner.review(now=HOUR_S)
    assert planner.packer.load_s == config.move_s
