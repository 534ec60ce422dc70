"""Models whose layers derive something from their weights are refused at start."""

import pytest
import torch

from harvester.contracts.errors import Unsupported
from weightsync.vllm.layers import (
    check_experts_beside_adapters,
    check_layers,
    derived_layers,
    own_layers,
    unwrapped,
)


class UnquantizedLinearMethod:
    """Named as vLLM's own."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


class Fp8LinearMethod(UnquantizedLinearMethod):
    """Requantises after loading."""


class MLAAttention(torch.nn.Module):
    """Computes from factors of its projection's weight."""

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(4, 6)
        weight = self.kv_b_proj.weight.detach()
        self.W_UK_T, self.W_UV = weight[:2], weight[2:].clone() if copies else weight[2:]

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...


class DeepseekV32Attention(MLAAttention):
    """One of vLLM's subclasses."""


class Attention(torch.nn.Module):
    """vLLM's usual attention has the hook too, and no weights."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...


class Impl:
    """An attention backend. `sinks` may be another form of `source`."""

    def __init__(self, sinks: torch.Tensor, source: torch.Tensor | None = None) -> None:
        self.sinks = sinks
        if source is not None:
            self._sinks_source = source


class CPUAttentionBackendImpl(Impl):
    """Named as vLLM's own, whose first step widens half-precision sinks."""


class StaticSinkAttention(Attention):
    """Named as vLLM's own, whose sinks are rows of the KV cache."""


def with_sinks(
    kind: type[Impl] = Impl, dtype: torch.dtype = torch.bfloat16, **more: bool
) -> torch.nn.Module:
    attention = Attention()
    attention.sinks = torch.nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    copied = attention.sinks.to(torch.float32)
    if more.get("refreshed"):
        attention.impl = kind(copied, attention.sinks)
    else:
        attention.impl = kind(copied if more.get("copied") else attention.sinks)
    return attention


def test_attention_sinks_are_taken_where_updates_reach_what_steps_read() -> None:
    check_layers(with_sinks())
    check_layers(with_sinks(refreshed=True))
    check_layers(with_sinks(dtype=torch.float16))
    check_layers(with_sinks(CPUAttentionBackendImpl))


@pytest.mark.parametrize(
    "attention",
    [with_sinks(copied=True), with_sinks(CPUAttentionBackendImpl, torch.float16)],
    ids=["a copy", "a copy in the first step"],
)
def test_attention_that_computes_from_a_lasting_copy_of_its_sinks_is_refused(
    attention: torch.nn.Module,
) -> None:
    with pytest.raises(Unsupported, match="a copy of its attention sinks"):
        check_layers(torch.nn.ModuleDict({"attention": attention}))


def test_sinks_in_the_kv_cache_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"layer attention \(StaticSinkAttention"):
        check_layers(torch.nn.ModuleDict({"attention": StaticSinkAttention()}))


class DeepseekV4Model(torch.nn.Module):
    """Fuses weights of its layers once all are loaded."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def process_weights_after_loading(self) -> None: ...


def _model(method: object, *, attention: torch.nn.Module | None = None) -> torch.nn.ModuleDict:
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = method  # type: ignore[assignment]
    return torch.nn.ModuleDict({"proj": layer, "attention": attention or torch.nn.Identity()})


def test_plain_layers_are_taken() -> None:
    check_layers(_model(UnquantizedLinearMethod()))


def test_a_quantised_layer_is_named() -> None:
    with pytest.raises(Unsupported, match=r"layer proj \(Linear, Fp8LinearMethod\) derives"):
        check_layers(_model(Fp8LinearMethod()))


@pytest.mark.parametrize("kind", [MLAAttention, DeepseekV32Attention])
def test_latent_attention_is_taken_where_it_computes_from_the_weight_itself(
    kind: type[MLAAttention],
) -> None:
    check_layers(_model(UnquantizedLinearMethod(), attention=kind()))
    with pytest.raises(Unsupported, match=rf"layer attention \({kind.__name__}"):
        check_layers(_model(UnquantizedLinearMethod(), attention=kind(copies=True)))


@pytest.mark.parametrize("missing", ["W_UK_T", "W_UV", "kv_b_proj"])
def test_latent_attention_of_an_unknown_form_is_named(missing: str) -> None:
    attention = MLAAttention()
    delattr(attention, missing)
    with pytest.raises(Unsupported, match="layer attention"):
        check_layers(_model(UnquantizedLinearMethod(), attention=attention))


def test_a_model_that_processes_loaded_weights_by_itself_is_refused() -> None:
    plain = _model(UnquantizedLinearMethod(), attention=Attention())
    check_layers(plain)
    with pytest.raises(Unsupported, match=r"layer model \(DeepseekV4Model"):
        check_layers(DeepseekV4Model(plain))


class UnquantizedFusedMoEMethod(UnquantizedLinearMethod):
    """Packs experts after loading."""


def test_experts_are_accepted_and_marked_as_derived() -> None:
    model = _model(UnquantizedFusedMoEMethod())
    check_layers(model)
    assert derived_layers(model) == [model["proj"]]


def test_a_convolution_that_was_repacked_at_load_is_named() -> None:
    model = _model(UnquantizedLinearMethod())
    model["proj"]._cpu_unpacked_conv_weight = torch.zeros(1)
    with pytest.raises(Unsupported, match="layer proj"):
        check_layers(model)


class LoRAWrapper(torch.nn.Module):
    """Answers for the layer in it, as vLLM's do."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def __getattr__(self, name: str) -> object:
        if name in self.__dict__["_modules"]:
            return self.__dict__["_modules"][name]
        return getattr(self.__dict__["_modules"]["base_layer"], name)


def test_a_layer_that_is_wrapped_for_lora_counts_once() -> None:
    model = _model(UnquantizedFusedMoEMethod())
    layer = model["proj"]
    model["proj"] = LoRAWrapper(layer)
    check_layers(model)
    assert derived_layers(model) == [layer]
    assert [name for name, _ in own_layers(model)] == ["", "proj.base_layer", "attention"]


class FusedMoEWithLoRA(LoRAWrapper):
    """Named as vLLM's own, which gives the experts in it another method."""


def test_experts_that_take_adapters_are_refused_with_the_setting_that_avoids_it() -> None:
    model = _model(UnquantizedFusedMoEMethod())
    model["proj"] = FusedMoEWithLoRA(model["proj"])
    with pytest.raises(Unsupported, match=r"proj are experts .* --lora-target-modules"):
        check_experts_beside_adapters(model, has_triton=True)


class TritonExperts:
    """Named as vLLM's own kernel."""


def test_experts_beside_adapters_are_refused_where_their_kernel_is_missing() -> None:
    method = UnquantizedFusedMoEMethod()
    method.experts_cls = TritonExperts  # type: ignore[attr-defined]
    check_experts_beside_adapters(_model(method), has_triton=True)
    check_experts_beside_adapters(_model(UnquantizedLinearMethod()), has_triton=False)
    with pytest.raises(Unsupported, match="computes proj by Triton's"):
        check_experts_beside_adapters(_model(method), has_triton=False)


def test_a_loader_sees_the_layers_without_their_wrappers() -> None:
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    layer = model["blocks"][0]
    wrapper = model["blocks"][0] = LoRAWrapper(layer)
    with unwrapped(model):
        assert list(dict(model.named_parameters())) == ["blocks.0.weight", "blocks.0.bias"]
    assert model["blocks"][0] is wrapper
    with pytest.raises(KeyError, match="loader"), unwrapped(model):
        raise KeyError("loader")
    assert model["blocks"][0] is wrapper
