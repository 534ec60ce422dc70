"""The memory measurement on a model of 20 MB: fixed costs dominate there, so only what must be."""

from benchmarks.weightsync.memory import measure


def test_a_publisher_costs_at_least_its_copy_and_a_receiver_has_a_figure_per_setting() -> None:
    result = measure(parameters=10_000_000, settings_bytes=[8 << 20])
    assert result["model_bytes"] == 20_000_000
    assert result["publisher_ratio"] >= 1
    assert result["receiver_peak_bytes"] > 0
    assert [found["staging_bytes"] for found in result["receivers"]] == [8 << 20]
