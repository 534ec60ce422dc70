"""Moved tails that are slower than at home get more room, and what they lost is no time alone."""

import msgspec
import numpy as np
import pytest

from harvester.contracts.ids import JobId
from scheduler.rollmux.beliefs.tail import ROOM_RATIO
from scheduler.rollmux.permits.completion import (
    RATIOS,
    SEEN_MIN,
    CompletionCurve,
    ProgressTimes,
    TailMove,
)
from scheduler.rollmux.permits.events import EndPermit, NarrowPhase
from scheduler.rollmux.permits.permits import PermitPolicy
from scheduler.rollmux.permits.tail_room import TailRoom
from tests.unit.scheduler.rollmux.permits.permit_scenario import (
    CONFIG,
    ROLLOUT,
    TRAINING,
    Group,
    of,
    terms,
)

BULK_S, TAIL_S = 50.0, 50.0
"""A rollout of job a at home: four fifths of its responses after half of its time."""


class TwoJobs:
    """Job a's rollouts; where b waits, a's tail is asked to move at 0.8."""

    def __init__(self) -> None:
        each = {"rollout": "r0", "accelerators": 8, "least_accelerators": 1, "learn_tail": True}
        self.group, self.earlier_lost_s = Group(terms("a", **each), terms("b", **each)), 0.0
        for _ in range(SEEN_MIN):
            self.rollout(waits=False)

    def rollout(
        self,
        *,
        needs: int = 2,
        waits: bool = True,
        late_s: float = 0.0,
        released_s: float = 0.0,
        trains: bool = True,
    ) -> tuple[float, int | None]:
        """Seconds of the rollout's time alone that were counted, and the accelerators that its tail
        kept; None: it stayed. On fewer than `needs` it is slower by as much. `late_s`: b comes so
        long after the tail's begin. `released_s`: its state's unloading. Without `trains` the
        training of a fails."""
        group = self.group
        group.ask("a")
        group.now += BULK_S
        asked = of(NarrowPhase, group.beat("a", 0.8))
        group.now += late_s
        if waits:
            asked = of(NarrowPhase, group.ask("b"))
        kept = None
        if asked:
            group.narrowed("a")
            (numbers,) = asked[0].accelerators.values()
            kept = len(numbers)
        group.now += TAIL_S * max(1.0, needs / (kept or needs))
        group.now += released_s
        (end,) = of(EndPermit, group.end("a", loading_s=released_s, released_s=released_s))
        self.earlier_lost_s += end.earlier_lost_s
        if waits:
            group.end("b")
        for job in "ab"[: 1 + waits]:
            group.ask(job, TRAINING)
            group.end(job, failed="" if trains or job == "b" else "out of memory")
        group.pass_time(0.0 if trains else CONFIG.patience_s)  # Then b's place is no obstacle.
        return end.solo_s, kept

    @property
    def curve(self) -> CompletionCurve:
        permit = self.group.policy.permit(JobId("a"))
        assert permit is not None
        return permit.curves[ROLLOUT]


def test_tails_that_lose_nothing_keep_their_room_and_count_in_full() -> None:
    jobs = TwoJobs()
    seen = [jobs.rollout() for _ in range(40)]
    assert {kept for _, kept in seen} == {2}
    assert all(solo_s == pytest.approx(BULK_S + TAIL_S) for solo_s, _ in seen)


def test_tails_that_take_twice_as_long_get_more_room_and_earn_no_credit_for_it() -> None:
    """As fast as at home with half of the node; each narrower one is slower by as much."""
    jobs = TwoJobs()
    seen, kept = zip(*(jobs.rollout(needs=4) for _ in range(60)), strict=True)
    assert kept == (2,) * 4 + (4,) * 56
    assert seen[3:] == pytest.approx([BULK_S + TAIL_S] * 57)
    # The loss of the first tails is taken back once it is no chance.
    assert max(seen) > 1.4 * (BULK_S + TAIL_S)
    assert sum(seen) - jobs.earlier_lost_s == pytest.approx(60 * (BULK_S + TAIL_S))


def test_a_tail_that_moved_late_is_one_of_the_long_ones_and_teaches_nothing() -> None:
    jobs = TwoJobs()
    for _ in range(10):
        jobs.rollout(needs=4, late_s=TAIL_S / 2)
    assert jobs.curve.room == TailRoom()


def test_one_of_a_hundred_tails_stays_at_home_so_that_the_curve_follows_the_job() -> None:
    jobs = TwoJobs()
    kept = [jobs.rollout()[1] for _ in range(200)]
    assert [at for at, count in enumerate(kept) if count is None] == [99, 199]
    assert jobs.curve.at_home == SEEN_MIN + 2


def test_until_enough_tails_stayed_every_second_one_does() -> None:
    """A job may declare its tail, which then moves from the first rollout on."""
    each = {"rollout": "r0", "accelerators": 8, "least_accelerators": 1, "learn_tail": True}
    declared = each | {"tail_ratio": 0.8, "tail_accelerators": 2}
    jobs = TwoJobs.__new__(TwoJobs)
    jobs.group, jobs.earlier_lost_s = Group(terms("a", **declared), terms("b", **each)), 0.0
    kept = [jobs.rollout()[1] for _ in range(6)]
    assert kept == [2, None, 2, None, 2, None]


def _responses(rng: np.random.Generator) -> list[float]:
    """Times of 128 responses, in s."""
    return [float(each) for each in np.sort(30.0 * rng.lognormal(0.0, 0.4, 128))]


def _course(ends_s: list[float], *, until_s: float) -> ProgressTimes:
    course = ProgressTimes()
    for done, end_s in enumerate(ends_s, start=1):
        if end_s <= until_s:
            course = course.progressed(done / len(ends_s), at_s=end_s)
    return course


def _learned(seed: int, *, needs_ratio: float) -> CompletionCurve:
    """Three rollouts at home, then sixty whose tails move at four fifths and need `needs_ratio`
    times their share to be as fast."""
    rng, curve = np.random.default_rng(seed), CompletionCurve()
    for at in range(63):
        ends_s = _responses(rng)
        moved_s, last_s = ends_s[len(ends_s) * 4 // 5], ends_s[-1]
        if at < SEEN_MIN or curve.stays:
            curve = curve.after(_course(ends_s, until_s=last_s), lasted_s=last_s)
            continue
        move = TailMove(course=_course(ends_s, until_s=moved_s), asked_s=moved_s, left_s=moved_s)
        took_s = (last_s - moved_s) * max(1.0, needs_ratio / curve.room.ratio)
        curve, _ = curve.after_move(move, worked_s=moved_s + took_s, loading_s=0.0)
    return curve


def test_the_spread_of_a_jobs_responses_is_seldom_taken_for_slowness() -> None:
    """The home curve of three rollouts is itself off, for all tails alike."""
    harmless = [_learned(seed, needs_ratio=1.0).room.ratio for seed in range(40)]
    assert sum(ratio > ROOM_RATIO for ratio in harmless) <= 8
    slow = [_learned(seed, needs_ratio=2.5).room.ratio for seed in range(40)]
    assert sum(ratio > 1.6 for ratio in slow) >= 32


def test_the_unloading_after_a_moved_tail_is_no_slowness() -> None:
    """A tail's state leaves its nodes at once; a whole phase's stays for the next one."""
    jobs = TwoJobs()
    for _ in range(20):
        solo_s, kept = jobs.rollout(released_s=10.0)
        assert (solo_s, kept) == (pytest.approx(BULK_S + TAIL_S), 2)
    assert jobs.curve.room.slowdown == 1.0


def test_the_loss_of_a_lost_iterations_tail_is_not_taken_back_twice() -> None:
    """The planner takes the whole iteration back."""
    jobs = TwoJobs()
    for _ in range(3):
        jobs.rollout(needs=4, trains=False)
    jobs.rollout(needs=4)
    assert jobs.earlier_lost_s == 0.0


@pytest.mark.parametrize("moves", [True, False])
def test_a_room_that_tails_no_longer_need_is_given_back(moves: bool) -> None:
    """Also one so large that no tail moves."""
    room = TailRoom(ratio=3.0)
    for _ in range(500):
        if moves:
            room, _ = room.after(
                took_s=50.0, home_s=50.0, phase_s=100.0, waited_s=0.0, references=9
            )
        else:
            room = room.after_tail_at_home()
    assert room.ratio == ROOM_RATIO


def test_a_move_under_way_survives_a_restart() -> None:
    jobs = TwoJobs()
    group = jobs.group
    group.ask("a")
    group.now += BULK_S
    group.beat("a", 0.8)
    group.ask("b")
    group.narrowed("a")
    again = PermitPolicy(CONFIG)
    again.restore(msgspec.json.decode(msgspec.json.encode(group.policy.snapshot())))
    before, after = group.policy.permit(JobId("a")), again.permit(JobId("a"))
    assert before is not None
    assert after is not None
    assert before.tail is not None
    assert after.tail == before.tail


def test_loading_is_no_part_of_the_curve() -> None:
    course = ProgressTimes().progressed(0.8, at_s=30.0 + BULK_S)
    loaded = CompletionCurve().after(course, lasted_s=BULK_S + TAIL_S, loading_s=30.0)
    assert loaded.times[RATIOS.index(0.8)] == pytest.approx(0.5)
