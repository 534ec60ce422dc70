"""Every rank of a tensor-parallel engine follows a store, experts included.

The engines run in one child process (see test_weightsync_vllm.py) with a worker process per rank.
"""

from typing import Any

import pytest

from tests.integration.weightsync_child import run_child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the child saw."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("parallel")
    return run_child("tests.integration.weightsync_parallel_engine", root)


def test_ranks_that_followed_sample_as_ranks_that_loaded(seen: dict[str, Any]) -> None:
    assert seen["version_1"]["logprobs"] != seen["fresh"]["logprobs"]
    assert seen["version_2"] == seen["fresh"]


def test_each_rank_tells_the_published_state(seen: dict[str, Any]) -> None:
    for version, state_hash in enumerate(seen["published"], start=1):
        reports = seen[f"reports_{version}"]
        assert len(reports) == 2
        assert all(report["state_hash"] == state_hash for report in reports)
        assert all(report["from_full"] == (version == 1) for report in reports)
