"""A rank with some layers or experts only follows a store to the weights it would load itself.

vLLM's own models are built for each rank in one child process, without an engine.
"""

from typing import Any

import pytest

from tests.integration.weightsync_child import run_child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

EACH_RANK = pytest.mark.parametrize("rank", [0, 1])
LAYER_OF_RANK = ("model.layers.0.", "model.layers.1.")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The child's report."""
    pytest.importorskip("vllm")
    return run_child("tests.integration.weightsync_rank_models", tmp_path_factory.mktemp("ranks"))


@EACH_RANK
@pytest.mark.parametrize("split", ["layers", "experts", "latent"])
def test_each_rank_ends_on_what_its_own_loader_makes_of_the_state(
    seen: dict[str, Any], split: str, rank: int
) -> None:
    """Every parameter, derived forms of experts included, after a full version and a delta."""
    of_rank = seen[f"{split}_{rank}"]
    assert of_rank["partial"]
    assert of_rank["differing"] == [[], []]
    for report, state_hash in zip(of_rank["reports"], seen["published"][split], strict=True):
        assert report["in_place"]
        assert report["state_hash"] == state_hash
    assert [report["from_full"] for report in of_rank["reports"]] == [True, False]


@EACH_RANK
def test_latent_attention_that_computes_from_copies_of_its_weight_is_named(
    seen: dict[str, Any], rank: int
) -> None:
    refused = seen[f"copies_{rank}"]
    layer = refused.pop("layer")
    assert f"{layer}.W_UK_T" in seen[f"latent_{rank}"]["held"]
    assert refused.keys() == {"W_UV", "W_UK_T", "W_UK_T_dcp_qrep"}
    for message in refused.values():
        assert message.startswith(f"Unsupported: backend rosemux: layer {layer} (MLAAttention")


@EACH_RANK
def test_ranks_of_a_pipeline_hold_their_own_layers(seen: dict[str, Any], rank: int) -> None:
    held = seen[f"layers_{rank}"]["held"]
    assert any(name.startswith(LAYER_OF_RANK[rank]) for name in held)
    assert not any(name.startswith(LAYER_OF_RANK[1 - rank]) for name in held)


def test_a_head_that_no_rank_has_a_place_for_is_noticed_by_the_rank_that_should(
    seen: dict[str, Any],
) -> None:
    """The engine's head is tied to its embedding, the trainer's is not."""
    assert seen["untied_0"] == "none"
    assert "this engine has no place for lm_head.weight" in seen["untied_1"]
