"""Stalls: a turn's exit from a silent engine, and its delay to the first token."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from harvester.contracts.ids import EngineId
from scheduler.gateway.policy.course import USUAL_FIRST_TOKENS, FirstTokens, TurnCourse

STALL_S, WATCH_S = 2.0, 0.25


def first_token(
    takes_s: list[float], *, usual_s: float = 0.0, gated: bool = False
) -> tuple[float, int]:
    """Time to the token of a turn that begins on the first engine, and its number of moves.

    Each engine takes as long as listed, anew with each attempt; every one has room.
    """
    course, now, began_s, at, moves = TurnCourse(), 0.0, 0.0, 0, 0
    while now - began_s < takes_s[at]:
        now += WATCH_S
        bound_s = course.stall_after_s(STALL_S, usual_first_token_s=usual_s)
        avoids = course.avoids(now=now)
        others = [
            other
            for other in range(len(takes_s))
            if other != at and EngineId(str(other)) not in avoids
        ]
        if now - began_s > bound_s and others:
            course.attempted(tokens=0, began_s=began_s)
            course.stalled(EngineId(str(at)), gated=gated, now=now)
            at, began_s, moves = others[moves % len(others)], now, moves + 1
    return now, moves


@given(takes_s=st.floats(0.01, 60), engines=st.integers(1, 9), gated=st.booleans())
@example(takes_s=8.05, engines=2, gated=False)
def test_on_healthy_engines_the_first_token_takes_a_small_multiple_of_what_they_need(
    takes_s: float, engines: int, gated: bool
) -> None:
    ended_s, moves = first_token([takes_s] * engines, gated=gated)
    assert moves <= max(0.0, math.log2(takes_s / STALL_S) + 1)
    # Two of them are the slowest: the other is avoided for PAUSE_MAX_S after it was left.
    assert ended_s <= 3.25 * takes_s + (moves + 1) * WATCH_S


@given(takes_s=st.floats(0.01, 60), engines=st.integers(1, 9))
def test_engines_that_are_known_to_be_slow_are_not_left(takes_s: float, engines: int) -> None:
    assert first_token([takes_s] * engines, usual_s=takes_s / 2)[1] == 0


@given(takes_s=st.floats(0.01, STALL_S), engines=st.integers(1, 9))
def test_a_hung_engine_is_left_after_the_bound_and_once(takes_s: float, engines: int) -> None:
    takes = [math.inf] + [takes_s] * engines
    ended_s, moves = first_token(takes, usual_s=STALL_S / USUAL_FIRST_TOKENS)
    assert (moves, ended_s) <= (1, STALL_S + takes_s + 2 * WATCH_S)


@given(takes_s=st.floats(0.01, 60), hung=st.integers(0, 1))
def test_a_hung_engine_beside_one_of_any_speed_costs_a_small_multiple(
    takes_s: float, hung: int
) -> None:
    takes = [takes_s, takes_s]
    takes[hung] = math.inf
    ended_s, moves = first_token(takes)
    assert ended_s <= 5 * takes_s + STALL_S + (moves + 1) * WATCH_S


def test_a_token_begins_the_patience_anew() -> None:
    course = TurnCourse()
    for _ in range(3):
        course.stalled(EngineId("a"), gated=False, now=0.0)
    assert course.stall_after_s(STALL_S, usual_first_token_s=0.0) == 8 * STALL_S
    course.attempted(tokens=1, began_s=0.0)
    assert course.stall_after_s(STALL_S, usual_first_token_s=0.0) == STALL_S


def test_one_engine_that_hung_for_a_minute_makes_no_turn_wait_longer() -> None:
    seen = FirstTokens()
    assert seen.usual_s == 0.0
    for seconds in [0.5] * 5 + [60.0] * 4:
        seen.note(seconds)
    assert seen.usual_s == 0.5
