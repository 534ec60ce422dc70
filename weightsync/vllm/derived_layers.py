"""Layers that compute from a form derived from their weights, such as shuffled or packed experts.

The weights as loaded are kept beside the derived form: these are changed, read back and hashed, and
from them vLLM's own processing remakes the derived form, in the storage that the engine computes
from. Costs one copy of these layers' weights.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.vllm.loader_trace import plain_copies

_PROCESS = "process_weights_after_loading"
_KERNEL = "moe_kernel"
_DONE = "_already_called_process_weights_after_loading"


@dataclass(frozen=True, slots=True)
class _LoadedParameter:
    """A parameter as loaded, before vLLM processed it."""

    tensor: torch.Tensor
    kind: type[torch.Tensor]
    attributes: dict[str, Any]

    def copy(self) -> torch.Tensor:
        fresh = self.tensor.clone()
        fresh.__class__ = self.kind
        fresh.__dict__ = dict(self.attributes)
        return fresh


class DerivedLayers:
    """Derived layers of one model. `layers`: modules with vLLM's `quant_method`."""

    def __init__(self, layers: Sequence[Any], model_config: Any) -> None:
        self._layers = layers
        self._model_config = model_config
        self._loaded: dict[Any, dict[str, _LoadedParameter]] = {}

    @property
    def exist(self) -> bool:
        return bool(self._layers)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which the layers take weights as at start, and keep them as loaded."""
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        self._loaded.clear()
        with ExitStack() as kept:
            for layer in self._layers:
                kept.enter_context(_before_processing(layer, self._keep))
                _forget_kernel(layer)
                initialize_layerwise_reload(layer)
            yield
            for layer in self._layers:
                finalize_layerwise_reload(layer, self._model_config)

    def storages(self) -> set[int]:
        """Storage addresses of the weights as loaded."""
        return {storage for layer in self._loaded for storage in self._storages(layer)}

    def derive(self, touched: Collection[int]) -> int:
        """Remake the derived form of layers whose loaded weights changed; returns their number."""
        stale = [layer for layer in self._loaded if not self._storages(layer).isdisjoint(touched)]
        for layer in stale:
            self._derive(layer)
        return len(stale)

    def _keep(self, layer: Any) -> None:
        self._loaded[layer] = {
            name: _LoadedParameter(parameter.data, type(parameter), dict(parameter.__dict__))
            for name, parameter in layer.named_parameters(recurse=False)
        }

    def _storages(self, layer: Any) -> set[int]:
        return {kept.tensor.untyped_storage().data_ptr() for kept in self._loaded[layer].values()}

    def _derive(self, layer: Any) -> None:
        in_use = dict(layer.named_parameters(recurse=False))
        for name in in_use:
            delattr(layer, name)
        for name, kept in self._loaded[layer].items():
            layer.register_parameter(name, kept.copy())
        _forget_kernel(layer)
        layer.quant_method.process_weights_after_loading(layer)
        made = dict(layer.named_parameters(recurse=False))
        for name in made:
            delattr(layer, name)
        for name, parameter in in_use.items():
            # The engine, and on a GPU its recorded graphs, refer to this storage.
            parameter.data.copy_(made[name].data)
            layer.register_parameter(name, parameter)


@contextmanager
def _before_processing(layer: Any, look: Callable[[Any], None]) -> Iterator[None]:
    """Context in which `look` sees the layer each time before it is processed."""
    method = layer.quant_method
    process = getattr(method, _PROCESS)

    def looked(layer: Any) -> None:
        look(layer)
        with plain_copies():
            process(layer)

    setattr(method, _PROCESS, looked)
    try:
        yield
    finally:
        delattr(method, _PROCESS)


def _forget_kernel(layer: Any) -> None:
    """Make the next processing complete: with its kernel set up, a CPU layer of experts takes the
    loaded weights as packed ones."""
    if hasattr(layer.quant_method, _KERNEL):
        setattr(layer.quant_method, _KERNEL, None)
    if hasattr(layer, _DONE):
        delattr(layer, _DONE)
