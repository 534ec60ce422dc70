"""The map of a loader is believed only where it holds, and then it reaches runtime storage."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from harvester.contracts.errors import ConfigError, Unsupported
from weightsync.elements.bits import Layout, TensorSpec, bits_of, torch_dtypes
from weightsync.encoding.codec import decode, encode
from weightsync.encoding.delta import Delta
from weightsync.vllm.device_delta import apply_on_device
from weightsync.vllm.loader_map import LoaderMap, traced
from weightsync.vllm.shadow_target import ShadowTarget

LAYOUT: Layout = {
    "q.weight": TensorSpec("BF16", (4, 6)),
    "k.weight": TensorSpec("BF16", (2, 6)),
    "down.weight": TensorSpec("BF16", (6, 8)),
    "norm.weight": TensorSpec("BF16", (6,)),
    "embed.weight": TensorSpec("BF16", (10, 6)),
}


class PackedModel(torch.nn.Module):
    """Packs q and k, keeps `down` transposed, widens the norm, pads the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(6, 6, dtype=torch.bfloat16))
        self.down_t = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.zeros(6))
        self.embed = torch.nn.Parameter(torch.full((16, 6), 7.0, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q.weight":
                self.qk.data[:4].copy_(tensor)
            elif name == "k.weight":
                self.qk.data.narrow(0, 4, 2).copy_(tensor)
            elif name == "down.weight":
                self.down_t.data.t()[:, :4].copy_(tensor[:, :4])
                self.down_t.data.t()[:, 4:].copy_(tensor[:, 4:])
            elif name == "norm.weight":
                self.norm.data.copy_(tensor)
            else:
                self.embed[:10].data.copy_(tensor)


class AliasingModel(PackedModel):
    """Loads k over q, as a model that ties two checkpoint tensors does."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        renamed = {"k.weight": "q.weight"}
        weights = list(weights)
        super().load_weights((name, tensor) for name, tensor in weights if name not in renamed)
        self.qk.data[:2].copy_(dict(weights)["k.weight"])


class ScalingModel(PackedModel):
    """Computes what it stores."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(
            (name, tensor + 1 if name == "norm.weight" else tensor) for name, tensor in weights
        )


class TiedModel(PackedModel):
    """Passes over an output head: it computes from the embedding."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((n, tensor) for n, tensor in weights if n != "head.weight")


class SkippingModel(PackedModel):
    """Leaves a tensor out."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((n, tensor) for n, tensor in weights if n != "norm.weight")


def _state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=generator).bfloat16()
        for name, spec in LAYOUT.items()
    }


def test_a_write_through_the_map_equals_the_loader_s() -> None:
    mapped, loaded = PackedModel(), PackedModel()
    target = traced(mapped, LAYOUT, lambda touched: None)
    state = _state(5)
    for name, tensor in state.items():
        bits = target.bits(name)
        np.copyto(bits, bits_of(tensor))
        target.commit(name, bits)
    loaded.load_weights(state.items())
    for left, right in zip(mapped.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(left, right)
    for name, tensor in state.items():
        assert (target.bits(name) == bits_of(tensor)).all()


def test_flat_tensors_are_runtime_storage_itself() -> None:
    model = PackedModel()
    target = traced(model, LAYOUT, lambda touched: None)
    target.bits("k.weight")[0] = 0x4000
    assert model.qk[4, 0] == 2.0


@pytest.mark.parametrize("model", [AliasingModel(), ScalingModel()])
def test_a_loader_that_aliases_or_computes_is_not_believed(model: PackedModel) -> None:
    with pytest.raises(Unsupported, match="does not copy"):
        traced(model, LAYOUT, lambda touched: None)


def test_a_tensor_that_the_loader_ignores_is_found() -> None:
    with pytest.raises(Unsupported, match=r"does not copy norm\.weight"):
        traced(SkippingModel(), LAYOUT, lambda touched: None)


def written(target: LoaderMap, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        bits = target.bits(name)
        np.copyto(bits, bits_of(tensor))
        target.commit(name, bits)
    target.finish(state.keys())


def test_a_tied_output_head_is_taken_as_long_as_it_equals_the_embedding() -> None:
    target = traced(TiedModel(), LAYOUT | {"head.weight": LAYOUT["embed.weight"]}, lambda _: None)
    state = _state(5)
    written(target, state | {"head.weight": state["embed.weight"]})
    assert (target.bits("head.weight") == bits_of(state["embed.weight"])).all()
    with pytest.raises(ConfigError, match=r"no place for head\.weight"):
        written(target, state | {"head.weight": state["embed.weight"] + 1})


def test_a_head_that_is_kept_beside_the_weights_is_no_reason_to_trace_again() -> None:
    model = TiedModel()
    target = traced(model, LAYOUT | {"head.weight": LAYOUT["embed.weight"]}, lambda _: None)
    assert target.is_current(model)


def test_tensors_of_one_storage_are_listed_together_with_their_offsets() -> None:
    model = PackedModel()
    target = traced(model, LAYOUT, lambda _: None)
    storage = model.qk.untyped_storage().data_ptr()
    assert target.names_by_storage()[storage] == ["q.weight", "k.weight"]
    assert (target.flat_at("q.weight"), target.flat_at("k.weight")) == (0, 24)
    assert target.flat_at("down.weight") is None


def test_the_touched_storages_are_reported() -> None:
    model = PackedModel()
    told: list[set[int]] = []
    target = traced(model, LAYOUT, lambda touched: told.append(set(touched)))
    target.finish(["q.weight", "norm.weight"])
    assert told == [
        {model.qk.untyped_storage().data_ptr(), model.norm.untyped_storage().data_ptr()}
    ]


def test_a_map_of_storage_that_the_model_left_is_not_current() -> None:
    model = PackedModel()
    target = traced(model, LAYOUT, lambda touched: None)
    assert target.is_current(model)
    model.norm.data = model.norm.data.clone()
    assert not target.is_current(model)


def test_a_tensor_on_a_device_is_changed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an accelerator at hand: every tensor claims to lie on one."""
    changed: list[int] = []

    def on_device(delta: Delta, tensor: torch.Tensor) -> None:
        changed.append(tensor.numel())
        apply_on_device(delta, tensor)

    monkeypatch.setattr("weightsync.vllm.loader_map.apply_on_device", on_device)
    monkeypatch.setattr("weightsync.vllm.loader_map.HOST", "none")
    model = PackedModel()
    target = traced(model, LAYOUT, lambda _: None)
    for name in LAYOUT:
        old = target.bits(name).copy()
        new = old + np.uint16(1)
        encoded = encode(old, new)
        assert encoded is not None
        spec = LAYOUT[name]
        target.change(name, [decode(encoded.encoding, memoryview(encoded.payload), spec)])
        assert (target.bits(name) == new).all(), name
    assert sorted(changed) == [12, 24, 60]


class MixedModel(torch.nn.Module):
    """Holds two tensors of a format in one, row by row, and an empty one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        held = torch.zeros(6 * 4 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(6, 4)
        self.ab = torch.nn.Parameter(held, requires_grad=False)
        self.none = torch.nn.Parameter(torch.empty(0, 4, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "none":
                self.none.data.copy_(tensor)
            else:
                self.ab.data[0 if name == "a" else 1 :: 2].copy_(tensor)


@pytest.mark.parametrize("dtype", ["F4", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"])
def test_pieces_of_every_number_format_reach_runtime_storage(dtype: str) -> None:
    spec = TensorSpec(dtype, (3, 4))
    layout = {"a": spec, "b": spec, "none": TensorSpec(dtype, (0, 4))}
    model = MixedModel(torch_dtypes()[dtype])
    target = traced(model, layout, lambda touched: touched)
    wanted = {}
    for name in layout:
        bits = target.bits(name)
        bits[...] = np.arange(bits.size) + (1 if name == "a" else 100)
        target.commit(name, bits)
        wanted[name] = bits.copy()
    target.finish(layout)
    held = bits_of(model.ab.data).reshape(6, 4)
    assert np.array_equal(held[0::2].reshape(-1), wanted["a"])
    assert np.array_equal(held[1::2].reshape(-1), wanted["b"])
    assert all(np.array_equal(target.bits(name), wanted[name]) for name in layout)
    shadow = ShadowTarget(model, layout, lambda: None)
    assert [shadow.bits(name).any() for name in layout] == [False] * 3
