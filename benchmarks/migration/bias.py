"""Is the sample biased by moves? Lengths and rewards of two arms with the same prompts. Pure.

Each prompt is sampled once in each arm, so that under the hypothesis of no bias a pair may be
swapped: the permutation test is exact, ties and unlike prompts included. Its statistic is the
larger of two: the difference of the means and the distance of the distributions
(Kolmogorov-Smirnov), each in units of its own spread under the permutations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

REWARDED = 3
"""A token whose id this number divides counts towards the reward."""
LEAST_P = 0.001
"""Below it a run convicts, and a biased policy counts as caught."""
PERMUTATIONS = 20_000
"""The least p-value of a measure is one in so many, twice that of both: far below `LEAST_P`."""
_POWER_PERMUTATIONS = 4_000
LOST_ENDS = 1 / 7
"""Share of the ends that the policy `losing_ends` loses."""
_BATCH = 2_000
_POINTS = 65
"""Quantiles at which the distributions are compared."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn."""

    pair: str
    """Name of the prompt, the same in both arms."""
    moves: int
    length: float
    reward: float
    """Share of the tokens that are rewarded."""

    @classmethod
    def of(cls, pair: str, token_ids: Sequence[int], *, moves: int = 0) -> "Sample":
        rewarded = sum(token % REWARDED == 0 for token in token_ids)
        length = len(token_ids)
        return cls(pair, moves, float(length), rewarded / length if length else 0.0)


MEASURES: Mapping[str, Callable[[Sample], float]] = {
    "length": lambda sample: sample.length,
    "reward": lambda sample: sample.reward,
}


def paired_p_value(
    first: Floats, second: Floats, *, seed: int, permutations: int = PERMUTATIONS
) -> float:
    """The p-value of exchangeable pairs: small where the arms differ in mean or distribution."""
    random = np.random.default_rng(seed)
    pooled = np.concatenate([first, second])
    points = np.unique(np.quantile(pooled, np.linspace(0, 1, _POINTS), method="nearest"))
    # For each pair and point: whether the first lies below less whether the second does.
    steps = (first[:, None] <= points).astype(np.float32) - (second[:, None] <= points)
    columns = np.column_stack([steps, (first - second).astype(np.float32)])
    sums = np.abs(columns.sum(axis=0, keepdims=True))
    while len(sums) < permutations:
        size = min(_BATCH, permutations - len(sums))
        signs = random.integers(0, 2, size=(size, len(first)), dtype=np.int8) * 2 - 1
        sums = np.concatenate([sums, np.abs(signs.astype(np.float32) @ columns)])
    statistics = np.column_stack([sums[:, :-1].max(axis=1), sums[:, -1]])
    spread = statistics.std(axis=0)
    scaled = (statistics / np.where(spread > 0, spread, 1.0)).max(axis=1)
    # The observed one counts among the permutations: the test is exact.
    return float(np.mean(scaled >= scaled[0] - 1e-6))


@dataclass(frozen=True, slots=True)
class LengthDifference:
    """Length of a pair's moved turn less that of the calm one, in tokens, with a 95 % interval."""

    mean: float
    low: float
    high: float


def interval(calm: Sequence[Sample], moved: Sequence[Sample]) -> LengthDifference:
    pairs = _paired(calm, moved)
    found = [other.length - one.length for one, other in pairs]
    mean = float(np.mean(found))
    half = 1.96 * float(np.std(found, ddof=1)) / len(found) ** 0.5
    return LengthDifference(mean, mean - half, mean + half)


def _paired(calm: Sequence[Sample], moved: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    others = {sample.pair: sample for sample in moved}
    return [(sample, others[sample.pair]) for sample in calm if sample.pair in others]


def p_values(
    calm: Sequence[Sample], moved: Sequence[Sample], *, seed: int, permutations: int = PERMUTATIONS
) -> dict[str, float]:
    """`bias` is the smallest of the measures', times their number (Bonferroni)."""
    pairs = _paired(calm, moved)
    found = {
        name: paired_p_value(
            np.array([measure(sample) for sample, _ in pairs]),
            np.array([measure(sample) for _, sample in pairs]),
            seed=seed,
            permutations=permutations,
        )
        for name, measure in MEASURES.items()
    }
    return {"bias": min(1.0, len(found) * min(found.values())), **found}


def dropping_moved(
    moved: Sequence[Sample], _calm: Sequence[Sample], _random: np.random.Generator
) -> list[Sample]:
    """A biased policy: turns that lose their engine are dropped."""
    return [sample for sample in moved if not sample.moves]


def first_finished(
    moved: Sequence[Sample], calm: Sequence[Sample], random: np.random.Generator
) -> list[Sample]:
    """A biased policy: a turn that loses its engine starts again until no move hits it.

    New draws come from the other arm; a move hits them in proportion to their length.
    """
    longest = 1.0 + max(sample.length for sample in calm)
    kept = []
    for sample in moved:
        draw = sample
        while draw.moves:
            other = calm[int(random.integers(len(calm)))]
            if random.random() >= other.length / longest:
                draw = replace(other, pair=sample.pair, moves=0)
        kept.append(draw)
    return kept


def losing_ends(
    moved: Sequence[Sample], calm: Sequence[Sample], random: np.random.Generator
) -> list[Sample]:
    """A biased policy: a move loses an end in seven, and the turn goes on, as long as another."""
    longest = max(sample.length for sample in calm)
    kept = []
    for sample in moved:
        lost = sample.length < longest and random.random() < LOST_ENDS
        more = calm[int(random.integers(len(calm)))].length if lost else 0.0
        kept.append(replace(sample, length=min(longest, sample.length + more)))
    return kept


POLICIES = {
    "dropping_moved": dropping_moved,
    "first_finished": first_finished,
    "losing_ends": losing_ends,
}


def power(
    calm: Sequence[Sample],
    moved: Sequence[Sample],
    *,
    policy: str,
    seed: int,
    rounds: int,
) -> float:
    """Share of bootstrap samples of the pairs in which the test convicts the biased policy."""
    random = np.random.default_rng(seed)
    pairs = _paired(calm, moved)
    caught = 0
    for number in range(rounds):
        drawn = random.integers(len(pairs), size=len(pairs))
        ours, theirs = [], []
        for at, index in enumerate(drawn):
            one, other = pairs[index]
            ours.append(replace(one, pair=str(at)))
            theirs.append(replace(other, pair=str(at)))
        kept = POLICIES[policy](theirs, ours, random)
        found = p_values(ours, kept, seed=seed + number, permutations=_POWER_PERMUTATIONS)
        caught += found["bias"] < LEAST_P
    return caught / rounds
