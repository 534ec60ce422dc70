"""Taking tensors: nothing is held longer than it must be, and nothing is read that may change."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from harvester.contracts.errors import ConfigError
from weightsync.elements.bits import bits_of
from weightsync.publish.trainer_state import TrainerState


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


def test_a_module_in_place_of_its_state_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="pass its `state_dict"):
        TrainerState(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
