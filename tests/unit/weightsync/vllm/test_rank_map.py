"""A rank follows a store in its own memory, bit for bit as its loader cuts the whole tensors."""

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from harvester.contracts.errors import ConfigError, Corrupt, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import TensorSpec, spec_of
from weightsync.publish.trainer_state import ShardSlice
from weightsync.publisher import Published, Publisher
from weightsync.receiver import Receiver
from weightsync.transport.location import StoreRoot
from weightsync.vllm.engine_weights import EngineWeights
from weightsync.vllm.prepared_version import RequestedVersion
from weightsync.vllm.rank_map import RankMap, traced_rank
from weightsync.vllm.stager import StageState

State = dict[str, torch.Tensor]


class Rank(torch.nn.Module):
    """One of two: rows of the embedding, columns of the weight, all of the rest."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.embed = torch.nn.Parameter(torch.zeros(25, 16).bfloat16(), False)
        self.weight = torch.nn.Parameter(torch.zeros(40, 15).bfloat16(), False)
        self.bias = torch.nn.Parameter(torch.zeros(7), False)
        self.scale = torch.nn.Parameter(torch.zeros(33, dtype=torch.float8_e4m3fn), False)
        self.steps = torch.nn.Parameter(torch.zeros(1, dtype=torch.int64), False)

    def slices(self, state: State) -> State:
        rows = slice(25 * self.number, 25 * self.number + 25)
        columns = slice(15 * self.number, 15 * self.number + 15)
        return {
            "embed": state["embed.weight"][rows],
            "weight": state["layer.weight"][:, columns],
            "bias": state["layer.bias"],
            "scale": state["layer.scale"],
            "steps": state["steps"],
        }

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, piece in self.slices(dict(weights)).items():
            getattr(self, name).data.copy_(piece)

    def holds(self, state: State) -> bool:
        return all(
            torch.equal(getattr(self, name).float(), piece.float())
            for name, piece in self.slices(state).items()
        )


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_ends_on_its_slices_of_the_published_state(
    published: tuple[Path, list[Published]], states: tuple[State, ...], number: int
) -> None:
    store, done = published
    rank = Rank(number)
    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    target = traced_rank(rank, layout, lambda touched: None)
    receiver = Receiver(store, selection=target.selection)
    current = None
    for step in (done[2], done[3], done[7]):
        applied = receiver.sync(current, step.version, target)
        assert applied.from_full == (current is None)
        current = applied.version
        assert applied.state_hash == step.state_hash
        assert rank.holds(states[step.version - 1])


def test_a_rank_has_its_boxes_where_they_lie_and_nothing_else(states: tuple[State, ...]) -> None:
    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    elsewhere = layout | {"next.weight": TensorSpec("F32", (7, 9))}
    rank = Rank(1)
    rank.next = PPMissingLayer()
    target = traced_rank(rank, elsewhere, lambda touched: None)
    assert target.layout() == layout | {
        "embed.weight": TensorSpec("BF16", (25, 16)),
        "layer.weight": TensorSpec("BF16", (40, 15)),
    }
    for name, parameter in zip(("embed.weight", "layer.weight"), rank.parameters(), strict=False):
        assert target.bits(name).ctypes.data == parameter.data_ptr()


def traced(states: tuple[State, ...], rank: Rank) -> RankMap:
    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    return traced_rank(rank, layout, lambda touched: None)


class Transposing(Rank):
    """Keeps the weight transposed and the embedding in another dtype."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.weight = torch.nn.Parameter(torch.zeros(15, 40).bfloat16().t(), False)
        self.embed = torch.nn.Parameter(torch.zeros(25, 16), False)


def test_a_tensor_that_lies_in_another_form_is_kept_in_host_memory(
    published: tuple[Path, list[Published]],
    states: tuple[State, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Columns are in every row, so that all rows of the weight are kept."""
    store, done = published
    rank = Transposing(1)
    target = traced(states, rank)
    assert "embed.weight and 1 other tensors (3200 bytes) stay in host memory" in caplog.text
    assert target.layout()["layer.weight"] == TensorSpec("BF16", (40, 30))
    receiver = Receiver(store, selection=target.selection)
    current = None
    for step in (done[2], done[3]):
        current = receiver.sync(current, step.version, target).version
        assert rank.holds(states[step.version - 1])


def test_a_slice_that_is_not_what_was_written_is_found(states: tuple[State, ...]) -> None:
    rank = Transposing(1)

    def disturb(touched: Collection[int]) -> None:
        rank.weight.data[0, 0] += 1

    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    target = traced_rank(rank, layout, disturb)
    with pytest.raises(Corrupt, match=r"layer\.weight: the held part does not match"):
        target.finish(layout)


def test_weights_that_moved_are_noticed(states: tuple[State, ...]) -> None:
    rank = Rank(0)
    target = traced(states, rank)
    assert target.is_current(rank)
    rank.embed.data = rank.embed.data.clone()
    assert not target.is_current(rank)


class Doubling(Rank):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.bias.data.mul_(2)


def test_a_rank_with_a_computing_loader_is_rejected(states: tuple[State, ...]) -> None:
    with pytest.raises(Unsupported, match=r"does not copy layer\.bias"):
        traced(states, Doubling(0))


class PPMissingLayer(torch.nn.Identity):
    """Named as vLLM's own: in the place of a layer that another rank has."""


class Experts(torch.nn.Module):
    """Holds the second of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_expert_map", torch.tensor([-1, 0]))


def rank_with(**layers: torch.nn.Module) -> Rank:
    rank = Rank(0)
    for name, layer in layers.items():
        rank.add_module(name, layer)
    return rank


@pytest.mark.parametrize(
    ("rank", "elsewhere"),
    [
        (rank_with(next=PPMissingLayer()), "next.bias"),
        (rank_with(mlp=torch.nn.ModuleDict({"experts": Experts()})), "mlp.experts.0.w1.weight"),
    ],
    ids=["pipeline", "experts"],
)
def test_a_tensor_of_another_rank_is_not_held(
    states: tuple[State, ...], rank: Rank, elsewhere: str
) -> None:
    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    layout |= {elsewhere: TensorSpec("F32", (7,))}
    target = traced_rank(rank, layout, lambda touched: None)
    assert target.layout().keys() == states[0].keys()
    target.finish(target.layout())


@pytest.mark.parametrize(
    ("rank", "nowhere"),
    [
        (Rank(0), "next.bias"),
        (rank_with(next=PPMissingLayer()), "nextdoor.bias"),
        (rank_with(mlp=torch.nn.ModuleDict({"experts": Experts()})), "mlp.experts.1.w1.weight"),
    ],
    ids=["whole", "pipeline", "experts"],
)
def test_a_tensor_of_no_rank_is_refused_on_each(
    states: tuple[State, ...], rank: Rank, nowhere: str
) -> None:
    layout = {name: spec_of(tensor) for name, tensor in states[0].items()}
    with pytest.raises(Unsupported, match=f"does not copy {nowhere}"):
        traced_rank(rank, layout | {nowhere: TensorSpec("F32", (7,))}, lambda touched: None)


@pytest.mark.parametrize("is_staged", [False, True], ids=["before", "after"])
def test_a_part_that_another_writer_changed_before_or_after_staging_is_replaced(
    published: tuple[Path, list[Published]], states: tuple[State, ...], is_staged: bool
) -> None:
    """No digest of a part is published: the rank's own of the state before shows the change, or the
    one that the trial led to."""
    store, done = published
    rank = Rank(1)
    weights = EngineWeights(rank, None, StoreRoot(store.parent), packed_ahead_bytes=0, sliced=True)

    def wanted(number: int) -> RequestedVersion:
        return RequestedVersion(store="store", version=done[number].version)

    with closing(weights):
        weights.load(wanted(1))
        while is_staged and weights.stage(wanted(2)).state is StageState.RUNNING:
            pass
        rank.weight.data[0, 0] += 1
        applied = weights.load(wanted(2))
        assert (applied.from_full, weights.report()["reapplied"]) == (True, 1)
        assert applied.state_hash == done[2].state_hash
        assert rank.holds(states[2])
        assert not weights.load(wanted(3)).from_full
        assert rank.holds(states[3])


def test_a_rank_of_a_sharded_trainer_s_store_applies_slices_in_place(tmp_path: Path) -> None:
    """A norm that the trainer cut is hashed by its slices, a box of two slices by itself."""
    first = {"layer.weight": torch.randn(8, 6).bfloat16(), "norm": torch.randn(12)}
    second = {name: tensor + 0.5 for name, tensor in first.items()}
    with ThreadPoolExecutor(2) as pool:
        publishers = [Publisher(tmp_path / "job", rank=rank, ranks=2) for rank in range(2)]

        def publish(rank: int, state: State) -> Published:
            parts = [
                (name, ShardSlice(tensor.chunk(2)[rank], tensor.shape, 0, len(tensor) // 2 * rank))
                for name, tensor in state.items()
            ]
            return publishers[rank].publish(parts)

        rank = SlicedRank()
        weights = EngineWeights(rank, None, StoreRoot(tmp_path), packed_ahead_bytes=0, sliced=True)
        with closing(weights):
            for state in (first, second):
                done, _ = pool.map(publish, range(2), [state, state])
                applied = weights.load(RequestedVersion(store="job", version=done.version))
                assert applied.from_full == (state is first)
                assert applied.state_hash == done.state_hash
                assert torch.equal(rank.weight, state["layer.weight"][2:6])
                assert torch.equal(rank.norm, state["norm"])
            assert weights.report()["reapplied"] == 0
        for publisher in publishers:
            publisher.close()


class SlicedRank(torch.nn.Module):
    """Has rows from the middle of the weight, and all of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6).bfloat16(), False)
        self.norm = torch.nn.Parameter(torch.zeros(12), False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
            else:
                self.weight.data.copy_(tensor[2:6])


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_matrix_without_a_place_must_equal_another_one(
    tmp_path: Path, states: tuple[State, ...], is_tied: bool
) -> None:
    """Published digests tell, so that no rank needs the matrix."""
    head = states[0]["embed.weight"] if is_tied else states[1]["embed.weight"]
    with Publisher(tmp_path / "tied") as publisher:
        done = publisher.publish(states[0] | {"head.weight": head})
    rank = Rank(0)
    weights = EngineWeights(rank, None, StoreRoot(tmp_path), packed_ahead_bytes=0, sliced=True)
    wanted = RequestedVersion(store="tied", version=done.version)
    with closing(weights):
        if is_tied:
            assert weights.load(wanted).state_hash == done.state_hash
            assert rank.holds(states[0])
        else:
            with pytest.raises(ConfigError, match=r"no place for head\.weight"):
                weights.load(wanted)
            assert not weights.is_loaded


class Tied(torch.nn.Module):
    """All of an embedding, and this rank's rows of the head that is loaded from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(8, 4).bfloat16(), False)
        self.head = torch.nn.Parameter(torch.zeros(4, 4).bfloat16(), False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.embed.data.copy_(tensor)
            self.head.data.copy_(tensor[:4])


def test_a_tensor_that_is_whole_in_one_place_and_a_part_in_another(tmp_path: Path) -> None:
    first = torch.randn(8, 4).bfloat16()
    with Publisher(tmp_path / "job") as publisher:
        publisher.publish({"embed": first})
        publisher.publish({"embed": first + 1})
    model = Tied()
    with closing(
        EngineWeights(model, None, StoreRoot(tmp_path), packed_ahead_bytes=0, sliced=True)
    ) as weights:
        for version, wanted in ((1, first), (2, first + 1)):
            weights.load(RequestedVersion(store="job", version=WeightVersion(version)))
            assert torch.equal(model.embed, wanted)
            assert torch.equal(model.head, wanted[:4])
