"""Whole engines of two ranks follow a store: ranks of tensors, of experts, of a pipeline, on Ray.

The engines run in one child process each (see test_weightsync_vllm.py) with a process per rank.
"""

from typing import Any

import pytest

from tests.integration.weightsync_child import run_child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


ON_RAY = [pytest.param(split, marks=pytest.mark.ray) for split in ("ray", "legacy-ray")]


@pytest.fixture(scope="module", params=["tensors", "experts", "layers", *ON_RAY])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The child's report with one way of sharding a model."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("parallel")
    return run_child("tests.integration.weightsync_parallel_engine", root, request.param)


def test_ranks_that_followed_sample_as_ranks_that_loaded(seen: dict[str, Any]) -> None:
    """Tokens and log-probabilities are equal bit for bit, after a full version and a delta."""
    assert seen["version_1"]["logprobs"] != seen["fresh"]["logprobs"]
    assert seen["version_2"] == seen["fresh"]


def test_each_rank_reports_the_published_state(seen: dict[str, Any]) -> None:
    for version in (1, 2, 4):
        reports = seen[f"reports_{version}"]
        assert len(reports) == 2
        for report in reports:
            assert report["state_hash"] == seen["published"][version - 1]
            assert report["in_place"]
    assert all(report["from_full"] for report in seen["reports_1"])
    assert not any(report["from_full"] for report in seen["reports_2"])


def test_a_refusal_leaves_every_rank_on_its_version(seen: dict[str, Any]) -> None:
    for refusal in seen["refusals"]:
        assert refusal["error"] != "none"
        assert refusal["state_hash"] == seen["published"][1]
    assert seen["after_refusals"] == seen["version_2"]


def test_a_forged_delta_is_passed_or_refused_by_every_rank(seen: dict[str, Any]) -> None:
    """Ranks of tensors find it together, by the trainer's sums; the others each by a digest."""
    assert seen["version_5"] == seen["version_1"]
    assert any(report["from_full"] for report in seen["reports_5"])
    error = seen["forged"]["error"]
    assert "would not be the published" in error or "differs from the published" in error
    assert seen["forged"]["state_hash"] == seen["published"][4]
    assert seen["after_forged"] == seen["version_5"]


def test_cut_tensors_are_verified_with_the_trainer_s_sums(seen: dict[str, Any]) -> None:
    """A pipeline's ranks cut none."""
    for version in (1, 2, 4, 5):
        sums = [report["sums"] for report in seen[f"reports_{version}"]]
        assert all((each["unseen"], each["refused"]) == (0, 0) for each in sums)
        assert len({each["verified"] > 0 for each in sums}) == 1
    assert all(report["from_full"] for report in seen["reports_5"]) or not sums[0]["verified"]
    refused = [report["sums"]["refused"] for report in seen["reports_forged"]]
    assert refused == [int(sums[0]["verified"] > 0)] * 2


def test_ranks_that_parted_meet_on_the_published_state(seen: dict[str, Any]) -> None:
    """One had weights changed by another writer and failed alone, the other one took the
    version."""
    assert "this rank has no store" in seen["half"]["error"]
    assert seen["half"]["state_hash"] == seen["published"][3]
    assert seen["version_4"] == seen["fresh"]
