"""Operating characteristics of the guards in seeded runs; `benchmarks.guards` has them all."""

from dataclasses import replace

import pytest

from benchmarks.guards.services import SERVICES
from benchmarks.guards.simulated_slot import run


@pytest.mark.parametrize("seed", range(3))
def test_a_rise_of_84_percent_is_found_within_ten_minutes(seed: int) -> None:
    found = run(SERVICES["TTFT 1.2 s becomes 2.2 s, sigma 0.1, load 0.0"], seed)
    assert found["stopped_by"]
    assert found["after_min"] <= 10.0


@pytest.mark.parametrize(
    ("name", "within_min", "least"),
    [
        ("P99 of TTFT doubled, median as before", 30.0, 7),
        ("TTFT 300 ms becomes 550 ms for a middle 30 %", 20.0, 8),
        # Later than the burn rate of an hour pages.
        ("a quarter 6 s late, slices of 30 s", 35.0, 8),
    ],
)
def test_other_harm_is_found_in_time(name: str, within_min: float, least: int) -> None:
    found = [run(SERVICES[name], seed) for seed in range(8)]
    in_time = [one for one in found if one["stopped_by"] and one["after_min"] <= within_min]
    assert len(in_time) >= least


@pytest.mark.parametrize(
    ("name", "hours"),
    [("steady", 2.0), ("own misses 0.8 %", 12.0), ("own misses of 12 s, 0.5 %", 8.0)],
)
def test_a_harmless_guest_is_left_alone(name: str, hours: float) -> None:
    """Late first tokens that count to no withheld slice would stop the third after 7 hours."""
    found = run(replace(SERVICES[name], days=hours / 24.0), 0)
    assert not found["stopped_by"]
    assert found["halvings"] == 0
