"""Settings of moves and starts follow their measurements."""

import pytest

from harvester.contracts.ids import JobId
from scheduler.rollmux.cluster.measured import MeasuredSeconds
from scheduler.rollmux.permits.events import Forget
from tests.unit.scheduler.rollmux.cluster.submissions import (
    ROLLOUT,
    TRAINING,
    Control,
    ask_to_move,
    cluster,
    submission,
)


def test_an_observation_near_the_declared_duration_changes_nothing() -> None:
    measured = MeasuredSeconds.begin(300.0)
    assert not any(measured.observe(seconds) for seconds in (280.0, 300.0, 330.0) * 20)
    assert measured.in_force_s == 300.0


def test_a_setting_that_is_wrong_is_followed_in_few_steps() -> None:
    measured = MeasuredSeconds.begin(5.0)
    changes = sum(measured.observe(20.0) for _ in range(60))
    assert measured.in_force_s == pytest.approx(20.0, rel=0.25)
    assert changes <= 4


def test_one_job_that_was_away_for_hours_says_little() -> None:
    measured = MeasuredSeconds.begin(300.0)
    for _ in range(12):
        measured.observe(300.0)
    measured.observe(36_000.0)
    assert measured.mean_s < 500.0


def test_moves_and_starts_are_measured_by_the_control() -> None:
    control = Control(cluster(move_s=300.0, warm_start_s=0.5))
    control.submit(submission("a"), submission("b"))
    for _ in range(12):
        control.runs("a", ROLLOUT)
        control.pass_time(40.0, beats="a")
        control.leave("a")
        control.runs("a", TRAINING)
        control.pass_time(18.0, beats="a")
        control.leave("a", loading_s=3.0)
    policy = control.service.cluster
    assert policy.load_times.warm_start.in_force_s == pytest.approx(3.0, rel=0.3)
    assert policy.planner.packer.judge.rules.warm_s == policy.load_times.warm_start.in_force_s
    given = policy.placements["a"].spec
    for _ in range(7):
        ask_to_move(policy, "a")
        control.pass_time(61.0)
        moved = control.iteration("a")
        assert moved.move is not None
        control.submit(given)
        control.pass_time(39.0)
    assert policy.planner.relocation.move_s == policy.load_times.move.in_force_s
    assert policy.load_times.move.in_force_s == pytest.approx(180.0, rel=0.25)


@pytest.mark.parametrize("held_s", [0.01, 100.0])
def test_no_tenant_s_report_makes_starts_slow_for_all(held_s: float) -> None:
    control = Control(cluster("r0", "t0", warm_start_s=5.0))
    control.submit(submission("a", slo=3.0))
    for _ in range(30):
        for kind in (ROLLOUT, TRAINING):
            control.runs("a", kind)
            control.pass_time(held_s, beats="a")
            control.leave("a", loading_s=1e9)
    assert control.service.cluster.load_times.warm_start.in_force_s <= (
        5.0 if held_s < 5.0 else 40.0
    )


def _iteration(control: Control, *, loading_s: float) -> None:
    for kind in (ROLLOUT, TRAINING):
        control.runs("a", kind)
        control.pass_time(20.0 + loading_s, beats="a")
        control.leave("a", loading_s=loading_s)


def test_cold_loads_and_states_that_were_still_loaded_are_no_warm_starts() -> None:
    control = Control(cluster(warm_start_s=5.0))
    control.submit(submission("a"))
    for _ in range(6):
        control.runs("a")
        control.leave("a", failed="restarts")
        _iteration(control, loading_s=135.0)
        for _ in range(2):
            _iteration(control, loading_s=1e-4)
    assert control.service.cluster.load_times.warm_start.mean_s == 5.0


def test_a_move_lasts_until_its_first_phases_have_loaded() -> None:
    control = Control(cluster(move_s=20.0))
    control.submit(submission("a"))
    policy = control.service.cluster
    _iteration(control, loading_s=0.0)
    for _ in range(8):
        ask_to_move(policy, "a")
        control.pass_time(61.0)
        _iteration(control, loading_s=0.0)
        control.submit(policy.placements["a"].spec)
        _iteration(control, loading_s=60.0)
    assert policy.placements["a"].moves == 8
    assert policy.load_times.move.mean_s == pytest.approx(120.0, rel=0.3)


def test_the_first_phases_on_other_nodes_are_not_late_while_they_load() -> None:
    control = Control(cluster(cold_start_s=100.0, move_s=300.0))
    control.submit(submission("a", measured=True, slo=3.0), submission("b", measured=True, slo=3.0))
    for loading_s in (300.0, 0.0):
        control.runs("a")
        control.enter("b")
        control.pass_time(loading_s + 40.0, beats="a")
        permit = control.service.policy.permit("a")
        assert permit.holding
        assert permit.warned_s is None
        control.leave("a", loading_s=loading_s)
        control.service.call(Forget(job=JobId("b")))
        control.phase("a", TRAINING, 15.0)
    control.runs("a")
    control.pass_time(900.0, beats="a")
    assert control.service.policy.permit("a").warned_s is not None
