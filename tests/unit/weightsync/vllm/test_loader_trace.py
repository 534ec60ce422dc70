"""A run of a model's loader shows every copy, and refuses a checkpoint that lacks a weight."""

import operator
import tracemalloc
from collections.abc import Iterable

import pytest
import torch

from harvester.contracts.errors import ConfigError, Unsupported
from tests.unit.weightsync.vllm.plain_model import PlainModel
from tests.unit.weightsync.vllm.test_loader_map import LAYOUT, PackedModel, ScalingModel
from weightsync.elements.bits import Layout, TensorSpec
from weightsync.vllm.loader_map import traced

ROUTED = LAYOUT | {"router.bias": TensorSpec("F32", (4,)), "layer_scalar": TensorSpec("F32", (1,))}


class CountingModel(PackedModel):
    """Copies to the meta device first, as vLLM does to count what a layer will load."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        weights = list(weights)
        for _, tensor in weights:
            torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").copy_(tensor)
        super().load_weights(weights)


def test_tracing_draws_tensors_one_at_a_time() -> None:
    """A loader that keeps none of them finds two: the next one is drawn beside the last one."""
    spec = TensorSpec("BF16", (256, 256))
    layout = {f"layers.{number}.weight": spec for number in range(24)}
    model = PlainModel({name: torch.zeros(spec.shape).bfloat16() for name in layout})
    tracemalloc.start()
    try:
        traced(model, layout, lambda _: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert spec.size_bytes <= peak < 4 * spec.size_bytes


def test_copies_that_only_count_are_no_places() -> None:
    assert traced(CountingModel(), LAYOUT, lambda _: None).flat_at("embed.weight") == 0


def test_a_checkpoint_that_the_loader_refuses_is_the_users_to_fix() -> None:
    layout = LAYOUT | {"q.weight": TensorSpec("BF16", (5, 6))}
    with pytest.raises(ConfigError, match="does not fit this model"):
        traced(PackedModel(), layout, lambda touched: None)


def test_a_checkpoint_that_does_not_fit_leaves_the_engine_s_weights() -> None:
    model = PackedModel()
    before = {name: held.detach().clone() for name, held in model.named_parameters()}
    layout = LAYOUT | {"embed.weight": TensorSpec("BF16", (99, 6))}
    with pytest.raises(ConfigError, match="does not fit this model"):
        traced(model, layout, lambda touched: None)
    assert all(torch.equal(held, before[name]) for name, held in model.named_parameters())


class Attention(torch.nn.Module):
    """Named as vLLM's own, which sets its scales after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.k_scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("_k_scale", torch.ones(1))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...


class RoutedModel(PackedModel):
    """Has weights of a router that a trainer's parameters may lack, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.router = torch.nn.Module()
        self.router.bias = torch.nn.Parameter(torch.full((4,), 7.0))
        self.register_buffer("layer_scalar", torch.ones(1))
        self.register_buffer("kv_scale", torch.ones(1))
        self.register_buffer("positions", torch.arange(3))
        self.register_buffer("cached_cos", torch.ones(3), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in {"router.bias", "layer_scalar"}:
                operator.attrgetter(name)(self).data.copy_(tensor)
            else:
                super().load_weights([(name, tensor)])


def without(*names: str) -> Layout:
    return {name: spec for name, spec in ROUTED.items() if name not in names}


def test_a_parameter_that_the_checkpoint_lacks_is_named_before_anything_is_written() -> None:
    model = RoutedModel()
    message = r"lacks weights that this engine computes from: router\.bias; publish"
    with pytest.raises(ConfigError, match=message):
        traced(model, without("router.bias"), lambda _: None)
    assert (model.embed == 7.0).all()


@pytest.mark.parametrize("is_dummy", [False, True])
def test_a_buffer_that_the_checkpoint_lacks_is_refused_where_it_is_random(
    is_dummy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that was started from a checkpoint has its value, which may be a constant."""
    model = RoutedModel()
    if is_dummy:
        with pytest.raises(ConfigError, match=r"computes from: layer_scalar; publish"):
            traced(model, without("layer_scalar"), lambda _: None, is_dummy=True)
        return
    traced(model, without("layer_scalar"), lambda _: None)
    assert "keep their values: layer_scalar, kv_scale, positions" in caplog.text


def test_a_full_checkpoint_lacks_nothing_of_a_dummy_engine() -> None:
    target = traced(RoutedModel(), ROUTED, lambda _: None, is_dummy=True)
    assert target.layout() == ROUTED


def test_a_message_names_a_few_of_many_missing_weights() -> None:
    model = PackedModel()
    model.more = torch.nn.ParameterList(torch.ones(1) for _ in range(9))
    message = r"more\.0, more\.1, more\.2, more\.3 and 5 more; publish"
    with pytest.raises(ConfigError, match=message):
        traced(model, LAYOUT, lambda _: None)


class NamingModel(ScalingModel):
    """Names what it loaded, as vLLM's models do: computed weights are seen by their names alone."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:  # type: ignore[override]
        super().load_weights(weights)
        return {"norm"}


def test_a_loader_that_computes_lacks_what_it_does_not_name() -> None:
    with pytest.raises(Unsupported, match=r"does not copy norm\.weight"):
        traced(NamingModel(), LAYOUT, lambda _: None)
    model = NamingModel()
    model.bias = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="computes from: bias;"):
        traced(model, LAYOUT, lambda _: None)


def test_copying_is_as_before_afterwards() -> None:
    before = torch.Tensor.copy_
    traced(PackedModel(), LAYOUT, lambda touched: None)
    assert torch.Tensor.copy_ is before
