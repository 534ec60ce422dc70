"""A player of the environment that makes mistakes, for the policy's supervised warm-up.

Decides which line to write next: the right one, or with set probabilities an answer given too
early, the previous key called again, or a key with one wrong digit. Never touches the policy.
"""

from dataclasses import dataclass
from random import Random

from examples.grpo.environment import KEY_DIGITS, Episode, Key, Line, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class MistakeRates:
    """Probability of each mistake per turn in which it is possible."""

    early_answer: float = 0.12
    stale_key: float = 0.08
    wrong_digit: float = 0.08


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode as ids, and which of them the player wrote."""

    token_ids: tuple[int, ...]
    is_output: tuple[bool, ...]
    reward: float


def demonstration(task: Task, rates: MistakeRates, random: Random) -> Demonstration:
    episode = Episode(task)
    ids = list(episode.prompt_ids)
    is_output = [False] * len(ids)
    key, previous, turn = task.start, None, 1
    while not episode.done:
        left = task.hops - (turn - 1)
        line = _line(turn, left, key, previous, rates, random)
        observation = episode.act(line.ids())
        ids += [*line.ids(), *observation.ids]
        is_output += [True] * len(line.ids()) + [False] * len(observation.ids)
        if not observation.done:
            # The player believes the last tool answer, right or wrong.
            key, previous = task.key_after(line.key), line.key
        turn += 1
    return Demonstration(tuple(ids), tuple(is_output), episode.reward)


def _line(
    turn: int, left: int, key: Key, previous: Key | None, rates: MistakeRates, random: Random
) -> Line:
    is_answer = left == 0 or random.random() < rates.early_answer
    if previous is not None and random.random() < rates.stale_key:
        key = previous
    if random.random() < rates.wrong_digit:
        place = random.randrange(KEY_DIGITS)
        key = (*key[:place], (key[place] + random.randrange(1, 10)) % 10, *key[place + 1 :])
    return Line(turn=turn, left=left, key=key, is_answer=is_answer)
