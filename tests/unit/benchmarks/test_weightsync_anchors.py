"""The cost of an anchor is measured against publishes that have none."""

import pytest

from benchmarks.weightsync import anchor_cost


def test_each_turn_has_a_publish_with_an_anchor_one_after_it_and_one_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(anchor_cost, "STEPS_S", (0.0,))
    monkeypatch.setattr(anchor_cost, "TURNS", 2)
    (case,) = anchor_cost.measure(24_000)["cases"]
    assert min(case[f"{part}_s"] for part in ("anchor", "after", "plain")) > 0
    for part in ("anchor", "after"):
        middle, least, most = case[f"{part}_over_plain"]
        assert least <= middle <= most
