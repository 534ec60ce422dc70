"""The threshold of a phase's tail, learned from how its responses completed."""

import msgspec
import pytest

from scheduler.rollmux.permits.completion import (
    RATIOS,
    SEEN_MIN,
    CompletionCurve,
    ProgressTimes,
    tail_of,
)
from scheduler.rollmux.permits.events import ControlResumed, NarrowPhase
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.terms import PhaseTerms, terms_fault
from tests.unit.scheduler.rollmux.permits.permit_scenario import (
    CONFIG,
    ROLLOUT,
    TRAINING,
    Group,
    nodes,
    of,
    terms,
)

EIGHT = "r0 r1 r2 r3 r4 r5 r6 r7"
PHASE = PhaseTerms(
    kind=ROLLOUT, nodes=nodes(EIGHT), tail_ratio=0.8, tail_accelerators=2, learn_tail=True
)


def _course(*said: tuple[float, float]) -> ProgressTimes:
    course = ProgressTimes()
    for at_s, ratio in said:
        course = course.progressed(ratio, at_s=at_s)
    return course


def _learned(
    *said: tuple[float, float], lasted_s: float, phases: int = SEEN_MIN
) -> CompletionCurve:
    curve = CompletionCurve()
    for _ in range(phases):
        curve = curve.after(_course(*said), lasted_s=lasted_s)
    return curve


def test_the_declared_tail_holds_until_enough_phases_were_seen() -> None:
    early = _learned((10.0, 0.95), lasted_s=100.0, phases=SEEN_MIN - 1)
    assert tail_of(PHASE, None) == tail_of(PHASE, early) == (0.8, 2)


def test_responses_that_complete_early_let_the_tail_leave_early_on_few_nodes() -> None:
    """Nine tenths are there after a tenth of the time: two of eight nodes do for the rest."""
    ratio, count = tail_of(PHASE, _learned((10.0, 0.9), lasted_s=100.0))
    assert (ratio, count) == (pytest.approx(0.9), 1)


def test_responses_that_complete_evenly_leave_only_when_much_is_freed() -> None:
    """The node time saved is largest where (1 - ratio) times the freed nodes is."""
    even = tuple((float(at), at / 100) for at in range(1, 100))
    ratio, count = tail_of(PHASE, _learned(*even, lasted_s=100.0))
    assert 0.5 <= ratio <= 0.65
    assert count >= 8 * 1.25 * (1.0 - ratio)


def test_a_phase_that_ends_at_once_keeps_all_to_its_end() -> None:
    sudden = _learned((99.9, 0.01), lasted_s=100.0)
    ratio, count = tail_of(PHASE, sudden)
    freed_of_all = (8 - count) / 8 * (1.0 - 0.999)
    assert ratio == 1.0 or freed_of_all < 0.001


def test_without_progress_nothing_is_learned_and_beats_may_say_anything() -> None:
    assert _learned(lasted_s=100.0).at_home == 0
    odd = _course((5.0, 0.5), (4.0, 0.9), (6.0, 0.2), (7.0, float("nan")), (8.0, 7.0))
    assert odd.ratio == 1.0
    assert len(odd.passed_s) == len(RATIOS)
    assert list(odd.passed_s) == sorted(odd.passed_s)


def test_a_change_in_how_responses_complete_is_followed() -> None:
    curve = _learned((10.0, 0.9), lasted_s=100.0, phases=40)
    early = tail_of(PHASE, curve)
    for _ in range(40):
        curve = curve.after(_course((70.0, 0.6)), lasted_s=100.0)
    assert tail_of(PHASE, curve) != early


def test_a_tail_leaves_at_the_learned_threshold_on_the_learned_nodes() -> None:
    """Declared 0.95; nine tenths after a tenth of the time make it 0.9, on one node."""
    group = Group(
        terms("a", rollout=EIGHT, tail_ratio=0.95, tail_accelerators=4, learn_tail=True),
        terms("b", rollout="r7", training="t1"),
    )
    for _ in range(SEEN_MIN):
        _iterate(group)
    group.ask("a")
    group.now += 9.0
    group.ask("b")
    assert of(NarrowPhase, group.beat("a", 0.89)) == []
    (asked,) = of(NarrowPhase, group.beat("a", 0.9))
    assert asked.keep == nodes("r0")


def test_learned_durations_survive_a_restart() -> None:
    group = Group(terms("a", rollout=EIGHT, tail_ratio=0.95, learn_tail=True))
    for _ in range(SEEN_MIN):
        _iterate(group)
    kept = msgspec.json.decode(msgspec.json.encode(group.policy.snapshot()))
    again = PermitPolicy(CONFIG)
    again.restore(kept)
    (job,) = group.policy.jobs
    before, after = group.policy.permit(job), again.permit(job)
    assert before is not None
    assert after is not None
    assert after.curves == before.curves
    assert after.curves[ROLLOUT].at_home == SEEN_MIN


def test_a_phase_of_which_the_control_missed_a_part_teaches_nothing() -> None:
    group = Group(terms("a", rollout=EIGHT, learn_tail=True))
    group.ask("a")
    group.beat("a", 0.3)
    group.policy.observe(ControlResumed(), now=group.now)
    group.now += 5.0
    group.beat("a", 0.9)
    group.end("a")
    (job,) = group.policy.jobs
    permit = group.policy.permit(job)
    assert permit is not None
    assert not permit.curves


def test_a_job_that_declares_its_threshold_keeps_it() -> None:
    group = Group(terms("a", rollout=EIGHT, tail_ratio=0.95))
    for _ in range(SEEN_MIN):
        _iterate(group)
    (job,) = group.policy.jobs
    permit = group.policy.permit(job)
    assert permit is not None
    assert not permit.curves


def test_a_tail_that_leaves_all_nodes_is_not_learned() -> None:
    assert "learn_tail" in terms_fault(terms("a", tail_accelerators=0, learn_tail=True))


def _iterate(group: Group) -> None:
    """One iteration of job a: nine tenths complete after ten of a hundred seconds."""
    group.ask("a")
    group.now += 10.0
    group.beat("a", 0.9)
    for _ in range(10):
        group.now += 9.0
        group.beat("a", 0.9)
    group.end("a")
    group.ask("a", TRAINING)
    group.end("a")
