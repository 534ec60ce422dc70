"""Which layers can follow a store: those that compute from their weights as a checkpoint has them,
and those whose derived form can be made again from the weights that were loaded.

Any other layer would go on computing from what it once derived while the state hash says otherwise,
so such models are refused.
"""

from typing import Any

import torch

from harvester.contracts.errors import Unsupported

_PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
_DERIVED_METHODS = frozenset(
    {
        "UnquantizedFusedMoEMethod",
        "Int8OnlineMoEMethod",
        "Fp8PerBlockOnlineMoEMethod",
        "Fp8PerBlockOnlineLinearMethod",
    }
)
"""Each of them has been compared with a fresh engine, token for token."""
_REFUSED_LAYERS = frozenset({"MLAAttention", "MultiHeadLatentAttentionWrapper"})
_REPACKED_CONVOLUTION = "_cpu_unpacked_conv_weight"


def check_layers(model: torch.nn.Module) -> None:
    """Raises Unsupported naming the first layer whose derived form we cannot make again."""
    for name, layer in model.named_modules():
        if not (_is_plain(layer) or _is_derived(layer)):
            method = type(getattr(layer, "quant_method", None)).__name__
            raise Unsupported(
                f"backend rosemux: layer {name} ({type(layer).__name__}, {method}) derives a form "
                "of its weights that cannot be made again; supported are models without latent "
                "attention, experts included, unquantised or quantised by the engine at load with "
                "fp8_per_block or int8_per_channel_weight_only"
            )


def derived_layers(model: torch.nn.Module) -> list[Any]:
    """The layers that compute from a form that is made of their weights after loading."""
    return [layer for layer in model.modules() if _is_derived(layer)]


def _is_plain(layer: Any) -> bool:
    if type(layer).__name__ in _REFUSED_LAYERS or hasattr(layer, _REPACKED_CONVOLUTION):
        return False
    return not _processes(layer) or type(layer.quant_method).__name__ in _PLAIN_METHODS


def _is_derived(layer: Any) -> bool:
    return _processes(layer) and type(layer.quant_method).__name__ in _DERIVED_METHODS


def _processes(layer: Any) -> bool:
    return hasattr(getattr(layer, "quant_method", None), "process_weights_after_loading")
