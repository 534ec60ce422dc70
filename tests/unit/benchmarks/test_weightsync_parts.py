"""The measurement of parts on a model of 1 MB: the held tensors are exact, at any cost."""

from benchmarks.weightsync.parts import measure


def test_every_share_is_exact_and_a_part_of_the_whole() -> None:
    result = measure(width=32)
    whole, *shares = result["shares"]
    assert all(share["exact"] for share in result["shares"])
    assert whole["held_bytes"] == result["model_bytes"]
    assert all(share["held_bytes"] < whole["held_bytes"] for share in shares)
    assert whole["full_bytes"] > result["model_bytes"]
