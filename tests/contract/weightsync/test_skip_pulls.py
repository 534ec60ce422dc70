"""A receiver catches up by skip deltas, wherever a store is, whoever wrote it, whatever is held."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import fsspec
import pytest
import torch

from harvester.contracts.ids import WeightVersion
from tests.weight_servers import HASTY, relayed, served
from weightsync.elements.bits import TensorSpec
from weightsync.publish.trainer_state import ShardSlice
from weightsync.publisher import Publisher
from weightsync.receive.held_parts import Selection, TensorParallel
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.http_source import HttpSource
from weightsync.transport.location import source_at

State = dict[str, torch.Tensor]
FIRST, LAST = WeightVersion(1), WeightVersion(9)
ROWS, COLUMNS = 96, 640


def _states() -> list[State]:
    generator = torch.Generator().manual_seed(0)
    run = [
        {
            "up.weight": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(),
            "down.weight": torch.randn(COLUMNS, ROWS, generator=generator).bfloat16(),
            "norm.weight": torch.ones(COLUMNS).bfloat16(),
        }
    ]
    for _ in range(LAST - FIRST):
        run.append({name: _moved(tensor, generator) for name, tensor in run[-1].items()})
    return run


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    moves = torch.rand(tensor.shape, generator=generator) < 0.02
    return (tensor.view(torch.int16) + moves).view(torch.bfloat16)


STATES = _states()


@pytest.fixture(scope="module", params=["directory", "two ranks", "objects", "relay"])
def location(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    root = tmp_path_factory.mktemp("skips")
    at = str(root / "stores" / "job-a")
    with ExitStack() as stack:
        if request.param == "objects":
            at = "memory://skips/job-a"
            stack.callback(fsspec.filesystem("memory").rm, "/skips", recursive=True)
        publish(at, ranks=2 if request.param == "two ranks" else 1)
        if request.param == "relay":
            url = stack.enter_context(served(root / "stores"))
            at = stack.enter_context(relayed(url, root / "cache")) + "/stores/job-a"
        yield at


def publish(at: str, *, ranks: int) -> None:
    with ExitStack() as stack, ThreadPoolExecutor(ranks) as pool:
        publishers = [
            stack.enter_context(Publisher(at, rank=rank, ranks=ranks)) for rank in range(ranks)
        ]
        for state in STATES:
            shares = [_share(state, rank, ranks) for rank in range(ranks)]
            calls = [pool.submit(p.publish, s) for p, s in zip(publishers, shares, strict=True)]
            for call in calls:
                call.result()


def _share(
    state: State, rank: int, ranks: int
) -> State | Iterator[tuple[str, torch.Tensor | ShardSlice]]:
    if ranks == 1:
        return state
    share: list[tuple[str, torch.Tensor | ShardSlice]] = []
    for name, tensor in state.items():
        if name == "norm.weight":
            share.append((name, tensor))
            continue
        size = tensor.shape[0] // ranks
        rows = tensor[rank * size : (rank + 1) * size]
        share.append((name, ShardSlice(rows, tuple(tensor.shape), 0, rank * size)))
    return iter(share)


SHARES: dict[str, Selection | None] = {
    "whole": None,
    "tp 1 of 2": TensorParallel(rank=1, ranks=2, dim_of={"up.weight": 0, "down.weight": 1}.get),
}


def part(state: State, share: Selection | None) -> State:
    if share is None:
        return {name: tensor.clone() for name, tensor in state.items()}
    return {
        name: tensor[box.index].clone()
        for name, tensor in state.items()
        for box in share.boxes(name, TensorSpec("BF16", tuple(tensor.shape)))
    }


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES.keys())
def test_a_holder_ends_at_the_published_bits(location: str, share: Selection | None) -> None:
    is_url = location.startswith("http")
    source = HttpSource(location, HASTY) if is_url else source_at(location)
    held = part(STATES[0], share)
    with closing(Receiver(source, selection=share)) as receiver:
        receiver.sync(None, FIRST, TensorTarget(held))
        plan = receiver.plan(FIRST, LAST)
        assert [step.ref.directory for step in plan.steps] == ["skip_v000001_v000009"]
        receiver.sync(FIRST, LAST, TensorTarget(held))
        assert receiver.reapplied == 0
    expected = part(STATES[-1], share)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], expected[name]) for name in held)


def test_a_skip_delta_is_there_when_the_publisher_is_closed(tmp_path: Path) -> None:
    publish(str(tmp_path / "store"), ranks=1)
    found = sorted(path.name for path in (tmp_path / "store").glob("skip_*"))
    assert found == ["skip_v000001_v000005", "skip_v000001_v000009", "skip_v000005_v000009"]
