"""The test of draws in benchmarks.migration: fair samplers pass it as often as it says."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.migration.draws import (
    DrawnToken,
    DrawReport,
    power_against_lost_ends,
    report,
)
from benchmarks.migration.evidence import TokenTruth

END, VOCABULARY, PLACES, LONGEST = 0, 6, 256, 64


def sampled(
    random: np.random.Generator,
    *,
    turns: int = 200,
    ends_lost: float = 0.0,
    others_lost: float = 0.0,
    temperature: float = 1.0,
) -> DrawReport:
    """Turns whose probabilities differ at each place.

    `ends_lost`, `others_lost`: share of ends and of other tokens that a move drops and draws anew.
    """
    logits = random.normal(size=(PLACES, VOCABULARY))
    logits[:, END] -= 2
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    drawn = chances ** (1 / temperature)
    bounds = np.cumsum(drawn / drawn.sum(axis=1, keepdims=True), axis=1)
    logprobs = np.log(chances)
    means = (chances * logprobs).sum(axis=1)
    variances = (chances * (logprobs - means[:, None]) ** 2).sum(axis=1)

    def draw(place: int) -> int:
        return min(int(np.searchsorted(bounds[place], random.random())), VOCABULARY - 1)

    def tokens() -> Iterator[DrawnToken]:
        for _ in range(turns):
            for place in random.integers(PLACES, size=LONGEST):
                token = draw(place)
                if random.random() < (ends_lost if token == END else others_lost):
                    token = draw(place)
                truth = TokenTruth(
                    float(logprobs[place, token]),
                    None,
                    end_probability=float(chances[place, END]),
                    expected_logprob=float(means[place]),
                    logprob_variance=float(variances[place]),
                )
                yield DrawnToken(truth, token == END)
                if token == END:
                    break

    return report(tokens())


def test_fair_draws_are_convicted_as_rarely_as_a_normal_distribution_says() -> None:
    random = np.random.default_rng(1)
    reports = [sampled(random, turns=60) for _ in range(150)]
    for found in ([one.ends_z for one in reports], [one.logprob_z for one in reports]):
        assert abs(np.mean(found)) < 3 / math.sqrt(len(found))
        assert 0.8 < np.std(found) < 1.2


def test_moves_that_lose_ends_or_favour_them_are_convicted() -> None:
    random = np.random.default_rng(2)
    assert sampled(random, turns=1000, ends_lost=0.15).ends_z < -3
    assert sampled(random, turns=1000, others_lost=0.15).ends_z > 3


def test_draws_at_another_temperature_are_convicted() -> None:
    random = np.random.default_rng(3)
    assert sampled(random, temperature=0.9).logprob_z > 4
    assert sampled(random, temperature=1.1).logprob_z < -4


def test_a_report_of_three_tokens_is_that_of_the_hand_s() -> None:
    places = [(-0.1, 0.9, -0.3, 0.2, True), (-0.7, 0.5, -0.6, 0.1, False), (-4.6, 0.01, -1, 2, 0)]
    found = report(
        DrawnToken(TokenTruth(logprob, None, chance, mean, variance), bool(end))
        for logprob, chance, mean, variance, end in places
    )
    assert (found.tokens, found.ends) == (3, 1)
    assert math.isclose(found.expected_ends, 1.41)
    # Variances: 0.09 + 0.25 + 0.0099, and 0.2 + 0.1 + 2.
    assert math.isclose(found.ends_z, -0.41 / math.sqrt(0.3499))
    assert math.isclose(found.logprob_z, (-5.4 + 1.9) / math.sqrt(2.3))


def test_nothing_drawn_is_no_finding() -> None:
    assert report([]) == DrawReport(0, 0, 0.0, 0.0, 0.0, 0.0)


def test_the_power_against_lost_ends_is_how_often_such_a_sampler_is_convicted() -> None:
    random = np.random.default_rng(5)
    fair = sampled(random, turns=300)
    caught = [sampled(random, turns=300, ends_lost=0.14).ends_z < -2 for _ in range(60)]
    # The draw in place of a lost end may be an end too.
    share = 0.14 * (1 - fair.expected_ends / fair.tokens)
    expected = power_against_lost_ends(fair, share=share, most_z=2)
    assert 0.3 < expected < 0.9
    assert np.mean(caught) == pytest.approx(expected, abs=0.25)
