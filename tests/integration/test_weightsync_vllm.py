"""A real vLLM follows a store: dummy weights, anchor, deltas, another job, and every refusal.

The engines run in one child process (engine cores in-process), because an engine leaves threads and
global state behind. The child reports as JSON; the tests here judge it.
"""

from typing import Any

import pytest

from tests.integration.weightsync_child import run_child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The child's report."""
    pytest.importorskip("vllm")
    return run_child("tests.integration.weightsync_engine", tmp_path_factory.mktemp("weightsync"))


def test_an_engine_with_dummy_weights_joins_from_a_full_version(seen: dict[str, Any]) -> None:
    assert seen["dummy"]["tokens"] != seen["version_1"]["tokens"]
    assert seen["report_1"]["from_full"]
    assert seen["report_1"]["in_place"]


@pytest.mark.parametrize("version", ["version_1", "version_4"])
def test_a_synced_engine_samples_exactly_as_a_fresh_one(seen: dict[str, Any], version: str) -> None:
    """Tokens and log-probabilities are equal bit for bit, packed layers included."""
    assert seen[version] == seen[f"fresh_{version}"]


def test_deltas_change_what_is_generated(seen: dict[str, Any]) -> None:
    assert seen["version_1"]["logprobs"] != seen["version_4"]["logprobs"]
    assert not seen["report_4"]["from_full"]
    assert seen["report_4"]["bytes_read"] < seen["report_1"]["bytes_read"] / 2


def test_the_reported_state_is_the_published_one(seen: dict[str, Any]) -> None:
    for version in (1, 4):
        report = seen[f"report_{version}"]
        assert report["store"] == "job-a"
        assert report["version"] == version
        assert report["state_hash"] == seen["published"][version - 1]


def test_an_engine_samples_on_with_its_old_weights_while_the_next_are_staged(
    seen: dict[str, Any],
) -> None:
    staging = seen["staging"]
    assert staging["told"]["last"] == {"state": "ready", "message": ""}
    assert staging["unchanged"]
    assert staging["report"]["state_hash"] == seen["published"][1]
    assert not staging["report"]["from_full"]


def test_staging_says_why_it_failed(seen: dict[str, Any]) -> None:
    told = seen["staging"]["unpublished"]["last"]
    assert told["state"] == "failed"
    assert "version 9 is not published yet" in told["message"]


def test_weights_that_were_touched_are_found_before_the_pause_and_replaced_whole(
    seen: dict[str, Any],
) -> None:
    assert seen["report_damaged"]["from_full"]
    assert seen["report_damaged"]["reapplied"] == seen["report_torn"]["reapplied"] + 1
    assert seen["damaged"] == seen["version_4"]


def test_a_torn_apply_is_repaired_from_a_full_version(seen: dict[str, Any]) -> None:
    assert seen["report_torn"]["from_full"]
    assert seen["report_torn"]["state_hash"] == seen["published"][4]


def test_a_switch_to_another_job_and_back_is_exact(seen: dict[str, Any]) -> None:
    assert seen["report_other"]["store"] == "job-b"
    assert seen["other"]["tokens"] != seen["version_4"]["tokens"]
    assert seen["other"] == seen["fresh_other"]
    assert seen["back"] == seen["version_4"]


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ("unpublished", "not published yet; the newest is 6"),
        ("older", "older than version 4"),
        ("path", "use 1 to 64 letters"),
        ("unknown_store", "no weight store at"),
        ("other_hash", "the caller expects"),
        ("broken_payload", "digest is not the published one"),
        ("unknown_field", "Invalid update_info"),
    ],
)
def test_an_unloadable_version_is_an_error_and_changes_nothing(
    seen: dict[str, Any], refusal: str, message: str
) -> None:
    assert message in seen["refusals"][refusal]["error"]
    assert seen["refusals"][refusal]["state_hash"] == seen["published"][3]


def test_packing_again_keeps_the_speed_of_a_fresh_engine(seen: dict[str, Any]) -> None:
    """A loose bound: without packing the engine is a fifth to a third slower."""
    assert seen["tokens_per_s"]["synced"] > 0.6 * seen["tokens_per_s"]["fresh"]
