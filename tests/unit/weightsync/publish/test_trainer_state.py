"""Taking tensors: nothing is held longer than it must be, and nothing is read that may change."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harvester.contracts.errors import ConfigError, Unsupported
from weightsync.elements.bits import bits_of
from weightsync.publish.trainer_state import ShardSlice, TrainerState
from weightsync.receive.target import TensorTarget


def test_a_gathered_tensor_is_free_before_the_next_request() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for layer in range(4):
            gc.collect()
            held.append(sum(reference() is not None for reference in alive))
            tensor = torch.full((3,), float(layer))
            alive.append(weakref.ref(tensor))
            yield f"layer.{layer}", tensor
            del tensor

    taken = {piece.entry: piece.bits(own=True) for piece in TrainerState(gathered())}
    assert held == [0, 0, 0, 0]
    assert [bits[0] for bits in taken.values()] == [
        bits_of(torch.tensor([float(layer)]))[0] for layer in range(4)
    ]


def test_a_buffer_that_is_filled_again_was_copied() -> None:
    buffer = torch.zeros(3)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for layer in range(3):
            buffer.fill_(layer)
            yield f"layer.{layer}", buffer

    taken = [piece.bits(own=True) for piece in TrainerState(gathered())]
    assert [bits.view("f4").tolist() for bits in taken] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_a_piece_is_gone_after_the_next_request() -> None:
    pieces = list(TrainerState(iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])))
    with pytest.raises(ValueError, match="a was already released"):
        pieces[0].bits(own=True)


def test_a_state_dict_is_read_where_it_is() -> None:
    tensor = torch.arange(4.0)
    (piece,) = TrainerState({"w": tensor})
    assert piece.bits(own=False).ctypes.data == tensor.data_ptr()
    assert piece.bits(own=True).ctypes.data != tensor.data_ptr()


def test_a_tensor_with_gaps_is_read_in_order() -> None:
    (piece,) = TrainerState({"w": torch.arange(6.0).reshape(2, 3).t()})
    assert piece.bits(own=False).view("f4").tolist() == [0, 3, 1, 4, 2, 5]


def test_ties_are_one_memory_seen_in_one_way() -> None:
    weight, other = torch.zeros(4, 4), torch.zeros(4, 4)
    state = {
        "a": weight,
        "b": weight,
        "turned": weight.t(),
        "flat": weight.reshape(16),
        "other": other,
        "part": weight[:2],
        "empty": torch.zeros(0),
        "empty too": torch.zeros(0),
    }
    assert TrainerState(state).ties == {"b": "a"}
    assert TrainerState(state, finds_ties=False).ties == {}


def test_an_array_is_published_as_the_tensor_of_the_same_bits() -> None:
    weight = torch.arange(24.0).reshape(4, 6)
    dtypes = (torch.bool, torch.int8, torch.uint16, torch.float16, torch.float64, torch.complex64)
    tensors = {
        **{str(dtype): weight.to(dtype) for dtype in dtypes},
        "w": weight,
        "tied": weight,
        "gaps": weight.t(),
        "part": ShardSlice(weight, (8, 6), 0, 4),
        "number": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }
    arrays = {
        name: replace(value, tensor=value.tensor.numpy())
        if isinstance(value, ShardSlice)
        else value.numpy()
        for name, value in tensors.items()
    }
    ours, theirs = TrainerState(arrays), TrainerState(tensors)
    assert ours.ties == theirs.ties == {"w": "tied"}
    for piece, other in zip(ours, theirs, strict=True):
        assert (piece.entry, piece.spec, piece.record) == (other.entry, other.spec, other.record)
        assert np.array_equal(piece.bits(own=False), other.bits(own=False))
        assert not np.shares_memory(piece.bits(own=True), other.bits(own=False))
    read = next(piece for piece in ours if piece.entry == "tied").bits(own=False)
    assert np.shares_memory(read, weight.numpy())


@pytest.mark.parametrize("dtype", [np.complex128, np.longdouble])
def test_an_array_too_wide_for_safetensors_is_refused_by_name(dtype: type[Any]) -> None:
    with pytest.raises(Unsupported, match=f"w: dtype {np.dtype(dtype)} cannot be published"):
        TensorTarget({"w": np.zeros(3, dtype)})


def test_an_array_is_refused_by_name_as_a_tensor_is() -> None:
    holey = np.array([1.0, np.nan])
    (piece,) = TrainerState({"w": holey}, check_finite=True)
    with pytest.raises(ConfigError, match="w has NaN"):
        piece.bits(own=False)
    with pytest.raises(Unsupported, match="w: dtype >f4 cannot be published"):
        TrainerState({"w": np.ones(3, ">f4")})
    with pytest.raises(Unsupported, match="w is a list: pass tensors, numpy arrays or ShardSlices"):
        TrainerState({"w": [1.0]})  # type: ignore[dict-item]
    holey.flags.writeable = False
    for array, words in ((holey, "read-only"), (np.ones((2, 3)).T, "not contiguous")):
        with pytest.raises(ConfigError, match=f"w is .*{words}.*: it cannot be changed in place"):
            TensorTarget({"w": array})


class Wrapped(torch.Tensor):
    """A tensor that wraps another one, most operations of which give plain tensors, as torchao's
    for training in float8 do: torch gives 0 as the address of each."""

    inner: torch.Tensor
    kept = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride()
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, _: Any, given: Any, kwargs: Any = None) -> Any:
        plain = [part.inner if isinstance(part, cls) else part for part in given]
        made = operation(*plain, **(kwargs or {}))
        return cls(made) if cls is Opaque or operation in cls.kept else made


class Opaque(Wrapped):
    """Every operation gives a tensor that wraps another one."""


def test_tensors_without_memory_of_their_own_are_tied_to_no_other() -> None:
    state = {name: Wrapped(torch.full((4,), value)) for name, value in (("a", 1.0), ("b", 2.0))}
    given = TrainerState(state)
    assert given.ties == {}
    assert [piece.bits(own=True).view("f4")[0] for piece in given] == [1.0, 2.0]
    (piece,) = TrainerState({"c": Opaque(torch.zeros(4))})
    with pytest.raises(Unsupported, match="c is a Opaque: "):
        piece.bits(own=True)


@pytest.mark.parametrize("kept_bytes", [0, 40])
def test_a_tensor_whose_memory_was_freed_is_refused_by_name(kept_bytes: int) -> None:
    """FSDP and offloading keep a tensor's shape: to read it would end the trainer's process, or
    publish what lies behind it."""
    freed = torch.ones(10, 10)
    freed.untyped_storage().resize_(kept_bytes)
    for taken in (lambda: TrainerState({"w": freed}), lambda: TensorTarget({"w": freed})):
        with pytest.raises(Unsupported, match="w: its memory was freed"):
            taken()
    kept = torch.ones(10, 10)[2:4, ::3].t()
    assert [piece.entry for piece in TrainerState({"w": kept, "one": torch.ones(1).expand(9)})]


def test_names_of_several_types_are_refused() -> None:
    with pytest.raises(Unsupported, match="tensor name 1: names are strings"):
        TrainerState({1: torch.zeros(1), "a": torch.zeros(1)})  # type: ignore[dict-item]


def test_a_module_in_place_of_its_state_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="pass its `state_dict"):
        TrainerState(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
