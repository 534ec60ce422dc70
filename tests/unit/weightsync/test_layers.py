"""Models whose layers derive something from their weights are refused at start."""

import pytest
import torch

from harvester.contracts.errors import Unsupported
from weightsync.vllm.layers import check_layers


class UnquantizedLinearMethod:
    """Named as vLLM's own."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


class Fp8LinearMethod(UnquantizedLinearMethod):
    """Requantises after loading."""


class MLAAttention(torch.nn.Module):
    """Keeps decompressed copies of its weights."""


def _model(method: object, *, attention: torch.nn.Module | None = None) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = method  # type: ignore[assignment]
    return torch.nn.ModuleDict({"proj": layer, "attention": attention or torch.nn.Identity()})


def test_plain_layers_are_taken() -> None:
    check_layers(_model(UnquantizedLinearMethod()))


def test_a_quantised_layer_is_named() -> None:
    with pytest.raises(Unsupported, match=r"layer proj \(Linear, Fp8LinearMethod\) repacks"):
        check_layers(_model(Fp8LinearMethod()))


def test_an_attention_layer_with_derived_weights_is_named() -> None:
    with pytest.raises(Unsupported, match="layer attention"):
        check_layers(_model(UnquantizedLinearMethod(), attention=MLAAttention()))
