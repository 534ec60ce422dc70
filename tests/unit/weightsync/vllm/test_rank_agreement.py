"""All ranks of an engine together find out that a version is not the trainer's."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from harvester.contracts.errors import Corrupt, Stale
from tests.unit.weightsync.vllm.forged_delta import forge_delta, leave_out
from tests.unit.weightsync.vllm.test_rank_map import PPMissingLayer, Rank
from weightsync.elements.bits import bits_of
from weightsync.encoding.codec import Encoding
from weightsync.publish.settings import VersionSettings, WorkSettings
from weightsync.publish.trainer_state import ShardSlice
from weightsync.publisher import Published, Publisher
from weightsync.receive.rank_sums import RankSums, SumJudge, SumVerdict, without_boxes
from weightsync.transport.location import StoreRoot
from weightsync.vllm.engine_weights import EngineWeights
from weightsync.vllm.prepared_version import RequestedVersion
from weightsync.vllm.rank_agreement import (
    JUDGE_METHOD,
    SUMS_METHOD,
    agreed,
    compare_before_updates,
    follow_ray,
    staged,
)
from weightsync.vllm.stager import StageState

State = dict[str, torch.Tensor]
STAGE = "rosemux_stage"


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
        if method == JUDGE_METHOD:
            return [weights.judge(given["verdict"]) for weights in self.weights]
        wanted, known = given["update_info"], given["known"]
        return [
            without_boxes(weights.sums(wanted, anew=given["anew"]), known)
            for weights in self.weights
        ]

    def stage(self, published: Published) -> list[dict[str, str]]:
        """As a gateway does: until no rank is at work."""
        request = RequestedVersion(store="store", version=published.version)
        states = {StageState.RUNNING}

        def call() -> list[Any]:
            return [asdict(weights.stage(request)) for weights in self.weights]

        while StageState.RUNNING in states:
            statuses = staged(call, self._ask, self.judge, request)  # type: ignore[arg-type]
            states = {StageState(status["state"]) for status in statuses}
        return statuses

    def load(self, published: Published) -> SumVerdict:
        """Raises what the first rank raises, once every rank has heard the update."""
        wanted = RequestedVersion(
            store="store", version=published.version, state_hash=published.state_hash
        )
        verdict = agreed(self._ask, self.judge, wanted)  # type: ignore[arg-type]
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
        with pytest.raises(
            Corrupt, match=r"in this engine's ranks would not be the published state"
        ):
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
    """An executor that carries no sums leaves them so: the tensors count as unseen."""
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


def test_a_staged_version_is_compared_before_it_is_ready(
    published: tuple[Path, list[Published]], states: tuple[State, ...], stack: ExitStack
) -> None:
    """It is not prepared again for its load."""
    store, done = published
    engine = Engine(store.parent, [Rank(0), Rank(1)], stack)
    for number in (0, 1, 2):
        for _ in range(2):
            assert [status["state"] for status in engine.stage(done[number])] == ["ready"] * 2
        shutil.move(store, store.with_name("away"))
        verdict = engine.load(done[number])
        shutil.move(store.with_name("away"), store)
        assert engine.holds(states[number])
        assert verdict.verified == (0 if number == 0 else 2)


def test_a_version_that_ranks_will_refuse_is_not_staged(
    chain: tuple[Path, list[Published]], states: tuple[State, ...], stack: ExitStack
) -> None:
    store, done = chain
    engine = Engine(store.parent, [Rank(0), Rank(1)], stack)
    engine.load(done[1])
    whole = {path: path.read_bytes() for path in (store / "weight_v000003").iterdir()}
    _forged(store, states, done)
    for _ in range(2):
        statuses = engine.stage(done[2])
        assert [status["state"] for status in statuses] == ["failed"] * 2
        assert "in this engine's ranks would not be the published state" in statuses[0]["message"]
    for path, content in whole.items():
        path.write_bytes(content)
    assert [status["state"] for status in engine.stage(done[2])] == ["ready"] * 2
    engine.load(done[2])
    assert engine.holds(states[2])


def test_a_wrong_delta_is_passed_by_an_anchor_while_the_version_is_staged(
    tmp_path: Path, states: tuple[State, ...], stack: ExitStack
) -> None:
    """The pause then writes what is prepared already."""
    with Publisher(tmp_path / "store", versions=VersionSettings(anchor_every=2)) as publisher:
        done = [publisher.publish(state) for state in states[:3]]
    engine = Engine(tmp_path, [Rank(0), Rank(1)], stack)
    engine.load(done[1])
    _forged(tmp_path / "store", states, done)
    assert [status["state"] for status in engine.stage(done[2])] == ["ready"] * 2
    shutil.rmtree(tmp_path / "store")
    verdict = engine.load(done[2])
    assert (verdict.wrong, verdict.verified) == ((), 2)
    assert engine.holds(states[2])
    assert [weights.report()["reapplied"] for weights in engine.weights] == [1] * 2


def test_a_rank_that_cannot_prepare_a_version_holds_back_all(
    published: tuple[Path, list[Published]], states: tuple[State, ...], stack: ExitStack
) -> None:
    store, done = published
    engine = Engine(store.parent, [Rank(0), Rank(1)], stack)
    engine.load(done[0])
    preparer = engine.weights[1]._preparer
    prepare = preparer.prepared

    def failing(*_: object) -> Any:
        preparer.prepared = prepare  # type: ignore[method-assign]
        raise Stale("no store here")

    preparer.prepared = failing  # type: ignore[method-assign]
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
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=transfer, parallel_config=SimpleNamespace(world_size=ranks)
        )
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
    answers = {SUMS_METHOD: [RankSums(), RankSums()], STAGE: [{"state": "running"}] * 2}
    executor = Executor(2, answers)
    executor.collective_rpc(STAGE, kwargs=info)
    executor.collective_rpc("update_weights", kwargs={"update_info": info})
    executor.collective_rpc("update_weights", None, (), {"update_info": info})
    names = [method for method, _ in executor.calls]
    assert names == [STAGE, *(SUMS_METHOD, JUDGE_METHOD, "update_weights") * 2]
    assert executor.calls[1][1] == {"update_info": info, "anew": False, "known": ()}
    assert executor.calls[2][1] == {"verdict": SumVerdict()}


def test_an_executor_compares_a_version_that_all_ranks_have_staged() -> None:
    compare_before_updates(Executor, "rosemux")
    info = {"store": "job", "version": 2}
    for states, compared in ((["ready", "running"], False), (["ready"] * 2, True)):
        statuses = [{"state": state} for state in states]
        executor = Executor(2, {SUMS_METHOD: [RankSums(), RankSums()], STAGE: statuses})
        assert executor.collective_rpc(STAGE, kwargs=info) == statuses
        names = [method for method, _ in executor.calls]
        assert names == [STAGE, *(SUMS_METHOD, JUDGE_METHOD) * compared]
        assert executor.calls[0][1] == info


@pytest.mark.parametrize(
    ("ranks", "info"),
    [(1, {"store": "job", "version": 2}), (2, [{"store": "job", "version": 2}])],
    ids=["one rank", "by rank"],
)
def test_an_executor_without_ranks_to_compare_updates_as_ever(ranks: int, info: Any) -> None:
    compare_before_updates(Executor, "rosemux")
    executor = Executor(ranks, {})
    executor.collective_rpc("update_weights", kwargs={"update_info": info})
    assert executor.calls == [("update_weights", {"update_info": info})]


@pytest.mark.parametrize(("uses_ray", "compares"), [(True, True), (False, False)])
def test_an_executor_on_ray_with_calls_of_its_own_compares_from_when_it_is_made(
    uses_ray: bool, compares: bool
) -> None:
    """As vLLM's legacy one; other executors of an operator's are left as they are."""

    class Base:
        def __init__(self, _vllm_config: Any) -> None:
            raise NotImplementedError

    class Own(Executor, Base):
        def __init__(self, vllm_config: Any) -> None:
            Executor.__init__(self, 2, {SUMS_METHOD: [RankSums(), RankSums()]})
            with pytest.raises(NotImplementedError):
                Base.__init__(self, vllm_config)

        def collective_rpc(self, method: str, **named: Any) -> list[Any]:  # type: ignore[override]
            self.calls.append((method, named["kwargs"]))
            return self.answers.get(method, [None, None])

    Own.uses_ray = uses_ray  # type: ignore[attr-defined]
    for _ in range(2):
        follow_ray(Base, "rosemux")
    executor = Own(None)
    executor.collective_rpc("update_weights", kwargs={"update_info": {"store": "job"}})
    names = [method for method, _ in executor.calls]
    assert names == [*(SUMS_METHOD, JUDGE_METHOD) * compares, "update_weights"]


class Fused(torch.nn.Module):
    """One of several as vLLM's layers cut: fused projections, key heads on two ranks each, columns,
    a vocabulary, experts of which each is cut, and a norm."""

    SHAPES: ClassVar = {
        "embed": (12, 6),
        "q": (8, 6),
        "k": (4, 6),
        "o": (6, 8),
        "gate": (8, 6),
        "up": (8, 6),
        "experts": (3, 8, 6),
        "norm": (6,),
    }

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.qkv = torch.nn.Parameter(torch.zeros(8 // ranks + 2, 6).bfloat16(), False)
        self.gate_up = torch.nn.Parameter(torch.zeros(16 // ranks, 6).bfloat16(), False)
        self.o = torch.nn.Parameter(torch.zeros(6, 8 // ranks).bfloat16(), False)
        self.embed = torch.nn.Parameter(torch.zeros(12 // ranks, 6).bfloat16(), False)
        self.experts = torch.nn.Parameter(torch.zeros(3, 8 // ranks, 6).bfloat16(), False)
        self.norm = torch.nn.Parameter(torch.zeros(6).bfloat16(), False)

    def _copies(
        self, name: str, whole: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        def mine(dim: int) -> torch.Tensor:
            size = whole.shape[dim] // self.ranks
            return whole.narrow(dim, self.rank * size, size)

        queries = 8 // self.ranks
        if name == "k":
            yield self.qkv[queries:], whole.narrow(0, 2 * (2 * self.rank // self.ranks), 2)
        elif name == "q":
            yield self.qkv[:queries], mine(0)
        elif name in {"gate", "up"}:
            yield self.gate_up.chunk(2)[name == "up"], mine(0)
        elif name == "experts":
            for expert in range(3):
                size = 8 // self.ranks
                yield self.experts[expert], whole[expert].narrow(0, self.rank * size, size)
        elif name == "norm":
            yield self.norm, whole
        else:
            yield getattr(self, name), mine(int(name == "o"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            for held, part in self._copies(name, tensor):
                held.data.copy_(part)

    def holds(self, state: State) -> bool:
        return all(
            torch.equal(held, part)
            for name, tensor in state.items()
            for held, part in self._copies(name, tensor)
        )


def _fused_states() -> list[State]:
    generator = torch.Generator().manual_seed(0)
    first = {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in Fused.SHAPES.items()
    }
    return [first, *({n: t + step for n, t in first.items()} for step in (1, 2))]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [n for n in Fused.SHAPES if n != "norm"])
def test_a_forged_delta_of_any_layer_is_found(
    tmp_path: Path, stack: ExitStack, ranks: int, name: str
) -> None:
    """In one element, which one rank has, or two of four ranks with the same key heads."""
    states = _fused_states()
    with Publisher(tmp_path / "store") as publisher:
        done = [publisher.publish(state) for state in states]
    engine = Engine(tmp_path, [Fused(rank, ranks) for rank in range(ranks)], stack)
    for number in (0, 1):
        engine.load(done[number])
        assert engine.holds(states[number])
    assert engine.sums()[0] == {"verified": 7, "unseen": 0, "refused": 0}
    wrong = states[2][name].clone()
    wrong.view(torch.int16).view(-1)[-1] ^= 1
    forge_delta(tmp_path / "store", done[2].version, name, bits_of(states[1][name]), bits_of(wrong))
    with pytest.raises(Corrupt, match=f"{name} in this engine's ranks"):
        engine.load(done[2])
    assert engine.holds(states[1])


class Stage(torch.nn.Module):
    """The half of a pipeline with one layer, or the experts' rank with one expert: all of it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = torch.nn.Parameter(torch.zeros(5, 4).bfloat16(), False)
        self.add_module(f"layer{1 - number}", PPMissingLayer())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == f"layer{self.number}.weight":
                self.weight.data.copy_(tensor)

    def holds(self, state: State) -> bool:
        return torch.equal(self.weight, state[f"layer{self.number}.weight"])


def test_stages_of_a_pipeline_have_no_boxes_and_refuse_alone(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Published digests are of all that a stage has. No stage takes a version that
    another refuses."""
    states = [
        {f"layer{n}.weight": torch.full((5, 4), s + n).bfloat16() for n in range(2)}
        for s in range(3)
    ]
    with Publisher(tmp_path / "store") as publisher:
        done = [publisher.publish(state) for state in states]
    engine = Engine(tmp_path, [Stage(0), Stage(1)], stack)
    for number in (0, 1):
        engine.load(done[number])
    assert engine.sums() == [{"verified": 0, "unseen": 0, "refused": 0}] * 2
    old, new = (bits_of(states[s]["layer1.weight"]) for s in (1, 2))
    wrong = new.copy()
    wrong[0] ^= 1
    forge_delta(tmp_path / "store", done[2].version, "layer1.weight", old, wrong)
    with pytest.raises(Corrupt, match="another rank refuses it: Corrupt"):
        engine.load(done[2])
    assert engine.versions() == [2, 2]
    assert engine.holds(states[1])


@pytest.mark.parametrize("trainers", [2, 3])
def test_slices_of_a_sharded_trainer_add_up_to_the_sums_of_tensors(
    tmp_path: Path, stack: ExitStack, trainers: int
) -> None:
    """The trainer's cuts are others than the engine's."""
    states = _fused_states()

    def publish(number: int) -> list[Published]:
        with Publisher(tmp_path / "store", rank=number, ranks=trainers) as publisher:
            return [publisher.publish(_slices(state, number, trainers)) for state in states]

    with ThreadPoolExecutor(trainers) as pool:
        done = next(iter(pool.map(publish, range(trainers))))
    engine = Engine(tmp_path, [Fused(rank, 2) for rank in range(2)], stack)
    for number in range(3):
        engine.load(done[number])
        assert engine.holds(states[number])
        assert engine.sums()[1] == {"verified": 7, "unseen": 0, "refused": 0}


def _slices(state: State, number: int, trainers: int) -> list[tuple[str, ShardSlice]]:
    parts = []
    for name, tensor in state.items():
        chunks = tensor.chunk(trainers)
        if number < len(chunks):
            at = sum(len(chunk) for chunk in chunks[:number])
            parts.append((name, ShardSlice(chunks[number], tensor.shape, 0, at)))
    return parts


def test_a_restarted_trainer_finds_its_sums(
    tmp_path: Path, states: tuple[State, ...], stack: ExitStack
) -> None:
    """Its copy outlives the process, and has none: damage to a recorded one would be believed."""
    done = []
    for state in states[:4]:
        work = WorkSettings(copy_dir=tmp_path / "copy")
        with Publisher(tmp_path / "store", work=work) as publisher:
            done.append(publisher.publish(state))
    assert [published.is_full for published in done] == [True, False, False, False]
    engine = Engine(tmp_path, [Rank(0), Rank(1)], stack)
    for number in range(4):
        engine.load(done[number])
        assert engine.holds(states[number])
        assert engine.sums()[0] == {"verified": 2, "unseen": 0, "refused": 0}


def test_a_sum_that_was_counted_wrong_is_so_until_the_next_full_checkpoint(
    tmp_path: Path,
    states: tuple[State, ...],
    stack: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise every engine of several ranks would refuse its trainer for good."""
    with Publisher(tmp_path / "store", versions=VersionSettings(anchor_every=3)) as publisher:
        done = [publisher.publish(states[0])]
        publisher._copy.sums["layer.weight"] ^= 1
        done += [publisher.publish(state) for state in states[1:6]]
    assert "layer.weight and 0 more had wrong sums until now" in caplog.text
    engine = Engine(tmp_path, [Rank(0), Rank(1)], stack)
    engine.load(done[0])
    for number in (1, 2):
        with pytest.raises(Corrupt, match=r"layer\.weight in this engine's ranks"):
            engine.load(done[number])
    for number in (3, 4, 5):
        engine.load(done[number])
        assert engine.holds(states[number])
        assert engine.sums()[0]["verified"] == 2
