"""A real vLLM follows the stores of slime and miles as their trainers leave them.

The engines run in one child process (see test_weightsync_vllm.py). With FOREIGN_TRAINERS set to a
directory of checkouts, the trainers' own code writes the stores, stitch's and SkyRL's too.
"""

import os
from typing import Any

import pytest

from tests.integration.weightsync_child import run_child

TIMEOUT_S = 900 if "FOREIGN_TRAINERS" in os.environ else 400
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TIMEOUT_S + 20)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The child's report."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("foreign")
    return run_child("tests.integration.weightsync_foreign_engine", root, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("version", ["2", "3"])
def test_it_samples_a_version_as_an_engine_of_the_full_checkpoint(
    seen: dict[str, Any], version: str
) -> None:
    assert {"slime", "miles"} <= set(seen["stores"])
    for store in seen["stores"]:
        assert seen[store][version]["generated"] == seen["fresh"][version], store


def test_its_versions_differ(seen: dict[str, Any]) -> None:
    first, *others = (seen["slime"][version]["generated"] for version in ("1", "2", "3"))
    assert first["logprobs"] != others[0]["logprobs"] != others[1]["logprobs"]


def test_it_takes_the_first_version_from_its_own_model_and_the_others_by_deltas(
    seen: dict[str, Any],
) -> None:
    for store in seen["stores"]:
        reports = [seen[store][version]["report"] for version in ("1", "2", "3")]
        assert [report["from_full"] for report in reports] == [True, False, False]
        assert all(report["in_place"] for report in reports)
        assert reports[2]["bytes_read"] < reports[0]["bytes_read"] / 2


def test_a_broken_version_leaves_the_previous_one_in_force(seen: dict[str, Any]) -> None:
    assert "not the xxh3-128 checksum that was published" in seen["refused"]["error"]
    assert seen["after_refusal"] == seen["fresh"]["2"]
    assert seen["repaired"] == seen["fresh"]["3"]
