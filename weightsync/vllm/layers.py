"""Classifies layers: those that compute directly from checkpoint weights, and those whose derived
form can be remade from the loaded weights.

Any other layer would go on computing from an old derived form while the state hash says otherwise,
so models with such layers are refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
"""Methods whose output was compared with a fresh engine's, token for token."""
_LATENT_ATTENTION = "MLAAttention"
_ABSORBED_FORMS = ("W_UK_T", "W_UV")
"""Factors of the weight of latent attention's `kv_b_proj`, by which its steps compute."""
_GATHERED_FORM = "W_UK_T_dcp_qrep"
_HARMLESS_HOOKS = frozenset({"Attention", "MMEncoderAttention", "QuantizeMethodBase"})
"""Classes whose processing after loading makes nothing of the layer's own weights."""
_STATIC_SINKS = "StaticSinkAttention"
"""Writes keys and values made of its weights into the KV cache, once."""
_CASTING_ATTENTION = "CPUAttentionBackendImpl"
"""Takes a copy of half-precision sinks in its first step."""
_SINKS_SOURCE = "_sinks_source"
"""Attribute of backends whose hook makes their form of attention sinks again."""
_ADAPTED_EXPERTS = frozenset({"FusedMoEWithLoRA", "FusedMoE3DWithLoRA"})
_TRITON_EXPERTS = "TritonExperts"
_REPACKED_CONVOLUTION = "_cpu_unpacked_conv_weight"
_PROCESS = "process_weights_after_loading"
_WRAPPED = "base_layer"
"""vLLM's name for the layer inside a LoRA wrapper."""


def check_layers(model: torch.nn.Module) -> None:
    """Raises Unsupported naming the first layer whose derived form cannot be remade."""
    check_sinks(model)
    for name, layer in own_layers(model):
        if not (_is_plain(layer) or _is_derived(layer)):
            method = type(getattr(layer, "quant_method", None)).__name__
            raise Unsupported(
                f"backend rosemux: layer {name or 'model'} ({type(layer).__name__}, {method}) "
                "derives a form of its weights that cannot be made again; supported are models "
                "that are unquantised, or quantised by the engine at load with fp8_per_block or "
                "int8_per_channel_weight_only; latent attention if its kv_b_proj is not quantised, "
                "on a CPU with AMX by --attention-backend CPU_MLA"
            )


def check_sinks(model: torch.nn.Module) -> None:
    """Raises Unsupported if attention computes from a copy of its sinks that nothing refreshes.
    Such a copy may be made by the first step."""
    held = storages_of(model)
    for name, layer in own_layers(model):
        impl = getattr(layer, "impl", None)
        sinks = getattr(impl, _SINKS_SOURCE, getattr(impl, "sinks", None))
        if not isinstance(sinks, torch.Tensor):
            continue
        is_cast = type(impl).__name__ == _CASTING_ATTENTION and sinks.dtype == torch.float16
        if is_cast or sinks.untyped_storage().data_ptr() not in held:
            raise Unsupported(
                f"backend rosemux: {name} ({type(impl).__name__}) computes from a copy of its "
                "attention sinks that cannot be made again: use --dtype bfloat16 on a CPU, or "
                "another --attention-backend"
            )


def refresh_sinks(model: torch.nn.Module, act_dtype: Any) -> None:
    """Make the form of attention sinks that some backends compute from again."""
    for _, layer in own_layers(model):
        impl: Any = getattr(layer, "impl", None)
        if getattr(impl, _SINKS_SOURCE, None) is not None:
            impl.process_weights_after_loading(act_dtype)


def check_experts_beside_adapters(model: torch.nn.Module, *, has_triton: bool) -> None:
    """Raises Unsupported for experts that engines with LoRA adapters cannot update.

    `has_triton`: whether this vLLM has Triton's kernels.
    """
    for name, layer in model.named_modules():
        if type(layer).__name__ in _ADAPTED_EXPERTS:
            raise Unsupported(
                f"backend rosemux: {name} are experts that take LoRA adapters; their method is "
                "another one then, and its form of the weights was never compared with a fresh "
                "engine's. Name the layers that adapters train in --lora-target-modules, without "
                "experts"
            )
        experts = getattr(getattr(layer, "quant_method", None), "experts_cls", None)
        if not has_triton and getattr(experts, "__name__", "") == _TRITON_EXPERTS:
            raise Unsupported(
                f"backend rosemux: with --enable-lora this vLLM computes {name} by Triton's "
                "kernels, which it does not have (no CPU build has): its first step would fail"
            )


def derived_layers(model: torch.nn.Module) -> list[Any]:
    """The layers that compute from a form derived from their weights after loading."""
    return [layer for _, layer in own_layers(model) if _is_derived(layer)]


def own_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers by name, without vLLM's LoRA wrappers, which forward their layer's attributes."""
    for name, layer in model.named_modules():
        if _WRAPPED not in dict(layer.named_children()):
            yield name, layer


def plain_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name, without those of derived layers and of layers that
    set their own tensors after loading, such as attention its scales."""
    for layer_name, layer in own_layers(model):
        if _is_derived(layer) or hasattr(layer, _PROCESS):
            continue
        buffers = dict(layer.named_buffers(recurse=False))
        for name in layer._non_persistent_buffers_set:
            buffers.pop(name, None)
        for name, held in (buffers | dict(layer.named_parameters(recurse=False))).items():
            if held.numel():
                yield f"{layer_name}.{name}" if layer_name else name, held


def storages_of(model: torch.nn.Module) -> set[int]:
    """Addresses of the storages that hold the model's parameters."""
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


@contextmanager
def unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model has its original layers, as loaders of most versions need."""
    wrappers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name != _WRAPPED and _WRAPPED in dict(child.named_children())
    ]
    for parent, name, wrapper in wrappers:
        setattr(parent, name, wrapper.get_submodule(_WRAPPED))
    try:
        yield
    finally:
        for parent, name, wrapper in wrappers:
            setattr(parent, name, wrapper)


def _is_plain(layer: Any) -> bool:
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    if hasattr(layer, _REPACKED_CONVOLUTION) or _STATIC_SINKS in kinds:
        return False
    if _LATENT_ATTENTION in kinds:
        return _absorbs_in_place(layer)
    if hasattr(layer, _PROCESS) and kinds.isdisjoint(_HARMLESS_HOOKS):
        return False
    return not _processes(layer) or type(layer.quant_method).__name__ in _PLAIN_METHODS


def _absorbs_in_place(layer: Any) -> bool:
    """Whether latent attention computes from views of its projection's weight, which follow it.
    Quantised projections, AMX, ROCm's kernels and gathered queries need copies."""
    weight = getattr(getattr(layer, "kv_b_proj", None), "weight", None)
    held = [weight, *(getattr(layer, name, None) for name in _ABSORBED_FORMS)]
    tensors = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
    if len(tensors) < len(held) or getattr(layer, _GATHERED_FORM, None) is not None:
        return False
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def _is_derived(layer: Any) -> bool:
    return _processes(layer) and type(layer.quant_method).__name__ in _DERIVED_METHODS


def _processes(layer: Any) -> bool:
    return hasattr(getattr(layer, "quant_method", None), _PROCESS)
