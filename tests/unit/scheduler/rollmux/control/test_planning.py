"""A control that plans: places, moves at an iteration's end, failed nodes, restarts."""

import re
from pathlib import Path

import msgspec
import pytest

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.contracts.ids import Epoch, JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.cluster.job_placement import PlacementStage
from scheduler.rollmux.cluster.runtime_events import (
    NodeReport,
    Submit,
)
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.control_state import ControlState
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.control.wire import (
    Accepted,
    CallRefused,
    Ended,
    Granted,
    PermitSnapshot,
    Placed,
    Waiting,
)
from scheduler.rollmux.permits.events import (
    Beat,
    Forget,
    Leave,
    Register,
    Unloaded,
    Withdraw,
)
from tests.unit.scheduler.rollmux.cluster.submissions import (
    ROLLOUT,
    TRAINING,
    Control,
    ask_to_move,
    cluster,
    names,
    submission,
    swap_reported,
)
from tests.unit.scheduler.rollmux.permits.permit_scenario import terms


def _failed(node: str, *, failed: bool = True) -> NodeReport:
    return NodeReport(node=NodeId(node), failed=failed)


def test_a_submitted_job_hears_its_group_its_nodes_and_why() -> None:
    (placed,) = Control().submit(submission("a"))
    assert isinstance(placed, Placed)
    assert (placed.rollout_nodes, placed.training_nodes) == (names("r0"), names("t0"))
    assert placed.reason == "new isolated group, +57.00 $/h"


def test_jobs_that_suit_each_other_share_nodes() -> None:
    control = Control()
    first, second = control.submit(submission("a"), submission("b"))
    assert first.group == second.group
    assert first.training_nodes == second.training_nodes


def test_a_phase_runs_on_the_planned_nodes_and_the_other_waits() -> None:
    control = Control(cluster("r0", "t0"))
    control.submit(submission("a", slo=3.0), submission("b", slo=3.0))
    assert control.runs("a") == names("r0")
    assert isinstance(control.enter("b"), Waiting)
    control.pass_time(8.0, beats="a")
    assert control.leave("a") == Accepted()
    assert control.runs("b") == names("r0")


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_changed_belief_makes_no_job_wait_for_a_later_one(first: str) -> None:
    other = "b" if first == "a" else "a"
    control = Control(cluster("r0", "t0"))
    control.submit(submission("a", 480.0, 420.0, slo=3.0), submission("b", 480.0, 420.0, slo=3.0))
    control.runs(first)
    control.enter(other)
    # Far from the declared duration: the belief about the job changes.
    control.pass_time(8.0, beats=first)
    control.leave(first)
    assert control.runs(other) == names("r0")
    assert control.runs(first, TRAINING) == names("t0")


def test_without_a_place_a_job_is_queued_and_placed_when_another_leaves() -> None:
    control = Control(cluster("r0", "t0"))
    first, second = control.submit(submission("a", slo=1.0), submission("b", slo=1.0))
    assert isinstance(second, Waiting)
    assert "1 h20 of which 0 are free" in second.reason
    refused = control.enter("b")
    assert isinstance(refused, CallRefused)
    assert refused.retry_after_s is not None
    control.service.call(Forget(job=JobId("a")))
    assert isinstance(first, Placed)
    assert control.runs("b") == names("r0")
    assert isinstance(control.submit(submission("b", slo=1.0))[0], Placed)


def test_the_first_waiting_job_gets_the_free_node_and_others_may_share_meanwhile() -> None:
    control = Control(cluster("r0 r1", "t0 t1"))
    control.submit(submission("a", slo=3.0))
    wide, narrow, third = control.submit(
        submission("wide", slo=1.0, rollout_nodes=2),
        submission("narrow", slo=1.0),
        submission("shares", slo=3.0),
    )
    assert isinstance(wide, Waiting)
    # A node is free for it, but not while another waits longer for nodes.
    assert narrow == Waiting(ahead=1, reason="job wide waits longer for free nodes")
    assert isinstance(third, Placed)
    control.service.call(Forget(job=JobId("a")))
    control.service.call(Forget(job=JobId("shares")))
    assert control.runs("wide") == names("r0 r1")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (submission("a", host=3000), "do not fit"),
        (submission("a", rollout_nodes=4), "wants 4 nodes, there are 3"),
        (submission("a", slo=0.5), "slo is"),
        (submission("a", slo=float("nan")), "slo is"),
        (submission("a", rollout_s=-1.0), "max_s"),
    ],
)
def test_an_unplaceable_job_is_refused_for_good(given, why: str) -> None:
    (refused,) = Control().submit(given)
    assert isinstance(refused, CallRefused)
    assert why in refused.reason
    assert refused.retry_after_s is None


def test_a_job_is_known_with_one_declaration_until_it_is_forgotten() -> None:
    control = Control()
    control.submit(submission("a"))
    (refused,) = control.submit(submission("a", slo=1.9))
    assert "must be forgotten first" in refused.reason
    control.service.call(Forget(job=JobId("a")))
    assert isinstance(control.submit(submission("a", slo=1.9))[0], Placed)


def test_a_planning_control_refuses_placement_by_hand() -> None:
    control = Control()
    control.submit(submission("a"))
    refused = control.service.call(Register(terms=terms("x")))
    assert isinstance(refused, CallRefused)
    assert "plans" in refused.reason


def test_the_planner_learns_what_phases_took_without_their_loading() -> None:
    control = Control()
    control.submit(submission("a"))
    control.runs("a")
    control.pass_time(40.0, beats="a")
    control.leave("a", loading_s=8.0)
    facts = control.service.cluster.planner.facts[JobId("a")]
    assert facts.rollout.seen_s == pytest.approx(32.0)
    assert facts.rollout.count == 1
    control.phase("a", TRAINING, 16.0)
    assert facts.training.seen_s == pytest.approx(16.0)
    assert control.service.cluster.placements[JobId("a")].iterations == 1


def test_a_repeated_leave_is_learned_once() -> None:
    control = Control()
    control.submit(submission("a"))
    control.runs("a")
    control.pass_time(40.0, beats="a")
    leave = Leave(job=JobId("a"), epoch=Epoch(1))
    assert control.service.call(leave) == control.service.call(leave) == Accepted()
    assert control.service.cluster.planner.facts[JobId("a")].rollout.count == 1


def test_a_failed_phase_teaches_nothing_and_loses_its_iteration_s_credit() -> None:
    control = Control()
    control.submit(submission("a"))
    facts = control.service.cluster.planner.facts[JobId("a")]
    before_s = facts.account.solo_s
    control.phase("a", ROLLOUT, 40.0)
    control.runs("a", TRAINING)
    control.leave("a", failed="broke")
    assert (facts.training.count, facts.account.solo_s) == (0, before_s)


def test_a_move_is_ordered_at_an_iteration_s_end_and_made_at_the_next_begin() -> None:
    control = Control()
    control.submit(submission("a"), submission("b"))
    for _ in range(2):
        control.iteration("a")
    old = control.at("b")
    # No worker has claimed job a's place in line.
    control.pass_time(1.0)
    control.runs("b")
    ask_to_move(control.service.cluster, "b")
    control.pass_time(60.0, beats="b")
    assert control.service.cluster.placements[JobId("b")].stage is PlacementStage.MOVING
    # In the middle of an iteration no reply mentions the move and nothing changes.
    assert control.leave("b") == Accepted()
    assert control.at("b") == old
    left = control.phase("b", TRAINING, 15.0)
    assert isinstance(left, Accepted)
    assert left.move is not None
    told = (left.move.rollout_nodes, left.move.training_nodes)
    assert told != old
    # Its state is on its old nodes until it asks again.
    assert control.at("b") == old
    assert control.runs("b") == left.move.rollout_nodes
    assert control.at("b") == told
    assert control.service.cluster.placements[JobId("b")].moves == 1
    assert not control.service.cluster.planner.table.leaving_groups(JobId("b"))


def ordered_to_move(control: Control) -> Accepted:
    """Job b beside job a, as told at the end of an iteration."""
    control.submit(submission("a"), submission("b"))
    control.runs("b")
    ask_to_move(control.service.cluster, "b")
    control.pass_time(60.0, beats="b")
    control.leave("b")
    left = control.phase("b", TRAINING, 15.0)
    assert isinstance(left, Accepted)
    return left


def test_a_move_order_is_repeated_after_a_lost_reply_and_after_a_restart(tmp_path: Path) -> None:
    control = Control(state=tmp_path / "state.sqlite")
    left = ordered_to_move(control)
    assert left.move is not None
    control = control.restarted()
    epoch = control.service.policy.permit(JobId("b")).epoch  # type: ignore[union-attr]
    assert control.service.call(Leave(job=JobId("b"), epoch=epoch)) == left
    assert control.runs("b") == left.move.rollout_nodes


def test_a_new_process_of_a_job_that_shall_move_begins_on_the_new_nodes() -> None:
    control = Control()
    control.submit(submission("a"), submission("b"))
    control.runs("b")
    ask_to_move(control.service.cluster, "b")
    control.pass_time(60.0, beats="b")
    old = control.at("b")
    control.leave("b", failed="crashed")
    (placed,) = control.submit(submission("b"))
    assert (placed.rollout_nodes, placed.training_nodes) == control.at("b") != old


def test_a_move_for_which_no_nodes_are_free_is_taken_back_and_changes_nothing() -> None:
    control = Control(cluster("r0", "t0"))
    control.submit(submission("a", slo=3.0), submission("b", slo=3.0))
    control.runs("b")
    price = control.service.cluster.planner.table.committed_per_hour
    ask_to_move(control.service.cluster, "b")
    control.pass_time(60.0, beats="b")
    assert control.service.cluster.placements[JobId("b")].stage is PlacementStage.PLACED
    assert control.service.cluster.planner.table.committed_per_hour == price
    assert not control.service.cluster.planner.facts[JobId("b")].moving
    control.leave("b")
    assert control.phase("b", TRAINING, 15.0) == Accepted()


def test_a_moving_job_gets_its_permit_when_its_new_nodes_have_room() -> None:
    control = Control(cluster("r0 r1", "t0 t1"))
    control.submit(submission("a", slo=1.0, host=1500), submission("b", slo=1.0, host=1500))
    policy = control.service.cluster
    for job in "ab":
        control.runs(job)
    planner = policy.planner
    home = {job: planner.table.groups[planner.table.home[JobId(job)]] for job in "ab"}
    places = {job: home[job].pinned[JobId(job)] for job in "ab"}
    # They swap nodes: the first to leave waits for the other.
    moves = planner.relocation.move_all(
        [
            (home[other], msgspec.structs.replace(places[other], job=JobId(job)))
            for job, other in ("ab", "ba")
        ]
    )
    assert len(moves) == 2
    swap_reported(policy, moves)
    control.pass_time(60.0, beats="ab")
    for job in "ab":
        control.leave(job)
        left = control.phase(job, TRAINING, 15.0)
        assert isinstance(left, Accepted)
        assert left.move is not None
    refused = control.enter("a")
    assert isinstance(refused, CallRefused)
    assert "room" in refused.reason
    assert control.runs("b") == names("r0")
    assert control.runs("a") == names("r1")


def hears_where_it_is(control: Control, job: str, kind: PhaseKind) -> None:
    """A job with changed nodes is notified before it needs its state there."""
    refused = control.enter(job, kind)
    assert isinstance(refused, CallRefused)
    assert refused.unknown
    (placed,) = control.submit(control.service.cluster.placements[JobId(job)].spec)
    assert (placed.rollout_nodes, placed.training_nodes) == control.at(job)


def test_a_failed_node_is_replaced_and_only_phases_on_it_end() -> None:
    control = Control()
    control.submit(submission("a"), submission("b"))
    assert control.at("a")[1] == control.at("b")[1] == names("t0")
    control.iteration("a")
    control.pass_time(1.0)
    control.phase("b", ROLLOUT, 40.0)
    control.runs("b", TRAINING)
    control.runs("a", ROLLOUT)
    assert control.service.call(_failed("t0")) == Accepted()
    for job in "ab":
        assert control.at(job)[1] == names("t1")
    beat = Beat(job=JobId("b"), epoch=Epoch(4))
    assert isinstance(control.service.call(beat), Ended)
    a = control.service.policy.permit(JobId("a"))
    assert a is not None
    assert isinstance(control.service.call(Beat(job=JobId("a"), epoch=a.epoch)), PermitSnapshot)
    control.leave("a")
    hears_where_it_is(control, "a", TRAINING)
    assert control.runs("a", TRAINING) == names("t1")


def _wide_loses_a_node() -> Control:
    """Job a rolls out on r0 and r1, of which r1 fails; b waits for r0."""
    control = Control(cluster("r0 r1", "t0 t1"))
    control.submit(submission("a", rollout_nodes=2, slo=3.0), submission("b", slo=3.0))
    assert (control.at("a")[0], control.at("b")[0]) == (names("r0 r1"), names("r0"))
    control.runs("a")
    assert isinstance(control.enter("b"), Waiting)
    control.service.call(_failed("r1"))
    return control


def test_a_job_that_loses_a_node_keeps_others_off_its_living_ones_until_it_has_stopped() -> None:
    control = _wide_loses_a_node()
    assert isinstance(control.service.call(Beat(job=JobId("a"), epoch=Epoch(1))), Ended)
    assert isinstance(control.enter("b"), Waiting)
    stopped = Unloaded(job=JobId("a"), holder="a.1", nodes=names("r0 r1"))
    control.service.call(stopped)
    assert control.runs("b") == names("r0")


def test_a_job_that_died_with_its_node_keeps_its_other_nodes_for_one_lease() -> None:
    control = _wide_loses_a_node()
    for _ in range(2):
        control.pass_time(4.0)
        assert isinstance(control.enter("b"), Waiting)
    control.pass_time(8.0)
    assert control.runs("b") == names("r0")


def test_without_a_spare_node_the_phase_waits_until_one_is_back() -> None:
    control = Control(cluster("r0", "t0"))
    control.submit(submission("a"))
    control.runs("a", ROLLOUT)
    control.service.call(_failed("t0"))
    control.leave("a")
    refused = control.enter("a", TRAINING)
    assert isinstance(refused, CallRefused)
    assert refused.retry_after_s is not None
    assert "t0 failed" in refused.reason
    control.service.call(_failed("t0", failed=False))
    hears_where_it_is(control, "a", TRAINING)
    assert control.runs("a", TRAINING) == names("t0")


def test_a_failed_free_node_is_given_to_no_job() -> None:
    control = Control(cluster("r0 r1", "t0 t1"))
    control.service.call(_failed("r0"))
    assert isinstance(control.service.call(_failed("elsewhere")), CallRefused)
    control.submit(submission("a"))
    assert control.runs("a") == names("r1")


def test_a_silent_placed_job_gives_its_nodes_back() -> None:
    control = Control(cluster("r0", "t0", gone_s=300.0))
    control.submit(submission("a", slo=1.0))
    control.submit_by_hand(submission("b", slo=1.0))
    control.runs("a")
    control.pass_time(240.0, beats="a")
    assert control.at("a")
    control.pass_time(420.0)
    assert JobId("a") not in control.service.cluster.placements
    assert control.at("b") == (names("r0"), names("t0"))


def test_a_job_that_is_submitted_again_leaves_no_nodes_on_which_its_phase_runs() -> None:
    control = Control()
    control.submit(submission("a"))
    control.iteration("a")
    ask_to_move(control.service.cluster, "a")
    control.pass_time(61.0)
    assert control.iteration("a").move is not None
    runs_on = control.runs("a", TRAINING)
    control.submit(submission("a"))
    assert control.at("a")[1] == runs_on


def test_a_queued_job_whose_process_is_gone_leaves_the_queue() -> None:
    control = Control(cluster("r0", "t0", gone_s=300.0))
    control.submit(submission("a", slo=1.0))
    queued = {name: submission(name, slo=1.0) for name in ("by-hand", "ghost", "cancelled")}
    for _ in range(2):
        control.submit_by_hand(queued["by-hand"])
        control.pass_time(1.0)
    control.submit(queued["ghost"], queued["cancelled"])
    control.service.call(Withdraw(job=JobId("cancelled"), holder="cancelled.1"))
    assert JobId("cancelled") not in control.service.cluster.placements
    for _ in range(6):
        control.enter("a")
        control.pass_time(60.0, beats="a")
        control.leave("a")
    assert set(control.service.cluster.placements) == {"a", "by-hand"}


def test_a_process_that_gives_up_leaves_its_place_to_the_one_that_followed_it() -> None:
    control = Control(cluster("r0", "t0"))
    control.submit(submission("a", slo=1.0), submission("b", slo=1.0), submission("c", slo=1.0))
    control.service.call(Submit(spec=submission("b", slo=1.0), holder="b.2"))
    control.service.call(Withdraw(job=JobId("b"), holder="b.1"))
    control.service.call(Forget(job=JobId("a")))
    assert control.at("b") == (names("r0"), names("t0"))


def test_a_submission_by_hand_is_no_word_of_the_job_s_process() -> None:
    control = Control()
    left = ordered_to_move(control)
    assert left.move is not None
    (shown,) = control.submit_by_hand(submission("b"))
    # Its state is on its old nodes until its process says otherwise.
    assert (shown.rollout_nodes, shown.training_nodes) == control.at("b")
    (placed,) = control.submit(submission("b"))
    assert placed.nodes == left.move.nodes != shown.nodes


def test_a_process_that_asks_what_to_unload_is_no_silent_one() -> None:
    control = Control(cluster("r0", "t0", gone_s=100.0))
    control.submit(submission("a", slo=1.0))
    control.runs("a")
    permit = control.service.policy.permit(JobId("a"))
    assert permit is not None
    control.service.call(Leave(job=JobId("a"), epoch=permit.epoch, stays_loaded=True))
    for _ in range(60):
        control.pass_time(4.0)
        control.service.call(Unloaded(job=JobId("a"), holder="a.1"))
    assert control.at("a")


def test_a_restart_in_the_middle_of_a_phase_loses_and_repeats_nothing(tmp_path: Path) -> None:
    control = Control(state=tmp_path / "state.sqlite")
    control.submit(submission("a"), submission("b"))
    control.iteration("a")
    control.runs("a")
    control.pass_time(20.0, beats="a")
    where = {job: control.at(job) for job in "ab"}
    before = control.service.cluster.planner.facts[JobId("a")]
    control = control.restarted()
    assert {job: control.at(job) for job in "ab"} == where
    control.pass_time(20.0, beats="a")
    assert control.leave("a") == Accepted()
    after = control.service.cluster.planner.facts[JobId("a")]
    assert after.rollout.count == before.rollout.count + 1
    assert after.rollout.seen_s == pytest.approx(40.0, rel=0.01)
    assert after.account.solo_s == pytest.approx(before.account.solo_s + 40.0)


def test_a_restart_on_a_machine_that_was_booted_anew_goes_on_where_time_stood_still(
    tmp_path: Path, monkeypatch
) -> None:
    control = Control(state=tmp_path / "state.sqlite")
    control.clock.now_s = 5000.0
    control.submit(submission("a"))
    control.iteration("a")
    credit_s = control.service.cluster.planner.facts[JobId("a")].account.credit_s(5055.0)
    control.clock.now_s = 7.0
    control = control.restarted()
    facts = control.service.cluster.planner.facts[JobId("a")]
    assert facts.account.credit_s(7.0) == pytest.approx(credit_s)
    assert isinstance(control.enter("a"), Granted)


def test_nodes_that_the_file_does_not_have_any_more_are_replaced_at_the_start(
    tmp_path: Path,
) -> None:
    control = Control(state=tmp_path / "state.sqlite")
    control.submit(submission("a"))
    control = control.restarted(cluster("r7 r8", "t0"))
    assert control.at("a") == (names("r7"), names("t0"))
    hears_where_it_is(control, "a", ROLLOUT)
    assert control.runs("a") == names("r7")


def test_a_state_file_is_of_a_control_that_plans_or_of_one_that_does_not(tmp_path: Path) -> None:
    control = Control(state=tmp_path / "plans.sqlite")
    control.submit(submission("a"))
    control.service.close()
    with pytest.raises(ConfigError, match="plan"):
        PhaseService(ControlSettings(state=tmp_path / "plans.sqlite"), control.clock)
    service = PhaseService(ControlSettings(state=tmp_path / "by-hand.sqlite"), control.clock)
    service.register(Register(terms=terms("a")))
    assert isinstance(service.call(Submit(spec=submission("b"))), CallRefused)
    service.close()
    with pytest.raises(ConfigError, match="by hand"):
        Control(state=tmp_path / "by-hand.sqlite")


def test_a_decision_that_is_not_on_disk_gets_no_reply(tmp_path: Path, monkeypatch) -> None:
    control = Control(state=tmp_path / "state.sqlite")
    control.submit(submission("a"))
    control.runs("a")
    control.pass_time(40.0, beats="a")
    full = Exhausted("disk full")

    def refuse(*_: object) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(ControlState, "keep", refuse)
        for _ in range(2):
            with pytest.raises(Exhausted):
                control.leave("a")
            control.service.tick()
    assert control.leave("a") == Accepted()
    control = control.restarted()
    assert control.service.cluster.planner.facts[JobId("a")].rollout.count == 1


def test_the_status_says_group_nodes_slow_down_and_credit() -> None:
    control = Control(cluster("r0", "t0"))
    control.submit(submission("a", slo=1.0), submission("b", slo=1.0))
    control.iteration("a")
    first, second = (status.plan for status in control.service.statuses())
    assert first is not None
    assert second is not None
    assert (first.stage, first.iterations) == (PlacementStage.PLACED, 1)
    assert first.slowdown is not None
    assert first.slowdown < 1.0
    assert (second.stage, second.slowdown) == (PlacementStage.QUEUED, None)
    assert second.reason


def test_a_job_in_its_first_iteration_shows_a_dash_for_slow_down_and_credit() -> None:
    from rich.console import Console

    from scheduler.rollmux.control.printed import printed

    control = Control(cluster("r0", "t0"))
    control.submit(submission("a"))
    control.pass_time(64.0)

    def shown() -> tuple[float | None, float | None, str]:
        (job,) = control.service.statuses()
        assert job.plan is not None
        console = Console(width=200)
        with console.capture() as text:
            console.print(printed([job]))
        return job.plan.slowdown, job.plan.credit_s, text.get()

    slowdown, credit_s, text = shown()
    assert (slowdown, credit_s) == (None, None)
    assert re.search(r"a +r0 \| t0 +- +\d+\.\d\d +- +0 +0", text)
    control.iteration("a")
    slowdown, credit_s, text = shown()
    assert None not in (slowdown, credit_s)
    assert f" {slowdown:.2f} " in text


def test_its_metrics_say_how_many_wait_for_a_place_and_which_nodes_are_free() -> None:
    control = Control(cluster("r0", "t0 t1"))
    control.submit(submission("a", slo=1.0), submission("b", slo=1.0))
    said = control.service.metrics().decode()
    assert 'scheduler_phase_plan_jobs{stage="queued"} 1.0' in said
    assert 'scheduler_phase_plan_nodes{pool="training",state="free"} 1.0' in said
    assert 'scheduler_phase_plan_decisions_total{decision="placed"} 1.0' in said
    assert "scheduler_phase_plan_price_per_hour 57.0" in said


def test_metrics_show_kept_slos_and_count_those_that_have_ended() -> None:
    control = Control()
    control.submit(submission("a"))

    def value(name: str, **labels: str) -> float | None:
        control.service.metrics()
        registry = control.service._metrics.registry
        return registry.get_sample_value(f"scheduler_phase_plan_{name}", labels)

    control.runs("a", ROLLOUT)
    control.pass_time(30.0, beats=("a",))
    assert value("slos", state="kept") == 1.0, "a phase that runs is no delay"
    slowdown, credit_s = value("worst_slowdown_ratio"), value("least_credit_seconds")
    assert slowdown is not None
    assert slowdown < 1.0
    assert credit_s is not None
    assert credit_s >= 0.0
    control.leave("a")
    control.phase("a", TRAINING, 15.0)
    control.pass_time(600.0)
    assert value("slos", state="kept") == 0.0
    assert value("slos", state="owed") == 1.0, "between its phases it was let to wait"
    slowdown, credit_s = value("worst_slowdown_ratio"), value("least_credit_seconds")
    assert slowdown is not None
    assert slowdown > 1.0
    assert credit_s is not None
    assert credit_s < 0.0
    control.service.call(Forget(job=JobId("a")))
    assert value("slos", state="owed") == 0.0
    assert value("slos_ended_total", state="kept") == 1.0, "by its last phase"
    assert value("slos_ended_total", state="broken") == 0.0
    decisions = value("decision_seconds_count")
    assert decisions is not None
    assert decisions > 0


def test_an_slo_that_was_broken_when_the_last_phase_ended_stays_broken() -> None:
    control = Control()
    control.submit(submission("a"))
    control.iteration("a")
    control.pass_time(600.0)
    control.iteration("a")
    control.service.call(Forget(job=JobId("a")))
    said = control.service.metrics().decode()
    assert 'scheduler_phase_plan_slos_ended_total{state="broken"} 1.0' in said


def test_metrics_show_the_longest_wait_for_a_placement() -> None:
    control = Control(cluster("r0", "t0"))
    control.submit(submission("a", slo=1.0), submission("b", slo=1.0))
    control.pass_time(60.0)
    assert "scheduler_phase_plan_longest_wait_seconds 60.0" in control.service.metrics().decode()


def test_a_phase_that_was_ended_for_its_length_makes_the_plan_believe_it_longer() -> None:
    control = Control(cluster("r0", "t0"))
    control.submit(submission("a", slo=3.0), submission("b", slo=3.0))
    assert control.runs("a") == names("r0")
    believed_s = control.service.cluster.planner.facts[JobId("a")].belief().rollout_s
    control.enter("b")
    while control.service.runtime.permits.on(NodeId("r0")) == "a":
        control.pass_time(8.0, beats="a")
        control.enter("b")
    facts = control.service.cluster.planner.facts[JobId("a")]
    assert facts.belief().rollout_s > believed_s
    assert facts.account.solo_s == pytest.approx(
        control.service.cluster.planner.config.cold_start_s
    )
