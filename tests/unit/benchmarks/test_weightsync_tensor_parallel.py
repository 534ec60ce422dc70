"""The measured ranks follow steps in place, to the weights that their loader cuts."""

import copy
from contextlib import closing
from pathlib import Path

import pytest
import torch

from benchmarks.weightsync.states import Shape
from benchmarks.weightsync.tensor_parallel import STORE, RankFollower, RankModel, steps
from weightsync.publisher import Publisher

SHAPE = Shape(name="tiny", layers=1, hidden=64, intermediate=96, vocabulary=160)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_measured_rank_has_its_part_of_every_step(tmp_path: Path, ranks: int) -> None:
    states = steps(SHAPE)
    rank = ranks - 1
    with (
        Publisher(tmp_path / STORE) as publisher,
        closing(RankFollower(SHAPE, rank, ranks, tmp_path)) as follower,
    ):
        for _ in range(3):
            state = copy.copy(next(states))
            seen = follower.follow(publisher.publish(state).version)
            loaded = RankModel(SHAPE, rank, ranks)
            loaded.load_weights(state.items())
            for held, wanted in zip(follower.model.parameters(), loaded.parameters(), strict=True):
                assert torch.equal(held.view(torch.int16), wanted.view(torch.int16))
            assert (seen["in_place"], seen["reapplied"]) == (True, 0)
    whole = sum(tensor.nbytes for tensor in state.values())
    assert whole / ranks <= seen["held_bytes"] < 1.1 * whole / ranks
