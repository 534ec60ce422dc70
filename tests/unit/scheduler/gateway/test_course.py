"""A turn's attempts: their end, and their engines."""

from harvester.contracts.ids import EngineId
from scheduler.gateway.policy.course import PAUSE_MAX_S, TurnCourse

A, B = EngineId("a"), EngineId("b")


def given_up(course: TurnCourse, *, now: float) -> str:
    return course.given_up(max_deaths=3, stuck_s=60, now=now)


def test_attempts_without_a_token_end_a_turn_by_their_time_and_not_by_their_number() -> None:
    course = TurnCourse()
    for n in range(1000):
        course.avoid(A, 0.25, "a: aborted", now=n * 0.05)
        course.attempted(tokens=0, began_s=n * 0.05)
    assert not given_up(course, now=60)
    assert "60 s; lastly: a: aborted" in given_up(course, now=60.1)


def test_a_token_begins_the_time_anew() -> None:
    course = TurnCourse()
    course.attempted(tokens=0, began_s=0)
    course.attempted(tokens=1, began_s=50)
    course.attempted(tokens=0, began_s=70)
    assert not given_up(course, now=129)
    assert given_up(course, now=131)


def test_time_in_which_its_job_may_not_use_an_engine_is_not_counted() -> None:
    course = TurnCourse()
    course.attempted(tokens=0, began_s=0)
    course.wait.barred_s = 500
    assert not given_up(course, now=559)
    assert given_up(course, now=561)
    course.attempted(tokens=0, began_s=510)
    assert not given_up(course, now=559)
    assert given_up(course, now=561)


def test_deaths_are_counted_whatever_was_made() -> None:
    course = TurnCourse(deaths=2)
    course.attempted(tokens=9, began_s=0)
    assert not given_up(course, now=1)
    course.deaths += 1
    assert "3 engines died" in given_up(course, now=1)


def test_a_pause_doubles_up_to_a_limit_and_what_an_engine_asks_for_is_kept() -> None:
    course = TurnCourse()
    pauses = []
    for _ in range(7):
        course.avoid(A, 0.25, "", now=0)
        pauses.append(course.avoids(now=0)[A])
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, PAUSE_MAX_S]
    course.avoid(B, 30.0, "", now=0)
    assert course.avoids(now=0) == {A: PAUSE_MAX_S, B: 30.0}
    assert course.avoids(now=8) == {B: 30.0}
