"""Keeps linear weights writable on a CPU, where vLLM packs each one at load and drops the original.

One upstream function packs every linear layer and every output head. In its place, for engines
with our backend only, stands one that keeps the plain weight: eager engines get vLLM's packed copy
beside it, and `repack` makes that copy again from the changed weight, so that they run as fast as
without us; compiled engines compute from the plain weight, because a packed copy is a constant in
their graph.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

import torch

from harvester.contracts.errors import Unsupported

_logger = logging.getLogger("vllm.rosemux.weightsync")
_PACKED = "rosemux_packed"
_ORIGINAL = "rosemux_original"
_COMPUTE = "cpu_linear"
_SYMBOL = "dispatch_cpu_unquantized_gemm"


def install(backend: str) -> None:
    """Puts our function in the place of vLLM's; a second call changes nothing.

    Engines whose `weight_transfer_config` names another backend, or none, are left as they are.
    """
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    original: Callable[[torch.nn.Module, bool], None] | None = getattr(utils, _SYMBOL, None)
    if original is None:
        _logger.warning("this vLLM packs CPU weights in a way that %r does not know", backend)
        return
    if hasattr(original, _ORIGINAL):
        return

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()
        transfer = config.weight_transfer_config if config is not None else None
        if transfer is None or transfer.backend != backend:
            original(layer, remove_weight)
        elif config.model_config.enforce_eager:
            original(layer, False)
            setattr(layer, _PACKED, True)
        else:
            setattr(layer, _COMPUTE, torch.nn.functional.linear)

    setattr(dispatch, _ORIGINAL, original)
    setattr(utils, _SYMBOL, dispatch)


def check_installed() -> None:
    """Raises Unsupported where weights were packed before we could keep them."""
    from vllm.model_executor.layers import utils

    if not hasattr(getattr(utils, _SYMBOL, None), _ORIGINAL):
        raise Unsupported(
            "linear weights on this CPU cannot be changed in place: the rosemux_weightsync plugin "
            "did not run (is VLLM_PLUGINS set without it?) or this vLLM packs them another way"
        )


def repack(model: torch.nn.Module, touched: Collection[int]) -> int:
    """Packs the changed layers again; returns how many.

    `touched`: storage addresses of the changed weights.
    """
    from vllm.model_executor.layers import utils

    original: Any = getattr(getattr(utils, _SYMBOL, None), _ORIGINAL, None)
    packed: list[Any] = [layer for layer in model.modules() if getattr(layer, _PACKED, False)]
    layers = [layer for layer in packed if layer.weight.untyped_storage().data_ptr() in touched]
    for layer in layers:
        original(layer, False)
    return len(layers)
