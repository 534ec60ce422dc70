"""A holder alone has tensors in pieces: what is verified, what is not, and boxes that overlap."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from tests.unit.weightsync.vllm.forged_delta import forge_delta
from weightsync.elements.bits import TensorSpec, bits_of
from weightsync.layout.slices import SliceRecord
from weightsync.publish.settings import VersionSettings
from weightsync.publish.trainer_state import ShardSlice
from weightsync.publisher import Publisher
from weightsync.receive.held_parts import TensorParallel
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

State = dict[str, torch.Tensor]
ONE, TWO, THREE = (WeightVersion(v) for v in (1, 2, 3))
ROWS, COLUMNS = 64, 32
NAME = "a.weight"


class Pieces:
    """Rows of one tensor, from and to, each as a tensor of the holder."""

    def __init__(self, *spans: tuple[int, int]) -> None:
        self.spans = spans

    def boxes(self, name: str, spec: TensorSpec) -> Sequence[SliceRecord]:
        if name != NAME:
            return ()
        return [SliceRecord(name, spec.shape, (a, 0), (b - a, COLUMNS)) for a, b in self.spans]

    def held(self, state: State) -> State:
        boxes = self.boxes(NAME, TensorSpec("BF16", (ROWS, COLUMNS)))
        names = [NAME] if len(boxes) == 1 else [box.entry for box in boxes]
        return {n: state[NAME][b.index].clone() for n, b in zip(names, boxes, strict=True)}

    def blank(self) -> State:
        return {name: torch.zeros_like(tensor) for name, tensor in self.held(STATES[0]).items()}


def _states() -> Iterator[State]:
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
        for name in (NAME, "b.weight")
    }
    for _ in range(3):
        yield state
        state = {
            name: (t.view(torch.int16) + (torch.rand(t.shape, generator=generator) < 0.1))
            .short()
            .view(torch.bfloat16)
            for name, t in state.items()
        }


STATES = tuple(_states())
PIECES = Pieces((0, 16), (16, 20), (20, ROWS))
LONE = Pieces((0, 16))
OVERLAPPING = Pieces((0, 40), (20, ROWS))
WHOLE_AND_PART = Pieces((0, ROWS), (20, ROWS))


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.int16), right[name].view(torch.int16)) for name in left
    )


def _published(store: Path, *, halves: bool = False) -> Path:
    def given(state: State) -> Iterator[tuple[str, torch.Tensor | ShardSlice]]:
        half = ROWS // 2
        for name, tensor in state.items():
            for offset in (0, half):
                rows = tensor[offset : offset + half].contiguous()
                yield name, ShardSlice(rows, tuple(tensor.shape), 0, offset)

    with Publisher(store, versions=VersionSettings(skip_deltas=False)) as publisher:
        for state in STATES:
            publisher.publish(given(state) if halves else state)
    return store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return _published(tmp_path / "job")


def _forged(store: Path, entry: str, rows: slice = slice(None)) -> None:
    """The third version's payload leads to another bit, and its file has the digest of that."""
    old, new = (bits_of(state[NAME][rows].contiguous()) for state in STATES[1:])
    wrong = new.copy()
    wrong[0] ^= 1
    forge_delta(store, THREE, entry, old, wrong)


@pytest.mark.parametrize("share", [PIECES, LONE, OVERLAPPING, WHOLE_AND_PART])
def test_each_way_to_a_version_leads_to_the_same_pieces(store: Path, share: Pieces) -> None:
    """A delta changes every piece once, where pieces overlap too."""
    at_once, in_turn = share.blank(), share.blank()
    Receiver(store, selection=share).sync(None, THREE, TensorTarget(at_once))
    assert same(at_once, share.held(STATES[2]))
    receiver = Receiver(store, selection=share)
    receiver.sync(None, ONE, TensorTarget(in_turn))
    for version in (TWO, THREE):
        applied = receiver.sync(WeightVersion(version - 1), version, TensorTarget(in_turn))
        assert not applied.from_full
        assert same(in_turn, share.held(STATES[version - 1]))


@pytest.mark.parametrize("share", [PIECES, WHOLE_AND_PART])
def test_pieces_that_make_up_a_tensor_are_compared_with_its_digest(
    store: Path, share: Pieces
) -> None:
    _forged(store, NAME)
    held = share.blank()
    receiver = Receiver(store, selection=share)
    receiver.sync(None, TWO, TensorTarget(held))
    with pytest.raises(Corrupt, match="differs from the published one"):
        receiver.sync(TWO, THREE, TensorTarget(held))
    with pytest.raises(Corrupt, match="differs from the published one"):
        Receiver(store, selection=share).sync(None, THREE, TensorTarget(share.blank()))


def test_a_cut_tensor_of_whole_slices_is_compared_with_their_digests(tmp_path: Path) -> None:
    store = _published(tmp_path / "job", halves=True)
    _forged(store, f"{NAME}[0:32, :]", slice(0, 32))
    share = Pieces((0, 32))
    held = share.blank()
    receiver = Receiver(store, selection=share)
    receiver.sync(None, TWO, TensorTarget(held))
    assert not receiver.unseen
    with pytest.raises(Corrupt, match="differs from the published one"):
        receiver.sync(TWO, THREE, TensorTarget(held))


def test_a_receiver_names_the_tensors_that_nothing_published_verifies(store: Path) -> None:
    receivers = {share: Receiver(store, selection=share) for share in (PIECES, LONE, OVERLAPPING)}
    assert not receivers[LONE].unseen
    for share, receiver in receivers.items():
        receiver.sync(None, ONE, TensorTarget(share.blank()))
    found = [receivers[share].unseen for share in (PIECES, LONE, OVERLAPPING)]
    assert found == [frozenset(), {NAME}, OVERLAPPING.blank().keys()]
    rows = TensorParallel(rank=0, ranks=2, dim_of=lambda name: 0 if name == NAME else None)
    held = {name: torch.zeros_like(tensor) for name, tensor in STATES[0].items()}
    held[NAME] = held[NAME][: ROWS // 2].clone()
    receiver = Receiver(store, selection=rows)
    receiver.sync(None, THREE, TensorTarget(held))
    assert receiver.unseen == {NAME}


def test_a_holder_of_everything_has_no_unseen_tensor(store: Path) -> None:
    held = {name: torch.zeros_like(tensor) for name, tensor in STATES[0].items()}
    receiver = Receiver(store)
    receiver.sync(None, THREE, TensorTarget(held))
    assert not receiver.unseen


@pytest.mark.parametrize("threads", [1, 2])
def test_cut_tensors_in_one_memory_take_a_delta_once(tmp_path: Path, threads: int) -> None:
    """Tied ones, as a rank's model has them; before, each version was a full checkpoint."""
    share = TensorParallel(rank=0, ranks=2, dim_of=lambda _name: 0)
    tied = [{NAME: state[NAME], "head.weight": state[NAME]} for state in STATES]
    untied = {NAME: STATES[0][NAME], "head.weight": STATES[1][NAME]}
    with Publisher(tmp_path / "job", versions=VersionSettings(skip_deltas=False)) as publisher:
        for state in [*tied, untied]:
            publisher.publish(state)
    memory = torch.zeros(ROWS // 2, COLUMNS).bfloat16()
    target = TensorTarget(dict.fromkeys((NAME, "head.weight"), memory))
    receiver = Receiver(tmp_path / "job", selection=share, threads=threads)
    receiver.sync(None, ONE, target)
    for version in (TWO, THREE):
        applied = receiver.sync(WeightVersion(version - 1), version, target)
        assert (applied.from_full, receiver.reapplied) == (False, 0)
        assert torch.equal(memory, tied[version - 1][NAME][: ROWS // 2])
    with pytest.raises(Corrupt, match="does not match"):
        receiver.sync(THREE, WeightVersion(4), target)
