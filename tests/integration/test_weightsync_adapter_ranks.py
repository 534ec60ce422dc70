"""Ranks of a tensor-parallel engine follow a store of adapters; engines of experts refuse to.

The engine runs in one child process (see test_weightsync_vllm.py) with a worker process per rank.
"""

from typing import Any

import pytest

from tests.integration.weightsync_child import run_child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The child's report."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("adapter-ranks")
    return run_child("tests.integration.weightsync_adapter_ranks_engine", root)


def test_ranks_that_follow_adapters_sample_as_those_that_loaded_peft_files(
    seen: dict[str, Any],
) -> None:
    """Tokens and log-probabilities are equal bit for bit."""
    for version in (1, 2, 3):
        assert seen[f"followed_{version}"] == seen[f"stock_{version}"]
        assert seen[f"followed_{version}"]["logprobs"] != seen[f"base_{version}"]["logprobs"]
    assert seen["followed_1"]["logprobs"] != seen["followed_2"]["logprobs"]


def test_every_rank_reports_the_adapter_and_the_base_that_it_brought(seen: dict[str, Any]) -> None:
    for version, base in ((1, 1), (2, 1), (3, 2)):
        reports = seen[f"reports_{version}"]
        assert len(reports) == 2
        for report in reports:
            assert (report["version"], report["state_hash"]) == (base, seen["bases"][base - 1])
            assert report["adapters"]["policy"]["version"] == version
    assert seen["base_1"] == seen["base_2"] != seen["base_3"]


def test_an_adapter_that_would_be_applied_in_part_is_refused_and_changes_nothing(
    seen: dict[str, Any],
) -> None:
    assert "where this engine takes none" in seen["stray"]["error"]
    assert seen["stray"]["state_hash"] == seen["bases"][1]
    assert seen["after_stray"] == seen["followed_3"]


def test_an_engine_of_experts_that_takes_adapters_is_refused_at_start(seen: dict[str, Any]) -> None:
    """vLLM's CPU build would start, and die at its first step."""
    assert "Triton's kernels, which it does not have" in seen["experts"]
