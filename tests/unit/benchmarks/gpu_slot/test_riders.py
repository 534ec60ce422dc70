"""Figures of riders from made-up step times."""

import pytest

from benchmarks.gpu_slot.riders import rider_figures


def test_rows_are_borne_only_as_far_as_all_fewer_ones_are() -> None:
    taken = {4: [1.0], 8: [1.02], 16: [1.005], 32: [1.2], 0: [1.001]}
    figures = rider_figures(4, taken)
    assert figures["rows_borne"] == {"within_0.01": 0, "within_0.05": 12}
    assert [one["rows"] for one in figures["riders"]] == [4, 12, 28]


def test_a_cost_within_the_noise_buys_no_tokens() -> None:
    figures = rider_figures(1, {1: [1.0], 2: [1.002], 4: [1.1], 0: [0.99]})
    assert figures["noise_ratio"] == pytest.approx(0.01)
    assert figures["riders"][0]["tokens_per_cost_percent"] is None
    assert figures["riders"][1]["tokens_per_cost_percent"] == pytest.approx(0.3)
