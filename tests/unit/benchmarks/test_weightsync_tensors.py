"""The cost of a tensor is reported for each case, and includes the parts of an apply."""

from benchmarks.weightsync.tensors import measure


def test_every_case_has_the_time_of_each_part() -> None:
    result = measure(tensors=40, steps=1)
    assert [case["name"] for case in result["cases"]] == ["1% of all", "5% of all", "one tensor"]
    for case in result["cases"]:
        assert {"publish_us", "stage_us", "apply_us", "verify_us"} < case.keys()
        assert all(case[what] > 0 for what in case if what != "name")
