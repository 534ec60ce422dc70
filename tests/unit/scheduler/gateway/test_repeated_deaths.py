"""Blame for repeated deaths: its operating characteristics in a simulated fleet, and its rules.

Engines crash at random, in waves or in turn, turns go on elsewhere, and one prompt may kill each
engine some time after it came. The policy that ships decides; time is virtual.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import pytest

from harvester.contracts.ids import EngineId
from scheduler.gateway.policy.repeated_deaths import (
    _REMEMBERED,
    FORGET_S,
    HELD_S,
    RepeatedDeaths,
)

PLACES, LOAD, RESTART_S = 8, 0.8, 30.0
POISON = "poison"
A, B, C, D = map(EngineId, "abcd")


@dataclass(slots=True, eq=False)
class Simulated:
    """A turn: the time that it still needs on engines; a poison's is endless."""

    prompt: str
    left_s: float
    began_s: float = 0.0
    attempt: int = 0


class World:
    def __init__(self, engines: int, *, seed: int, poison_s: float = 0.0) -> None:
        self.random = Random(seed)
        self.policy = RepeatedDeaths()
        self.now = 0.0
        self.poison_s = poison_s
        self.up = dict.fromkeys((EngineId(f"e{at}") for at in range(engines)), True)
        self.on: dict[EngineId, list[Simulated]] = {engine: [] for engine in self.up}
        self.queue: list[Simulated] = []
        self.blamed: list[Simulated] = []
        self.ended = self.killed = self.deaths = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, time_s: float, event: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event, arguments))

    def step(self) -> None:
        self.now, _, event, arguments = heapq.heappop(self._events)
        event(*arguments)
        waiting, self.queue = self.queue, []
        for turn in waiting:
            self._place(turn)

    def arrive(self, prompt: str, left_s: float) -> None:
        self.queue.append(Simulated(prompt, left_s))

    def crash(self, engine: EngineId, every_s: float) -> None:
        self.die(engine)
        self.at(self.now + self.random.expovariate(1 / every_s), self.crash, engine, every_s)

    def wave(self, every_s: float) -> None:
        for engine in self.random.sample(list(self.up), len(self.up) // 3):
            self.die(engine)
        self.at(self.now + self.random.expovariate(1 / every_s), self.wave, every_s)

    def roll(self, at: int, every_s: float) -> None:
        self.die(list(self.up)[at % len(self.up)])
        self.at(self.now + every_s, self.roll, at + 1, every_s)

    def die(self, engine: EngineId) -> None:
        if not self.up[engine]:
            return
        self.up[engine] = False
        self.deaths += 1
        self.at(self.now + RESTART_S, self.up.__setitem__, engine, True)
        lost, self.on[engine] = self.on[engine], []
        if lost:
            self.policy.died((turn.prompt for turn in lost), now=self.now)
        for turn in lost:
            self.policy.ended(turn.prompt, engine, now=self.now)
            turn.left_s = max(0.01, turn.left_s - (self.now - turn.began_s))
            turn.attempt += 1
        self.queue = lost + self.queue

    def _place(self, turn: Simulated) -> None:
        policy = self.policy
        if policy.blamed(turn.prompt, now=self.now):
            self.blamed.append(turn)
            return
        if wait_s := policy.verdict_in_s(turn.prompt, now=self.now):
            self.at(self.now + wait_s + 1e-6, lambda: None)
        apart = policy.apart(turn.prompt)
        free = [
            engine
            for engine, turns in self.on.items()
            if self.up[engine]
            and len(turns) < PLACES
            and not (apart and any(policy.apart(other.prompt) for other in turns))
        ]
        if wait_s or not free:
            self.queue.append(turn)
            return
        engine = self.random.choice(free)
        turn.began_s = self.now
        self.on[engine].append(turn)
        policy.began(turn.prompt, engine, now=self.now)
        after_s, event = turn.left_s, self.end
        if turn.prompt == POISON:
            after_s, event = self.poison_s, self.kill
        self.at(self.now + after_s, event, turn, engine, turn.attempt)

    def kill(self, turn: Simulated, engine: EngineId, attempt: int) -> None:
        if turn.attempt == attempt and turn in self.on[engine]:
            self.killed += 1
            self.die(engine)

    def end(self, turn: Simulated, engine: EngineId, attempt: int) -> None:
        if turn.attempt == attempt and turn in self.on[engine]:
            self.on[engine].remove(turn)
            self.policy.ended(turn.prompt, engine, now=self.now)
            self.ended += 1


def world(
    engines: int,
    *,
    turns: int,
    turn_s: float,
    seed: int,
    group: int = 1,
    crash_s: float = 0.0,
    wave_s: float = 0.0,
    roll_s: float = 0.0,
    poison_s: float = 0.0,
) -> World:
    """A world in which turns of groups of samples arrive at 80 % of what the engines can do."""
    made = World(engines, seed=seed, poison_s=poison_s)
    random, time_s = made.random, 0.0
    for at in range(turns // group):
        time_s += random.expovariate(engines * PLACES * LOAD / (turn_s * group))
        for _ in range(group):
            made.at(time_s, made.arrive, f"p{at}", random.expovariate(1 / turn_s))
    if poison_s:
        for _ in range(group):
            made.at(time_s / 2, made.arrive, POISON, float("inf"))
    for engine in made.up if crash_s else ():
        made.at(random.expovariate(1 / crash_s), made.crash, engine, crash_s)
    if wave_s:
        made.at(random.expovariate(1 / wave_s), made.wave, wave_s)
    if roll_s:
        made.at(roll_s, made.roll, 0, roll_s)
    return made


@pytest.mark.parametrize(
    ("fleet", "least_deaths", "most_blamed"),
    [
        ({"engines": 16, "turn_s": 60, "crash_s": 1200}, 50, 2),
        ({"engines": 16, "turn_s": 300, "crash_s": 1200}, 300, 2),
        ({"engines": 16, "turn_s": 60, "crash_s": 300}, 250, 3),
        ({"engines": 16, "turn_s": 200, "crash_s": 300}, 800, 4),
        ({"engines": 16, "turn_s": 60, "crash_s": 3600, "wave_s": 300}, 100, 2),
        ({"engines": 16, "turn_s": 60, "crash_s": 600, "group": 8}, 100, 8),
        ({"engines": 20, "turn_s": 60, "roll_s": 20}, 200, 2),
        ({"engines": 2, "turn_s": 60, "crash_s": 600}, 100, 2),
    ],
)
def test_hardly_one_of_ten_thousand_turns_is_blamed_for_engines_that_die_anyway(
    fleet: dict[str, Any], least_deaths: int, most_blamed: int
) -> None:
    turns = 10_000
    made = world(turns=turns, seed=0, **fleet)
    while made.ended + len(made.blamed) < turns:
        made.step()
    assert made.deaths >= least_deaths
    assert len(made.blamed) <= most_blamed


@pytest.mark.parametrize(
    ("poison_s", "group", "engines", "most_killed"),
    [
        (0.2, 1, 16, 4),
        (3.0, 1, 16, 4),
        (10.0, 1, 16, 5),
        (30.0, 1, 16, 8),
        (120.0, 1, 16, 9),
        (3.0, 1, 4, 8),
        (30.0, 1, 4, 7),
        (120.0, 1, 4, 8),
        (3.0, 8, 16, 12),
        (30.0, 8, 16, 12),
    ],
)
def test_a_prompt_that_kills_late_costs_a_few_engines_and_hardly_a_bystander(
    poison_s: float, group: int, engines: int, most_killed: int
) -> None:
    bystanders = 0
    for seed in range(5):
        fleet = {"crash_s": 1200 if engines > 4 else 6 * 3600.0, "turn_s": 60, "group": group}
        made = world(engines, turns=3000, seed=seed, poison_s=poison_s, **fleet)
        while not any(turn.prompt == POISON for turn in made.blamed):
            made.step()
        assert made.killed <= most_killed
        bystanders += sum(turn.prompt != POISON for turn in made.blamed)
    assert bystanders <= 1, "of 15,000"


def kill(policy: RepeatedDeaths, engine: EngineId, *prompts: str, at_s: float) -> None:
    for prompt in prompts:
        policy.began(prompt, engine, now=at_s - 4.0)
    policy.died(prompts, now=at_s)
    for prompt in prompts:
        policy.ended(prompt, engine, now=at_s)


def test_three_deaths_of_one_prompt_are_believed_after_the_verdict_has_waited() -> None:
    policy = RepeatedDeaths()
    for at, engine in enumerate((A, B, C)):
        kill(policy, engine, "bad", f"other{at}", at_s=20.0 * (at + 1))
    assert policy.verdict_in_s("bad", now=60.0) == HELD_S
    assert not policy.blamed("bad", now=60.0)
    assert "3 engines died under this prompt" in policy.blamed("bad", now=60.0 + HELD_S)
    assert not policy.blamed("other1", now=60.0 + HELD_S)
    assert not policy.blamed("bad", now=61.0 + FORGET_S)


def test_a_prompt_that_was_always_beside_another_is_tried_apart_from_it() -> None:
    policy = RepeatedDeaths()
    for at, engine in enumerate((A, B, C)):
        kill(policy, engine, "bad", "beside", at_s=20.0 * (at + 1))
    assert policy.apart("bad")
    assert policy.apart("beside")
    assert not policy.blamed("bad", now=70.0)
    kill(policy, D, "bad", at_s=80.0)
    assert policy.blamed("bad", now=80.0 + HELD_S)
    assert not policy.blamed("beside", now=80.0 + HELD_S)


def test_engines_that_die_together_with_others_are_no_evidence() -> None:
    policy = RepeatedDeaths()
    for at in (20.0, 40.0, 60.0):
        kill(policy, A, "r", at_s=at)
        kill(policy, B, "other", at_s=at + 0.5)
    assert not policy.blamed("r", now=80.0)


def test_a_prompt_that_is_sent_again_is_known_and_one_without_deaths_is_forgotten() -> None:
    policy = RepeatedDeaths()
    for at, engine in enumerate((A, B, C)):
        kill(policy, engine, "bad", at_s=20.0 * (at + 1))
    policy.began("harmless", A, now=70.0)
    policy.ended("harmless", A, now=80.0)
    assert policy.blamed("bad", now=80.0)
    assert set(policy._lives) == {"bad"}


def test_engines_that_die_with_many_prompts_leave_no_more_than_are_remembered() -> None:
    deaths, engine = RepeatedDeaths(), EngineId("e")
    deaths.began("runs on", EngineId("other"), now=0.0)
    deaths.died(["runs on"], now=0.0)
    for death in range(200):
        prompts = [f"{death}.{number}" for number in range(32)]
        for prompt in prompts:
            deaths.began(prompt, engine, now=float(death))
        deaths.died(prompts, now=death + 0.5)
        for prompt in prompts:
            deaths.ended(prompt, engine, now=death + 0.5)
    assert len(deaths._lives) <= _REMEMBERED + 1
