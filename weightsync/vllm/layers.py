"""Which layers may be changed in place: those that keep their weights as the checkpoint has them.

A layer that derives something from its weights after loading (quantised, fused experts, MLA) would
go on computing from the old derivation while the state hash says otherwise, so such models are
refused.
"""

import torch

from harvester.contracts.errors import Unsupported

_PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
_DERIVING_LAYERS = frozenset({"MLAAttention", "MultiHeadLatentAttentionWrapper", "FusedMoE"})


def check_layers(model: torch.nn.Module) -> None:
    """Raises Unsupported naming the first layer that derives anything from its weights."""
    for name, layer in model.named_modules():
        kind = type(layer).__name__
        method = getattr(layer, "quant_method", None)
        processed = hasattr(method, "process_weights_after_loading")
        if kind in _DERIVING_LAYERS or (processed and type(method).__name__ not in _PLAIN_METHODS):
            raise Unsupported(
                f"backend rosemux: layer {name} ({kind}, {type(method).__name__}) repacks its "
                "weights after loading; dense unquantised models are supported so far"
            )
