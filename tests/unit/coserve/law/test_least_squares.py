"""A linear law from one observation at a time, held against the solution of all at once."""

import random

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from coserve.law.step_time import LeastSquares

LEAST = (0.0, 1e-9, 1e-9, 0.0)


def observations(
    count: int, law: tuple[float, ...], *, noise: float
) -> list[tuple[list[float], float]]:
    rng = random.Random(7)
    found = []
    for _ in range(count):
        x = [
            1.0,
            float(rng.randint(1, 64)),
            float(rng.choice((0, 0, 512, 2048))),
            rng.uniform(0, 200),
        ]
        y = sum(each * value for each, value in zip(law, x, strict=True))
        found.append((x, y + rng.gauss(0.0, noise)))
    return found


class Fit:
    """Coefficients that follow what is observed."""

    def __init__(self, coefficients: list[float], least: tuple[float, ...]) -> None:
        self.coefficients, self._fit = coefficients, LeastSquares(least=least)

    def observe(self, x: list[float], y: float) -> None:
        self.coefficients = self._fit.updated(self.coefficients, [x], [y])


def fitted(seen: list[tuple[list[float], float]]) -> Fit:
    fit = Fit([0.02, 0.001, 0.0005, 0.0], LEAST)
    for x, y in seen:
        fit.observe(x, y)
    return fit


def test_is_the_weighted_least_squares_solution() -> None:
    seen = observations(3000, (0.006, 5e-4, 5e-5, 1e-4), noise=2e-4)
    values = np.array([y for _, y in seen])
    weights = np.sqrt((1 - 1 / 200) ** np.arange(len(seen))[::-1]) / values
    matrix = np.array([x for x, _ in seen]) * weights[:, None]
    wanted, *_ = np.linalg.lstsq(matrix, values * weights, rcond=None)
    assert fitted(seen).coefficients == pytest.approx(wanted, rel=0.02)


def test_some_observations_together_count_as_one_after_the_other() -> None:
    seen, together = (
        observations(320, (0.006, 5e-4, 5e-5, 1e-4), noise=2e-4),
        LeastSquares(least=LEAST),
    )
    found = [0.02, 0.001, 0.0005, 0.0]
    for first in range(0, len(seen), 16):
        points, values = zip(*seen[first : first + 16], strict=True)
        found = together.updated(found, points, values)
    assert found == pytest.approx(fitted(seen).coefficients, rel=0.02)


def test_none_falls_below_its_least_and_the_others_make_up_for_it() -> None:
    """The second term would have to be negative."""
    rng, fit = random.Random(8), Fit([0.01, 0.001], (0.0, 0.0))
    for _ in range(2000):
        x = [1.0, rng.uniform(0.0, 10.0)]
        fit.observe(x, 0.05 - 0.002 * x[1])
        assert min(fit.coefficients) >= 0.0
    assert fit.coefficients[1] == 0.0
    assert fit.coefficients[0] == pytest.approx(0.04, rel=0.1), "the mean of what was seen"


@pytest.mark.parametrize("seed", range(20))
def test_coefficients_beside_several_at_their_least_are_the_best(seed: int) -> None:
    """Observations of a law with negative coefficients, all in one call: scipy's solution."""
    rng, law = np.random.default_rng(seed), (0.1, -0.004, 2e-4, -0.003)
    points = np.column_stack(
        [np.ones(60), rng.integers(1, 17, 60), rng.integers(0, 100, 60), rng.uniform(0, 4, 60)]
    )
    values = np.maximum(points @ law * rng.uniform(0.8, 1.2, 60), 0.005)
    found = LeastSquares(least=LEAST).updated((0.0,) * 4, points, values)
    weights = np.sqrt((1 - 1 / 200) ** np.arange(60)[::-1]) / values
    # The floor under the information pulls towards the coefficients before, here 0.
    pull = np.sqrt(1e-3 * (weights**2).sum()) * np.eye(4)
    best = lsq_linear(
        np.vstack([points * weights[:, None], pull]),
        np.concatenate([values * weights, np.zeros(4)]),
        bounds=(LEAST, np.inf),
        tol=1e-14,
    )
    assert sum(coefficient <= 1e-8 for coefficient in found) >= 1
    assert found == pytest.approx(best.x, rel=1e-3, abs=1e-6)


def test_terms_that_always_come_together_do_not_drift_apart() -> None:
    """Hours of one batch size whose context grows with it."""
    rng, law = random.Random(9), (0.006, 5e-4, 5e-5, 1e-4)
    fit = fitted(observations(1000, law, noise=1e-4))
    for _ in range(50_000):
        x = [1.0, 16.0, 0.0, 32.0]
        y = sum(each * value for each, value in zip(law, x, strict=True)) * rng.uniform(0.9, 1.1)
        fit.observe(x, y)
    assert fit.coefficients == pytest.approx(law, rel=0.25)
