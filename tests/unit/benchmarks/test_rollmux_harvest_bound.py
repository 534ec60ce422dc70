"""Upper bounds of the value of leases, which follow from prices and from hostings."""

import pytest
from msgspec.structs import replace

from benchmarks.rollmux.harvest_bound import TAIL, busy_bound, cheapest_mix, drawn
from scheduler.sim.rollmux.workload import H20_PER_HOUR, H800_PER_HOUR, SimulatedJob

PAIR_PER_HOUR = H20_PER_HOUR + H800_PER_HOUR


def _jobs(count: int, *, slo: float) -> list[SimulatedJob]:
    """Jobs with the largest share of rollout in their iterations."""
    long_rollouts = sorted(drawn(0), key=lambda one: one.means_s[1] / one.means_s[0])
    return [
        SimulatedJob(
            job=replace(one.job, slo=slo, host_bytes=1),
            arrival_s=one.arrival_s,
            lengths_s=one.lengths_s,
            means_s=one.means_s,
        )
        for one in long_rollouts[:count]
    ]


def test_a_job_that_may_not_be_slowed_costs_its_own_nodes() -> None:
    assert cheapest_mix(_jobs(1, slo=1.0)) == pytest.approx(PAIR_PER_HOUR)


def test_jobs_that_may_wait_cost_less_together_and_no_less_than_if_no_node_were_idle() -> None:
    jobs = _jobs(2, slo=2.0)
    together = cheapest_mix(jobs)
    work = sum(
        (one.means_s[0] * TAIL.node_ratio * H20_PER_HOUR + one.means_s[1] * H800_PER_HOUR)
        / sum(one.means_s)
        for one in jobs
    )
    assert work < together < 0.9 * 2 * PAIR_PER_HOUR


def test_leases_make_a_job_alone_cheaper_by_the_bulk_that_they_take() -> None:
    """Half as many slots as accelerators, all idle, make a bulk half as fast again."""
    (one,) = jobs = _jobs(1, slo=2.0)
    bulk_s, iteration_s = 0.5 * one.means_s[0], sum(one.means_s)
    shorter_s = bulk_s / 3
    leased = cheapest_mix(jobs, headroom=1.0)
    assert leased == pytest.approx(PAIR_PER_HOUR * (1 - shorter_s / iteration_s), rel=1e-6)


def test_no_idle_node_bounds_what_leases_spare_by_the_rollouts_share_of_the_price() -> None:
    jobs = drawn(1)
    gains = [busy_bound(headroom, jobs) for headroom in (0.0, 0.35, 1.0)]
    assert gains[0] == 1.0
    assert gains == sorted(gains)
    assert gains[2] < 1.15
