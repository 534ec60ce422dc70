"""The memory measurement on a model of 40 MB: fixed costs dominate there, so only what must be."""

from benchmarks.weightsync.memory import measure


def test_a_publisher_costs_at_least_its_copy_and_a_receiver_what_it_stages() -> None:
    result = measure(parameters=20_000_000)
    assert result["model_bytes"] == 40_000_000
    assert result["publisher_ratio"] >= 1
    assert result["receiver_peak_bytes"] > 0
