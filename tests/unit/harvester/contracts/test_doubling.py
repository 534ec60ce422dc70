"""One formula for waits that double."""

import math

import pytest

from harvester.contracts.doubling import doubled_s


@pytest.mark.parametrize(("times", "wait_s"), [(0, 0.5), (1, 1.0), (3, 4.0), (4, 5.0), (5000, 5.0)])
def test_a_wait_doubles_up_to_its_bound(times: int, wait_s: float) -> None:
    assert doubled_s(0.5, times, most_s=5.0) == wait_s


def test_a_wait_without_a_bound_stays_finite() -> None:
    assert doubled_s(1.0, 10) == 1024.0
    assert math.isfinite(doubled_s(1.0, 10**6))
