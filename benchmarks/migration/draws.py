"""Do sampled tokens follow the probabilities that the weights give them? Pure.

Each token is drawn from its context's probabilities, so the sum of what was seen less what was
expected is a martingale, whatever came before: prompts, lengths, moves. It drifts where a sampler
draws wrongly, and where it depends on a token's value whether the token is kept: an end that is
lost in a move more often than another token makes turns longer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from scipy.stats import norm

from benchmarks.migration.evidence import TokenTruth


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """One token of a reply."""

    truth: TokenTruth
    is_end: bool
    """EOS or a stop token of its turn."""


@dataclass(frozen=True, slots=True)
class DrawReport:
    """z: standard deviations between what was seen and what was expected; normal if all is well."""

    tokens: int
    ends: int
    expected_ends: float
    ends_sd: float
    """Standard deviation of the number of ends."""
    ends_z: float
    logprob_z: float
    """The sum of log-probabilities: above 0 where likely tokens come too often."""


def report(tokens: Iterable[DrawnToken]) -> DrawReport:
    count, ends, expected, variance = 0, 0, 0.0, 0.0
    logprob_excess, logprob_variance = 0.0, 0.0
    for token in tokens:
        truth = token.truth
        count += 1
        ends += token.is_end
        expected += truth.end_probability
        variance += truth.end_probability * (1 - truth.end_probability)
        logprob_excess += truth.logprob - truth.expected_logprob
        logprob_variance += truth.logprob_variance
    return DrawReport(
        tokens=count,
        ends=ends,
        expected_ends=expected,
        ends_sd=sqrt(variance),
        ends_z=_z(ends - expected, variance),
        logprob_z=_z(logprob_excess, logprob_variance),
    )


def power_against_lost_ends(found: DrawReport, *, share: float, most_z: float) -> float:
    """Chance that a fair sampler whose moves lose this share of all ends falls below `-most_z`."""
    if not found.ends_sd:
        return 0.0
    return float(norm.cdf(share * found.expected_ends / found.ends_sd - most_z))


def _z(excess: float, variance: float) -> float:
    return excess / sqrt(variance) if variance else 0.0
