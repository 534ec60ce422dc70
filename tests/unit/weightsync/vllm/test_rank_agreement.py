"""All ranks of an engine together find out that a version is not the trainer's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harvester.contracts.errors import Corrupt, Stale
from tests.unit.weightsync.vllm.forged_delta import forge_delta, leave_out
from tests.unit.weightsync.vllm.test_rank_map import Rank
from weightsync.elements.bits import bits_of
from weightsync.encoding.codec import Encoding
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Published, Publisher
from weightsync.receive.rank_sums import RankSums, SumJudge, Verdict, without_boxes
from weightsync.transport.location import StoreRoot
from weightsync.vllm.engine_weights import EngineWeights, RequestedVersion
from weightsync.vllm.rank_agreement import JUDGE_METHOD, SUMS_METHOD, agreed, compare_before_updates

State = dict[str, torch.Tensor]


class Engine:
    """Ranks that are updated as the executor updates them."""

    def __init__(self, root: Path, ranks: Sequence[Any], stack: ExitStack) -> None:
        self.ranks = ranks
        self.weights = [
            stack.enter_context(
                closing(
                    EngineWeights(rank, None, StoreRoot(root), packed_ahead_bytes=0, sliced=True)
                )
            )
            for rank in ranks
        ]
        self.judge = SumJudge()
        self.calls: list[str] = []

    def _ask(self, method: str, **given: Any) -> list[Any]:
        self.calls.append(method)
        wanted, known = given["update_info"], given["known"]
        return [
            without_boxes(weights.sums(wanted, anew=given["anew"]), known)
            for weights in self.weights
        ]

    def load(self, published: Published) -> Verdict:
        """Raises what the first rank raises, once every rank has heard the update."""
        wanted = RequestedVersion(
            store="store", version=published.version, state_hash=published.state_hash
        )
        verdict = agreed(self._ask, self.judge, wanted)  # type: ignore[arg-type]
        assert verdict is not None
        faults = []
        for weights in self.weights:
            weights.judge(verdict)
            try:
                weights.load(wanted)
            except Exception as error:
                faults.append(error)
        assert len(faults) in (0, len(self.weights))
        if faults:
            raise faults[0]
        return verdict

    def sums(self) -> list[dict[str, int]]:
        return [weights.report()["sums"] for weights in self.weights]

    def versions(self) -> list[int]:
        return [weights.report()["version"] for weights in self.weights]

    def holds(self, state: State) -> bool:
        return all(rank.holds(state) for rank in self.ranks)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def chain(tmp_path: Path, states: tuple[State, ...]) -> tuple[Path, list[Published]]:
    """One full version and deltas, no anchor."""
    versions = VersionSettings(anchor_every=25)
    with Publisher(tmp_path / "store", versions=versions) as publisher:
        return tmp_path / "store", [publisher.publish(state) for state in states[:6]]


def test_ranks_that_follow_are_verified_with_the_trainer_s_sums(
    published: tuple[Path, list[Published]], states: tuple[State, ...], stack: ExitStack
) -> None:
    """After the first version, by a delta, a skipped version and from an anchor alone."""
    store, done = published
    engine = Engine(store.parent, [Rank(0), Rank(1)], stack)
    for number in (0, 1, 2, 3, 7):
        engine.load(done[number])
        assert engine.holds(states[number])
        assert engine.sums() == [{"verified": 2, "unseen": 0, "refused": 0}] * 2
    assert [weights.report()["from_full"] for weights in engine.weights] == [False] * 2
    assert engine.calls == [SUMS_METHOD] * 5


def _forged(store: Path, states: tuple[State, ...], done: list[Published]) -> None:
    """One element of the second rank's columns differs in the delta of version 3."""
    old, new = (states[number]["layer.weight"] for number in (1, 2))
    wrong = new.clone()
    wrong[3, 20] += 1
    forge_delta(store, done[2].version, "layer.weight", bits_of(old), bits_of(wrong))


def _left_out(store: Path, _states: tuple[State, ...], done: list[Published]) -> None:
    leave_out(store, done[2].version, done[0].version)


Strike = Callable[[Path, tuple[State, ...], list[Published]], None]


@pytest.mark.parametrize("strike", [_forged, _left_out])
def test_a_wrong_delta_is_refused_by_every_rank_before_it_is_written(
    chain: tuple[Path, list[Published]],
    states: tuple[State, ...],
    stack: ExitStack,
    strike: Strike,
) -> None:
    """Every path to the version goes by the delta. The loaded version stays, and the engine goes on
    once the store is whole."""
    store, done = chain
    engine = Engine(store.parent, [Rank(0), Rank(1)], stack)
    before = 0 if strike is _left_out else 1
    engine.load(done[before])
    index = store / "weight_v000003"
    whole = {path: path.read_bytes() for path in index.iterdir()}
    strike(store, states, done)
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"in this engine's ranks would not be the published"):
            engine.load(done[2])
        assert engine.versions() == [before + 1] * 2
        assert engine.holds(states[before])
    assert [sums["refused"] for sums in engine.sums()] == [2, 2]
    for path, content in whole.items():
        path.write_bytes(content)
    verdict = engine.load(done[2])
    assert (verdict.verified, verdict.unseen) == (2, 0)
    assert engine.holds(states[2])


def test_today_s_ranks_alone_take_a_forged_delta(
    chain: tuple[Path, list[Published]], states: tuple[State, ...], stack: ExitStack
) -> None:
    """What an executor that carries no sums leaves: the tensors count as unseen."""
    store, done = chain
    engine = Engine(store.parent, [Rank(0), Rank(1)], stack)
    _forged(store, states, done)
    for weights in engine.weights:
        for number in (1, 2):
            weights.load(RequestedVersion(store="store", version=done[number].version))
    assert not engine.holds(states[2])
    assert engine.sums() == [{"verified": 0, "unseen": 2, "refused": 0}] * 2


def test_a_wrong_delta_is_passed_by_an_anchor(
    tmp_path: Path, states: tuple[State, ...], stack: ExitStack
) -> None:
    with Publisher(tmp_path / "store", versions=VersionSettings(anchor_every=2)) as publisher:
        done = [publisher.publish(state) for state in states[:3]]
    engine = Engine(tmp_path, [Rank(0), Rank(1)], stack)
    engine.load(done[1])
    _forged(tmp_path / "store", states, done)
    verdict = engine.load(done[2])
    assert (verdict.wrong, verdict.verified) == ((), 2)
    assert engine.calls[1:] == [SUMS_METHOD] * 2
    assert engine.holds(states[2])
    assert [weights.report()["from_full"] for weights in engine.weights] == [True] * 2
    assert [weights.report()["reapplied"] for weights in engine.weights] == [1] * 2


def test_a_version_without_sums_is_unseen(
    tmp_path: Path, states: tuple[State, ...], stack: ExitStack
) -> None:
    """As in stores for other systems, and in those of earlier publishers."""
    with Publisher(
        tmp_path / "store", versions=VersionSettings(encoding=Encoding.XOR)
    ) as publisher:
        done = [publisher.publish(state) for state in states[:2]]
    engine = Engine(tmp_path, [Rank(0), Rank(1)], stack)
    for number in (0, 1):
        engine.load(done[number])
        assert engine.holds(states[number])
    assert engine.sums() == [{"verified": 0, "unseen": 2, "refused": 0}] * 2


def test_a_rank_that_cannot_prepare_a_version_holds_back_all(
    published: tuple[Path, list[Published]], states: tuple[State, ...], stack: ExitStack
) -> None:
    store, done = published
    engine = Engine(store.parent, [Rank(0), Rank(1)], stack)
    engine.load(done[0])
    prepare = engine.weights[1]._prepared

    def failing(*_: object) -> Any:
        engine.weights[1]._prepared = prepare  # type: ignore[method-assign]
        raise Stale("no store here")

    engine.weights[1]._prepared = failing  # type: ignore[method-assign]
    with pytest.raises(Corrupt, match="another rank refuses it: Stale: no store here"):
        engine.load(done[1])
    assert engine.versions() == [1, 1]
    assert engine.holds(states[0])
    engine.load(done[1])
    assert engine.holds(states[1])
    assert [sums["refused"] for sums in engine.sums()] == [0, 0]


class Executor:
    """Reaches its ranks as vLLM's does."""

    def __init__(self, ranks: int, answers: dict[str, list[Any]]) -> None:
        transfer = SimpleNamespace(backend="rosemux")
        self.vllm_config = SimpleNamespace(weight_transfer_config=transfer)
        self.parallel_config = SimpleNamespace(world_size=ranks)
        self.answers = answers
        self.calls: list[tuple[Any, ...]] = []

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> list[Any]:
        self.calls.append((method, kwargs))
        return self.answers.get(method, [None, None])


def test_an_executor_asks_before_an_update_and_passes_all_else_on() -> None:
    for _ in range(2):
        compare_before_updates(Executor, "rosemux")
    info = {"store": "job", "version": 2}
    executor = Executor(2, {SUMS_METHOD: [RankSums(), RankSums()]})
    executor.collective_rpc("rosemux_stage", kwargs={"store": "job", "version": 2})
    executor.collective_rpc("update_weights", kwargs={"update_info": info})
    executor.collective_rpc("update_weights", None, (), {"update_info": info})
    names = [method for method, _ in executor.calls]
    assert names == ["rosemux_stage", *(SUMS_METHOD, JUDGE_METHOD, "update_weights") * 2]
    assert executor.calls[1][1] == {"update_info": info, "anew": False, "known": ()}
    assert executor.calls[2][1] == {"verdict": Verdict()}


@pytest.mark.parametrize(
    ("ranks", "answers", "info"),
    [
        (1, {}, {"store": "job", "version": 2}),
        (2, {}, [{"store": "job", "version": 2}]),
        (2, {SUMS_METHOD: [None, None]}, {"store": "job", "version": 2}),
    ],
    ids=["one rank", "by rank", "no sums"],
)
def test_an_executor_without_ranks_to_compare_updates_as_ever(
    ranks: int, answers: dict[str, list[Any]], info: Any
) -> None:
    compare_before_updates(Executor, "rosemux")
    executor = Executor(ranks, answers)
    executor.collective_rpc("update_weights", kwargs={"update_info": info})
    assert [m for m, _ in executor.calls if m != SUMS_METHOD] == ["update_weights"]
