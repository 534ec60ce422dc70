"""Run permits: lines, cycles, tails, leases and the watchdog."""

import msgspec
import pytest

from harvester.contracts.ids import JobId
from scheduler.rollmux.permits.events import (
    ControlResumed,
    EndPermit,
    EnqueuePhase,
    Forget,
    FreeNodes,
    NarrowPhase,
    PermitEndReason,
    Recall,
    Refuse,
    Register,
    RevokePermit,
    WarnHolder,
    WidenPermit,
)
from scheduler.rollmux.permits.job_permit import HOLDING, TRANSITIONS, PermitStage, PermitTrigger
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms
from tests.unit.scheduler.rollmux.permits.permit_scenario import (
    CONFIG,
    ROLLOUT,
    TRAINING,
    Group,
    granted,
    nodes,
    of,
    terms,
)


def test_one_job_runs_on_a_node_and_the_next_starts_when_it_ends() -> None:
    group = Group(terms("a"), terms("b"))
    assert granted(group.ask("a")) == ["a"]
    assert granted(group.ask("b")) == []
    assert granted(group.end("a")) == ["b"]


def test_the_next_phase_of_a_job_is_enqueued_on_its_other_nodes_when_one_ends() -> None:
    group = Group(terms("a"))
    group.ask("a")
    (enqueued,) = of(EnqueuePhase, group.end("a"))
    assert (enqueued.kind, enqueued.nodes) == (TRAINING, nodes("t0"))
    assert granted(group.ask("a", TRAINING)) == ["a"]
    (enqueued,) = of(EnqueuePhase, group.end("a"))
    assert enqueued.kind is ROLLOUT


def test_two_jobs_alternate_between_the_pools() -> None:
    group = Group(terms("a"), terms("b"))
    group.ask("a")
    group.ask("b")
    group.end("a")
    assert granted(group.ask("a", TRAINING)) == ["a"]
    assert (group.on("r0"), group.on("t0")) == ("b", "a")
    group.end("a")
    assert granted(group.ask("a")) == []
    assert granted(group.end("b")) == ["a"]


def test_a_place_in_line_is_kept_by_the_end_of_the_phase_before_and_not_by_asking_fast() -> None:
    group = Group(terms("a"), terms("b", training="t0"), terms("c", rollout="r1"))
    group.ask("c")
    group.end("c")
    group.ask("c", TRAINING)
    for job in ("a", "b"):
        group.ask(job)
        group.end(job)
    # a came first, b asks first.
    group.ask("b", TRAINING)
    group.ask("a", TRAINING)
    assert granted(group.end("c")) == ["a"]


def test_a_free_node_waits_a_moment_for_the_first_in_line_and_then_goes_on() -> None:
    group = Group(terms("a"), terms("b", rollout="r1"))
    group.ask("a")
    group.ask("b")
    group.end("a")
    group.end("b")
    assert granted(group.ask("b", TRAINING)) == []
    assert group.policy.due_s() == pytest.approx(0.5)
    assert granted(group.pass_time(0.5)) == ["b"]


def test_a_passed_job_keeps_its_place_in_line() -> None:
    group = Group(terms("a"), terms("b", rollout="r1"), terms("c", rollout="r2"))
    for job in ("a", "b", "c"):
        group.ask(job)
        group.end(job)
    group.ask("b", TRAINING)
    group.ask("c", TRAINING)
    assert granted(group.pass_time(0.5)) == ["b"]
    group.ask("a", TRAINING)
    assert granted(group.end("b")) == ["a"]


def test_a_phase_waits_for_all_of_its_nodes_and_keeps_later_ones_from_passing() -> None:
    group = Group(terms("a", rollout="r0"), terms("b", rollout="r0 r1"), terms("c", rollout="r1"))
    group.ask("a")
    assert granted(group.ask("b")) == []
    assert granted(group.ask("c")) == []
    assert group.on("r1") is None
    assert granted(group.end("a")) == ["b"]
    assert (group.on("r0"), group.on("r1")) == ("b", "b")


def test_a_long_tail_makes_room_only_for_a_waiting_job() -> None:
    group = Group(terms("a", rollout="r0 r1 r2", tail_ratio=0.8), terms("b", rollout="r1 r2"))
    group.ask("a")
    assert group.beat("a", 0.9) == ()
    (asked,) = of(NarrowPhase, group.ask("b"))
    assert asked.keep == nodes("r0")
    effects = group.narrowed("a")
    assert of(FreeNodes, effects)[0].nodes == nodes("r1 r2")
    assert granted(effects) == ["b"]
    assert group.on("r0") == "a"
    assert of(EnqueuePhase, group.end("a"))[0].kind is TRAINING


def test_a_tail_below_its_threshold_keeps_everything() -> None:
    group = Group(terms("a", rollout="r0 r1", tail_ratio=0.8), terms("b", rollout="r1"))
    group.ask("a")
    group.ask("b")
    assert group.beat("a", 0.79) == ()
    assert of(NarrowPhase, group.beat("a", 0.8))


def test_a_phase_may_begin_beside_a_tail_and_is_widened_when_it_ends() -> None:
    a = terms("a", rollout="r0 r1 r2", tail_ratio=0.5)
    group = Group(a, terms("b", rollout="r0 r1 r2", least_accelerators=2))
    group.ask("a")
    group.beat("a", 0.5)
    (asked,) = of(NarrowPhase, group.ask("b"))
    assert granted(group.narrowed("a")) == ["b"]
    (widened,) = of(WidenPermit, group.end("a"))
    assert (widened.job, widened.nodes) == ("b", asked.keep)
    assert {group.on(node) for node in ("r0", "r1", "r2")} == {"b"}


def test_a_tail_may_leave_all_nodes_for_other_capacity() -> None:
    group = Group(terms("a", tail_ratio=0.5, tail_accelerators=0), terms("b"))
    group.ask("a")
    group.ask("b")
    assert of(NarrowPhase, group.beat("a", 0.6))[0].keep == ()
    assert granted(group.narrowed("a")) == ["b"]
    assert granted((*group.end("a"), *group.ask("a", TRAINING))) == ["a"]


def _away(*others: JobTerms) -> Group:
    """The tail of a has left r0 and r1 to b."""
    a = terms("a", rollout="r0 r1", tail_ratio=0.5, tail_accelerators=0)
    group = Group(a, terms("b", rollout="r0 r1"), *others)
    group.ask("a")
    group.ask("b")
    group.beat("a", 0.6)
    assert granted(group.narrowed("a")) == ["b"]
    return group


def test_a_tail_that_left_its_nodes_gets_them_again_under_the_same_permit_when_free() -> None:
    group = _away()
    epoch = group.epoch("a")
    assert group.recall("a", Recall.WHEN_FREE) == ()
    assert of(WidenPermit, group.end("b")) == []
    (widened,) = of(WidenPermit, group.recall("a", Recall.WHEN_FREE))
    assert (widened.job, widened.epoch, widened.nodes) == ("a", epoch, nodes("r0 r1"))
    # It is as any phase again: the next that waits may ask it to make room.
    group.end("b")
    assert of(NarrowPhase, group.ask("b"))[0].keep == ()
    assert granted(group.narrowed("a")) == ["b"]


def test_a_tail_takes_no_free_node_from_a_job_that_is_about_to_ask_for_it() -> None:
    group = _away()
    group.end("b")
    group.ask("b", TRAINING)
    group.end("b")
    assert group.recall("a", Recall.WHEN_FREE) == ()
    group.pass_time(CONFIG.patience_s)
    assert of(WidenPermit, group.recall("a", Recall.WHEN_FREE))


def test_a_tail_that_lost_its_lease_waits_in_line_and_is_not_passed_there() -> None:
    group = _away(terms("c", rollout="r1"), terms("d", rollout="r0"))
    group.ask("c")
    (enqueued,) = of(EnqueuePhase, group.recall("a", Recall.IN_LINE))
    assert enqueued.nodes == nodes("r0 r1")
    assert group.recall("a", Recall.IN_LINE) == ()
    group.ask("d")
    effects = group.end("b")
    assert granted(effects) == ["c"]
    assert [each.nodes for each in of(WidenPermit, effects)] == [nodes("r0")]
    assert of(WidenPermit, group.end("c"))[0].nodes == nodes("r1")
    assert (group.on("r0"), group.on("r1")) == ("a", "a")


def test_a_long_tail_makes_room_for_one_that_lost_its_lease() -> None:
    a, b = (terms(job, tail_ratio=0.5, tail_accelerators=0) for job in "ab")
    group = Group(a, b)
    group.ask("a")
    group.ask("b")
    group.beat("a", 0.6)
    group.narrowed("a")
    assert group.beat("b", 0.9) == ()
    assert of(NarrowPhase, group.recall("a", Recall.IN_LINE))[0].job == "b"


def test_a_tail_that_keeps_a_part_of_a_node_stays_a_tail() -> None:
    """As a whole phase it could leave its state on the part, where the next job starts."""
    a = terms("a", rollout="r0 r1", tail_ratio=0.5, accelerators=4)
    group = Group(a, terms("b", rollout="r0 r1", accelerators=4, least_accelerators=1))
    group.ask("a")
    group.ask("b")
    group.beat("a", 0.6)
    assert granted(group.narrowed("a")) == ["b"]
    group.end("b")
    for how in Recall:
        assert group.recall("a", how) == ()
    permit = group.policy.permit(JobId("a"))
    assert permit is not None
    assert permit.stage is PermitStage.TAILING


def test_a_phase_that_has_left_nothing_recalls_nothing() -> None:
    group = Group(terms("a"), terms("b"))
    group.ask("a")
    assert group.recall("a", Recall.IN_LINE) == ()
    group.end("a")
    assert of(Refuse, group.recall("a", Recall.IN_LINE))


def test_a_silent_holder_loses_its_permit_and_what_it_says_later_is_refused() -> None:
    group = Group(terms("a"), terms("b"))
    group.ask("a")
    lost = group.epoch("a")
    group.now = 5.0
    group.ask("b")
    effects = group.pass_time(5.0)
    assert of(EndPermit, effects)[0].ended is PermitEndReason.SILENT
    assert granted(effects) == ["b"]
    for late in (group.beat("a", epoch=lost), group.end("a", epoch=lost)):
        assert [type(effect) for effect in late] == [Refuse]
    assert group.on("r0") == "b"


def test_a_failed_job_comes_again_at_the_end_of_the_line() -> None:
    group = Group(terms("a"), terms("b"), terms("c"))
    for job in ("a", "b", "c"):
        group.ask(job)
    assert granted(group.end("a", failed="out of memory")) == ["b"]
    group.ask("a", holder="a.2")
    assert granted(group.end("b")) == ["c"]
    assert granted(group.end("c")) == ["a"]


def test_beats_keep_a_permit_and_epochs_only_rise() -> None:
    group = Group(terms("a"))
    group.ask("a")
    first = group.epoch("a")
    for _ in range(5):
        assert group.pass_time(4.0) == ()
        assert group.beat("a") == ()
    group.end("a")
    group.ask("a", TRAINING)
    assert group.epoch("a") > first


def test_a_second_process_of_a_job_gets_nothing_while_the_first_lives() -> None:
    group = Group(terms("a"))
    group.ask("a")
    assert of(Refuse, group.ask("a", holder="a.2"))
    group.pass_time(10.0)
    assert granted(group.ask("a", holder="a.2")) == ["a"]


def test_a_worker_that_stopped_asking_blocks_no_other() -> None:
    group = Group(terms("a"), terms("b"), terms("c"))
    group.ask("a")
    group.ask("b")
    group.now = 8.0
    group.ask("c")
    group.beat("a")
    group.now = 11.0
    assert granted(group.end("a")) == ["c"]


def test_a_withdrawn_request_blocks_no_other() -> None:
    group = Group(terms("a"), terms("b"), terms("c"))
    for job in ("a", "b", "c"):
        group.ask(job)
    group.withdraw("b")
    assert granted(group.end("a")) == ["c"]
    group.ask("b")
    assert granted(group.withdraw("c")) == ["b"]


def test_an_overrun_is_warned_of_and_revoked_only_when_a_job_waits() -> None:
    group = Group(terms("a", max_s=8.0), terms("b"))
    group.ask("a")
    assert [type(effect) for effect in group.pass_time(8.0)] == [WarnHolder]
    group.beat("a")
    assert group.pass_time(6.0) == ()
    (revoked,) = group.ask("b")[1:]
    assert isinstance(revoked, RevokePermit)
    assert revoked.grace_s == 3.0
    effects = group.pass_time(3.0)
    assert of(EndPermit, effects)[0].ended is PermitEndReason.OVERRAN
    assert granted(effects) == []
    assert granted(group.stopped("a")) == ["b"]


def test_a_phase_that_ends_within_the_grace_has_not_failed() -> None:
    group = Group(terms("a", max_s=2.0), terms("b"))
    group.ask("a")
    group.ask("b")
    group.pass_time(2.0)
    assert of(RevokePermit, group.pass_time(5.0))
    effects = group.end("a")
    assert of(EndPermit, effects)[0].ended is PermitEndReason.DONE
    assert granted(effects) == ["b"]


def test_a_restart_gives_every_holder_a_whole_lease_again() -> None:
    group = Group(terms("a"), terms("b"))
    group.ask("a")
    group.ask("b")
    again = PermitPolicy(CONFIG)
    again.restore(group.policy.snapshot())
    group.policy, group.now = again, 60.0
    again.observe(ControlResumed(), now=60.0)
    assert group.pass_time(9.0) == ()
    group.beat("a")
    group.ask("b")
    assert granted(group.end("a")) == ["b"]


def test_a_restart_after_a_reboot_does_not_wait_for_the_old_clock() -> None:
    group = Group(terms("a", max_s=5.0), terms("b"))
    group.now = 1000.0
    group.ask("a")
    again = PermitPolicy(CONFIG)
    again.restore(group.policy.snapshot())
    group.policy, group.now = again, 1.0
    again.observe(ControlResumed(), now=1.0)
    assert of(EndPermit, group.pass_time(10.0))[0].ended is PermitEndReason.SILENT


def test_a_job_that_leaves_gives_its_nodes_to_the_next() -> None:
    group = Group(terms("a"), terms("b"))
    group.ask("a")
    group.ask("b")
    assert granted(group.policy.observe(Forget(job=JobId("a")), now=0.0)) == ["b"]
    assert group.policy.permit(JobId("a")) is None


def test_a_job_that_is_moved_keeps_its_turn_on_its_new_nodes() -> None:
    group = Group(terms("a"), terms("b"), terms("c", rollout="r1"), terms("d", rollout="r1"))
    for job in ("a", "b", "c", "d"):
        group.ask(job)
    group.policy.observe(Register(terms=terms("b", rollout="r1")), now=0.0)
    # b asked before d did.
    assert granted(group.end("c")) == ["b"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (terms("a", rollout="r0 r0"), "each once"),
        (terms("a", least_accelerators=2), "at most 1"),
        (terms("a", tail_ratio=0.0), "tail_ratio"),
        (terms("a", max_s=0.0), "max_s"),
        (JobTerms(job=JobId("a"), phases=()), "phases"),
        (
            JobTerms(job=JobId("a"), phases=(PhaseTerms(kind=ROLLOUT, nodes=nodes("r0")),) * 2),
            "each kind once",
        ),
    ],
)
def test_terms_that_cannot_be_met_are_refused_in_words(wrong: JobTerms, said: str) -> None:
    policy = PermitPolicy(CONFIG)
    (refused,) = policy.observe(Register(terms=wrong), now=0.0)
    assert isinstance(refused, Refuse)
    assert said in refused.reason
    assert policy.jobs == ()


def test_a_phase_that_the_job_does_not_have_is_refused() -> None:
    group = Group()
    assert of(Refuse, group.ask("nobody"))


def test_the_snapshot_survives_json() -> None:
    group = Group(terms("a", max_s=4.0), terms("b"))
    group.ask("a")
    group.ask("b")
    snapshot = group.policy.snapshot()
    again = PermitPolicy(CONFIG)
    again.restore(msgspec.json.decode(msgspec.json.encode(snapshot)))
    assert again.snapshot() == snapshot


def test_every_stage_with_nodes_can_end_and_only_waiting_is_granted() -> None:
    assert {stage for stage in HOLDING if (stage, PermitTrigger.ENDED) in TRANSITIONS} == HOLDING
    granted_from = [stage for stage, trigger in TRANSITIONS if trigger is PermitTrigger.GRANTED]
    assert granted_from == [PermitStage.WAITING]


def test_a_snapshot_with_rotating_turns_is_restored_first_come_first_served() -> None:
    group = Group(terms("a"), terms("b"))
    group.ask("a")
    group.ask("b")
    kept = group.policy.snapshot()
    for job in kept["jobs"]:
        job |= {"turns": ["b", "a"], "turn_patience_s": 5.0, "turn": 0, "kept_s": 0.0}
    group.policy.restore(kept)
    assert group.on("r0") == "a"
    assert granted(group.end("a")) == ["b"]
