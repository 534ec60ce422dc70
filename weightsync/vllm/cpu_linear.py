"""Keeps linear weights writable on a CPU, where vLLM packs each one at load and drops the original.

One upstream function packs every linear layer and every output head. For engines with RoseMux's
backend only, it is replaced by one that keeps the plain weight: eager engines get vLLM's packed
copy beside it, remade from the changed weight, so that they run at stock speed; compiled engines
compute from the plain weight, because a packed copy is a constant in their graph.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from harvester.contracts.errors import Unsupported
from weightsync.vllm.layers import own_layers

_logger = logging.getLogger("vllm.rosemux.weightsync")
_PACKED = "rosemux_packed"
_ORIGINAL = "rosemux_original"
_COMPUTE = "cpu_linear"
_SYMBOL = "dispatch_cpu_unquantized_gemm"

PackedForm: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The function by which a layer computes; it holds the packed weight."""


def install(backend: str) -> None:
    """Replace vLLM's packing function, for engines with our backend only. Idempotent."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    original: Callable[[torch.nn.Module, bool], None] | None = getattr(utils, _SYMBOL, None)
    if original is None:
        _logger.warning("this vLLM packs CPU weights in a form unknown to %r", backend)
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
    """Raises Unsupported if weights were packed before they could be kept."""
    from vllm.model_executor.layers import utils

    if not hasattr(getattr(utils, _SYMBOL, None), _ORIGINAL):
        raise Unsupported(
            "linear weights on this CPU cannot be changed in place: the rosemux_weightsync plugin "
            "did not run (is VLLM_PLUGINS set without it?) or this vLLM packs them another way"
        )


def packed_layers(model: torch.nn.Module) -> dict[int, list[Any]]:
    """The layers that compute from a packed copy, by the storage address of their plain weight."""
    found: dict[int, list[Any]] = defaultdict(list)
    for _, layer in own_layers(model):
        if getattr(layer, _PACKED, False):
            found[_address(layer)].append(layer)
    return dict(found)


def packed_form(layer: Any, weight: torch.Tensor) -> PackedForm:
    """The packed copy that `layer` would have of another weight; the layer is unchanged."""
    stand_in = SimpleNamespace(
        weight=torch.nn.Parameter(weight, requires_grad=False), bias=getattr(layer, "bias", None)
    )
    _original()(stand_in, False)
    form: PackedForm = getattr(stand_in, _COMPUTE)
    return form


def put_in_force(forms: Mapping[Any, PackedForm]) -> list[PackedForm]:
    """Install prepared packed copies in layers; returns the copies that they replace.

    Freeing a copy takes as long as writing it, so callers keep the old ones until after the pause.
    """
    replaced = [getattr(layer, _COMPUTE) for layer in forms]
    for layer, form in forms.items():
        setattr(layer, _COMPUTE, form)
    return replaced


def repack(layers: Iterable[Any], touched: Collection[int], pool: Executor) -> int:
    """Repack the layers whose weights' storages are `touched`; returns their number."""
    stale = [layer for layer in layers if _address(layer) in touched]
    list(pool.map(lambda layer: _original()(layer, False), stale))
    return len(stale)


def _original() -> Callable[[Any, bool], None]:
    from vllm.model_executor.layers import utils

    original: Callable[[Any, bool], None] = getattr(getattr(utils, _SYMBOL), _ORIGINAL)
    return original


def _address(layer: Any) -> int:
    address: int = layer.weight.untyped_storage().data_ptr()
    return address
