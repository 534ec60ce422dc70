"""Pointer chase with a lookup tool: the multi-turn environment that the demo's policy learns.

The prompt names a key and a number of hops. Each turn the policy writes one line of a fixed form
that either calls the tool with a key or answers with one; the tool gives the next key. Right is
to call exactly `hops` times, each time with the key from the last tool answer, then to answer.

Decides: tasks, tool answers, tool latencies and rewards, all of them functions of
(seed, step, prompt index) and of what the policy wrote. Holds no clock and never sleeps: a
latency is a number that the caller lets pass.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from statistics import NormalDist

from examples.grpo.vocabulary import (
    ANSWER_ID,
    CALL_ID,
    digit_of,
    digits_encoded,
    encoded,
)
from harvester.contracts.errors import ConfigError

KEY_DIGITS = 10
LINE_TOKENS = KEY_DIGITS + 8
"""Length of every well-formed line: `turn T left L key d..d do VERB ;`."""

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskShape:
    """The distributions that tasks are drawn from."""

    prompts_per_step: int = 36
    hops_max: int = 8
    hops_go_on: float = 0.64
    """Hops are geometric, cut at `hops_max`: each further hop has this share of the one before."""
    latency_median_s: float = 0.015
    latency_sigma: float = 1.1
    """Sigma of the logarithm: the 99th percentile is 13 times the median."""
    latency_max_s: float = 0.4

    def __post_init__(self) -> None:
        if not 1 <= self.hops_max <= 8:
            raise ConfigError(f"hops_max is {self.hops_max}: a line has one digit for it, use 1-8")
        if self.prompts_per_step < 1:
            raise ConfigError("prompts_per_step must be at least 1")
        if not 0 < self.hops_go_on < 1:
            raise ConfigError(f"hops_go_on is {self.hops_go_on}: use a share between 0 and 1")

    def hops_at(self, quantile: float) -> int:
        """The number of hops below which `quantile` of all tasks lie."""
        weights = [self.hops_go_on**i for i in range(self.hops_max)]
        rest = quantile * sum(weights)
        for hops, weight in enumerate(weights, start=1):
            rest -= weight
            if rest < 0:
                return hops
        return self.hops_max


@dataclass(frozen=True)
class Task:
    """One prompt: a start key, a number of hops, and a world of keys that point to keys."""

    shape: TaskShape
    seed: int
    step: int
    prompt_index: int

    @cached_property
    def hops(self) -> int:
        # Stratified: the prompts of a step share out the quantiles between them, so that every
        # step has nearly the same mix of short and long tasks and steps can be compared.
        places = self.shape.prompts_per_step
        return self.shape.hops_at((self.prompt_index % places + self._uniform("hops")) / places)

    @cached_property
    def start(self) -> Key:
        return self._key("start")

    def key_after(self, key: Key) -> Key:
        return self._key("next", key)

    def latency_s(self, key: Key) -> float:
        """Duration of the tool's look-up of `key`, in s; lognormal, capped."""
        gauss = _NORMAL.inv_cdf(min(max(self._uniform("latency", key), 1e-9), 1 - 1e-9))
        median_s, sigma = self.shape.latency_median_s, self.shape.latency_sigma
        return min(self.shape.latency_max_s, median_s * math.exp(sigma * gauss))

    def prompt_ids(self) -> tuple[int, ...]:
        return (
            *encoded(f"<bos> hops {self.hops} start"),
            *digits_encoded(self.start),
            *encoded(";"),
        )

    def _key(self, purpose: str, key: Key = ()) -> Key:
        return tuple(int(c) for c in str(self._random(purpose, key)).zfill(20)[-KEY_DIGITS:])

    def _uniform(self, purpose: str, key: Key = ()) -> float:
        return self._random(purpose, key) / 2.0**64

    def _random(self, purpose: str, key: Key) -> int:
        named = f"{self.seed}/{self.step}/{self.prompt_index}/{purpose}/{key}"
        return int.from_bytes(blake2b(named.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Line:
    """One well-formed line of the policy."""

    turn: int
    left: int
    key: Key
    is_answer: bool

    def ids(self) -> tuple[int, ...]:
        verb = "answer" if self.is_answer else "call"
        return (
            *encoded(f"turn {self.turn} left {self.left} key"),
            *digits_encoded(self.key),
            *encoded(f"do {verb} ;"),
        )


@cache
def _fixed_words() -> tuple[tuple[int, int], ...]:
    line = Line(turn=0, left=0, key=(0,) * KEY_DIGITS, is_answer=False).ids()
    free = {1, 3, *range(5, 5 + KEY_DIGITS), LINE_TOKENS - 2}
    return tuple((at, word) for at, word in enumerate(line) if at not in free)


def parsed_line(output_ids: tuple[int, ...]) -> Line | None:
    """The line that `output_ids` spell, or None where they are malformed."""
    if len(output_ids) != LINE_TOKENS:
        return None
    if any(output_ids[at] != word for at, word in _fixed_words()):
        return None
    digits = [digit_of(output_ids[at]) for at in (1, 3, *range(5, 5 + KEY_DIGITS))]
    spelled = tuple(digit for digit in digits if digit is not None)
    verb = output_ids[-2]
    if len(spelled) != len(digits) or verb not in (CALL_ID, ANSWER_ID):
        return None
    return Line(turn=spelled[0], left=spelled[1], key=spelled[2:], is_answer=verb == ANSWER_ID)


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's reaction to the policy's line."""

    ids: tuple[int, ...]
    """The tool's answer, to be appended to the context; empty when the episode is done."""
    latency_s: float
    done: bool
    reward: float
    """Reward in [0, 1] so far; final when `done`."""


class Episode:
    """One attempt at a task: share of the right calls and of the right answer is the reward."""

    def __init__(self, task: Task) -> None:
        self.prompt_ids = task.prompt_ids()
        self.done = False
        self._task = task
        self._calls = 0
        self._right_calls = 0
        self._due = task.start
        self._answered_right = False

    @property
    def reward(self) -> float:
        return (self._right_calls + self._answered_right) / (self._task.hops + 1)

    def act(self, output_ids: tuple[int, ...]) -> Observation:
        """Takes one line of the policy, its stop token included."""
        if self.done:
            raise ValueError("the episode is over")
        line = parsed_line(output_ids)
        calls_left = self._task.hops - self._calls
        if line is None or line.is_answer or calls_left == 0:
            at_end = self._right_calls == self._task.hops
            self._answered_right = (
                line is not None and line.is_answer and at_end and line.key == self._due
            )
            self.done = True
            return Observation(ids=(), latency_s=0.0, done=True, reward=self.reward)
        return self._called(line.key)

    def _called(self, key: Key) -> Observation:
        next_key = self._task.key_after(key)
        self._calls += 1
        if key == self._due:
            self._right_calls += 1
            self._due = next_key
        return Observation(
            ids=(*encoded("is"), *digits_encoded(next_key), *encoded(";")),
            latency_s=self._task.latency_s(key),
            done=False,
            reward=self.reward,
        )


_NORMAL = NormalDist()
