"""Forecasts: the shortcut to a verdict gives the verdict of the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.forecast.forecast import Occupant, Roster
from scheduler.rollmux.forecast.judge import OUR_RULES, Judge
from scheduler.rollmux.forecast.scenarios import (
    Horizon,
    ShortRun,
    keeps_all,
    least_bound,
    slowdowns,
    upper_bound,
)
from tests.unit.scheduler.rollmux.forecast.stage_jobs import occupant

HORIZON = Horizon()
occupants = st.builds(
    Occupant,
    rollout_nodes=st.sampled_from([1, 2]),
    training_nodes=st.sampled_from([4, 8]),
    slo=st.floats(1.0, 2.0),
    belief=st.builds(
        Belief,
        rollout_s=st.floats(100, 500),
        rollout_spread_s=st.floats(0, 60),
        rollout_cv=st.floats(0, 0.15),
        training_s=st.floats(60, 400),
        training_spread_s=st.floats(0, 60),
        training_cv=st.floats(0, 0.15),
        sync_s=st.sampled_from([0.0, 40.0]),
    ),
    bulk_ratio=st.sampled_from([0.5, 1.0]),
    tail_share=st.just(0.25),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(occupants, min_size=1, max_size=4),
    st.floats(-0.5, 2.0),
    st.sampled_from([0.0, 0.04, float("inf")]),
)
def test_a_verdict_is_that_of_the_short_run_and_of_every_scenario(
    members: list[Occupant], quantile: float, margin: float
) -> None:
    roster, short_run = Roster.of(members), ShortRun(margin=margin)
    short = Horizon(scenarios=1, warm_up=short_run.warm_up, cycles=short_run.cycles)
    jobs, beliefs = roster.jobs, roster.beliefs
    first = slowdowns(jobs, beliefs, short, OUR_RULES)[0]
    bound = upper_bound(slowdowns(jobs, beliefs, HORIZON, OUR_RULES), quantile)
    expected = (first <= roster.slos + margin).all() and (bound <= roster.slos + 1e-9).all()
    found = keeps_all(jobs, beliefs, short_run, HORIZON, quantile, OUR_RULES)
    assert found == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1.0, 4.0), min_size=4, max_size=4), st.integers(1, 3), st.floats(0, 2))
def test_the_bound_after_some_scenarios_never_exceeds_that_after_all(
    slow: list[float], known: int, quantile: float
) -> None:
    whole = upper_bound(np.array(slow)[:, None], quantile)[0]
    assert least_bound(np.array(slow[:known]), 4, quantile) <= whole + 1e-9


def test_the_bound_after_some_scenarios_is_reached_when_the_others_are_as_alone() -> None:
    whole = upper_bound(np.array([1.5, 1.0, 1.0, 1.0])[:, None], 0.67)[0]
    assert least_bound(np.array([1.5]), 4, 0.67) == pytest.approx(whole)


def test_jobs_of_too_unlike_iterations_share_no_group_and_are_not_run() -> None:
    """The short job would rarely wait; its iterations, run over the long one's, take too long."""
    judge, short = Judge().with_warm_start(0.0), occupant(0.6, 0.4, slo=100.0)
    long = occupant(1.0, 2e4, slo=100.0, training=4)
    longer = long._replace(belief=long.belief._replace(training_s=1e10))
    assert judge.admits(Roster.of([short, long._replace(belief=short.belief)]))
    for other in (long, longer):
        roster = Roster.of([short, other])
        assert not judge.admits(roster)
        assert min(judge.bounds(roster)) > 100.0
    assert judge.admits(Roster.of([longer]))
