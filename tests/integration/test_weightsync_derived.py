"""Layers that compute from a derived form of their weights follow a store like a fresh engine.

The engines run in one child process (see test_weightsync_vllm.py).
"""

from typing import Any

import pytest
import torch

from tests.integration.weightsync_child import run_child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

NEEDS_AMX = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="vLLM's CPU kernels of quantised experts need AMX",
)


@pytest.fixture(
    scope="module",
    params=[
        "none",
        "latent",
        "further",
        pytest.param("int8_per_channel_weight_only", marks=NEEDS_AMX),
        pytest.param("fp8_per_block", marks=NEEDS_AMX),
    ],
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The child's report with one way of quantising at load, or with latent attention, also from a
    checkpoint with a layer that the engine leaves out, which vLLM's own loader then passes on."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("derived")
    return run_child("tests.integration.weightsync_derived_engine", root, request.param)


def test_an_engine_samples_exactly_as_a_fresh_one(seen: dict[str, Any]) -> None:
    """Tokens and log-probabilities, after a full version and after deltas."""
    assert seen["first"]["logprobs"] != seen["second"]["logprobs"]
    assert seen["dummy"]["tokens"] != seen["first"]["tokens"]
    assert seen["version_1"] == seen["first"]
    assert seen["version_2"] == seen["second"]
    assert seen["version_3"] == seen["first"]


def test_the_hash_is_of_the_published_state_under_any_quantisation(
    seen: dict[str, Any],
) -> None:
    for version, state_hash in enumerate(seen["published"], start=1):
        report = seen[f"report_{version}"]
        assert report["state_hash"] == state_hash
        assert report["in_place"] == (seen["kind"] != "further")
        assert report["from_full"] == (version == 1)
