"""A real vLLM with LoRA follows a store of adapters, each on the base that it was trained on.

The engines run in one child process (see test_weightsync_vllm.py).
"""

from typing import Any

import pytest

from tests.integration.weightsync_child import run_child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The child's report."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("adapter")
    return run_child("tests.integration.weightsync_adapter_engine", root)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_adapter_that_follows_a_store_samples_as_the_one_that_peft_saved(
    seen: dict[str, Any], version: int
) -> None:
    """Tokens and log-probabilities are equal bit for bit."""
    assert seen[f"followed_{version}"] == seen[f"stock_{version}"]
    assert seen[f"followed_{version}"]["tokens"] != seen[f"base_{version}"]["tokens"]


def test_each_version_differs_and_reports_its_state_and_its_base(seen: dict[str, Any]) -> None:
    assert seen["followed_1"]["logprobs"] != seen["followed_2"]["logprobs"]
    for version, base in ((1, 1), (2, 1), (3, 2)):
        report = seen[f"report_{version}"]
        assert (report["store"], report["version"]) == ("job-a", base)
        assert report["state_hash"] == seen["published"]["bases"][base - 1]
        told = report["adapters"]["policy"]
        assert (told["store"], told["version"]) == ("job-a-lora", version)
        assert told["state_hash"] == seen["published"]["adapters"][version - 1]
    assert not seen["report_2"]["adapters"]["policy"]["from_full"]


def test_an_adapter_brings_its_base_exactly(seen: dict[str, Any]) -> None:
    """Requests that name no adapter sample as a fresh engine with the base of its version."""
    assert seen["base_1"] == seen["base_2"] == seen["fresh"][0]
    assert seen["base_3"] == seen["fresh"][1]


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ("base", "is not the base of adapter policy"),
        ("nameless", "give the name that requests ask for it by"),
        ("large", "LoRA rank 16 is greater than max_lora_rank 8"),
    ],
)
def test_an_unsupported_adapter_is_refused_and_changes_nothing(
    seen: dict[str, Any], refusal: str, message: str
) -> None:
    assert message in seen["refusals"][refusal]["error"]
    assert seen["refusals"][refusal]["state_hash"] == seen["published"]["bases"][1]
    assert seen["after_refusals"] == seen["followed_3"]


@pytest.mark.parametrize(
    ("staged", "message"),
    [
        ("base", "ConfigError: job-a version 3 is not the base of adapter policy"),
        ("older", "Stale: the adapter's base, job-a version 1, is older than version 2 of that"),
    ],
)
def test_a_version_whose_base_would_be_refused_is_refused_before_any_pause(
    seen: dict[str, Any], staged: str, message: str
) -> None:
    told = seen["staged"][staged]
    assert (told["state"], message in told["message"]) == ("failed", True), told
    assert "or restart the engine to serve another base" in told["message"]


def test_a_server_takes_names_of_adapters_in_force_only(seen: dict[str, Any]) -> None:
    assert seen["resolved"]["policy"] == "taken"
    assert "no version of adapter stranger is in force" in seen["resolved"]["stranger"]
