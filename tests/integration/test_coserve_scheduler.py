"""The guest's scheduler over vLLM's own class: its answers to the engine loop. No engine runs."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from coserve.guest.guest_slot import GuestSlot
from coserve.law.work_gate import WorkGate
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.errors import Unsupported
from harvester.contracts.page import Grant, GrantMode, PageDirectory

pytestmark = pytest.mark.engine

pytest.importorskip("vllm")
from vllm.v1.core.sched.interface import PauseState  # noqa: E402

HOUR_NS = 3_600_000_000_000


class Core:
    """The part of the engine core that the scheduler uses."""

    def __init__(self) -> None:
        self.running = True
        self.ended: list[str] = []

    def is_running(self) -> bool:
        return self.running

    def _send_abort_outputs(self, aborted: list[str]) -> None:
        self.ended += aborted


class Waker:
    def __init__(self) -> None:
        self.armed = 0

    def arm(self) -> None:
        self.armed += 1


class Weights:
    """The executor that moves them, and in which order it changed beside the budget."""

    def __init__(self, log: list[str]) -> None:
        self.is_sleeping = False
        self._log = log

    def sleep(self, _level: int) -> None:
        self.is_sleeping = True
        self._log.append("weights away")

    def wake_up(self, _tags: None) -> None:
        self.is_sleeping = False
        self._log.append("weights back")


class Scene:
    """A scheduler with requests; the test plays its upstream half."""

    def __init__(self, path: Path, scheduler_class: Any) -> None:
        self.directory = PageDirectory.create(path)
        self._grants = self.directory.grant_writer()
        self.core, self.waker = Core(), Waker()
        scheduler = self.scheduler = object.__new__(scheduler_class)
        scheduler._slot = GuestSlot(path, token_limit=512)
        scheduler._token_limit = 512
        scheduler._core, scheduler._waker = self.core, self.waker
        scheduler._measure_load = scheduler._measure_step = lambda: None
        scheduler._kv = SimpleNamespace(tokens_withheld=0, blocks_usable=0, keep_within=lambda _: 0)
        scheduler._prefixes = SimpleNamespace(
            make_room=lambda *_, **__: None, keep_within=lambda *_, **__: None
        )
        scheduler._retains, scheduler._clock = False, MonotonicClock()
        scheduler.waiting = []
        scheduler.block_size = 16
        scheduler.requests = dict.fromkeys(("a", "b"), SimpleNamespace(num_tokens=1))
        scheduler.running = []
        scheduler._pause_state = PauseState.UNPAUSED
        scheduler.finished_req_ids = set()
        scheduler.finish_requests = self._finish
        scheduler.has_unfinished_requests = lambda: bool(scheduler.requests)

    def _finish(self, request_ids: list[str], _status: Any) -> list[str]:
        for request_id in request_ids:
            del self.scheduler.requests[request_id]
        self.scheduler.finished_req_ids |= set(request_ids)
        return list(request_ids)

    def admits(self) -> bool:
        """Asks like the loop: is there work, and may a step be launched."""
        self.scheduler.has_requests()
        return bool(self.scheduler.admits())

    def flushes(self) -> bool:
        """A step without tokens is admitted, after which the workers know the ended requests."""
        admitted = self.admits() and self.scheduler._granted_tokens == 0
        self.scheduler.finished_req_ids.clear()
        return admitted

    def grant(
        self,
        *,
        mode: GrantMode = GrantMode.UNGATED,
        ttl_ns: int = HOUR_NS,
        asleep: bool = False,
        abort_grace_s: float = 0.0,
    ) -> None:
        grant = Grant(epoch=1, mode=mode, abort_grace_s=abort_grace_s, asleep=asleep)
        self._grants.write(grant, now_ns=monotonic_ns(), ttl_ns=ttl_ns)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from coserve.vllm.scheduler import CoserveScheduler

    scene = Scene(tmp_path, CoserveScheduler)

    def has_requests(self: Any) -> bool:
        # Like upstream: aborted requests count until a step has told the workers.
        return bool(self.requests) or bool(self.finished_req_ids)

    monkeypatch.setattr(AsyncScheduler, "has_requests", has_requests)
    scene.grant()
    return scene


def test_admits_a_step_while_the_gate_is_open(scene: Scene) -> None:
    assert scene.admits()
    assert scene.waker.armed == 0


def test_admits_none_and_asks_to_be_woken_while_the_gate_is_closed(scene: Scene) -> None:
    scene.grant(mode=GrantMode.CLOSED)
    assert not scene.admits()
    assert scene.waker.armed == 1
    assert scene.core.ended == []
    assert scene.scheduler.has_requests(), "what there is to do is told truly"


def test_within_a_step_an_admission_holds_once(scene: Scene) -> None:
    assert scene.admits()
    scene.scheduler.in_step = True
    assert scene.scheduler.has_requests()
    scene.scheduler._granted_tokens = None
    assert not scene.scheduler.has_requests()


def test_a_turn_that_ended_behind_a_closed_gate_leaves_an_idle_engine(scene: Scene) -> None:
    scene.grant(mode=GrantMode.CLOSED)
    scene.scheduler._abort(["a"])
    assert not scene.admits(), "the other one waits"
    scene.scheduler._abort(["b"])
    assert scene.flushes()
    assert not scene.scheduler.has_requests()
    assert not scene.admits()


@pytest.mark.parametrize("state", ["PAUSED_NEW", "PAUSED_ALL", "UNPAUSED"])
def test_a_pause_that_waits_for_turns_gives_up_on_them_after_the_grace(
    scene: Scene, state: str
) -> None:
    scene.grant(mode=GrantMode.CLOSED)
    scene.scheduler._pause_state = PauseState[state]
    scene.admits()
    assert scene.core.ended == (["a", "b"] if state == "PAUSED_NEW" else [])


def test_the_grace_of_a_pause_begins_again_with_each_pause_and_step(scene: Scene) -> None:
    scheduler = scene.scheduler
    scene.grant(mode=GrantMode.CLOSED, abort_grace_s=60.0)
    scheduler._pause_state = PauseState.PAUSED_NEW
    assert not scene.admits()
    assert 0 < scheduler.sleep_s <= 60.0
    scheduler._pause_state = PauseState.UNPAUSED
    assert not scene.admits()
    assert scheduler.sleep_s is None
    scheduler._pause_state = PauseState.PAUSED_NEW
    assert not scene.admits()
    assert scheduler.sleep_s is not None
    scene.grant()
    assert scene.admits()
    assert scheduler.sleep_s is None


def test_without_requests_the_waker_is_not_armed(scene: Scene) -> None:
    scene.scheduler.requests.clear()
    scene.grant(mode=GrantMode.CLOSED)
    assert not scene.admits()
    assert scene.waker.armed == 0


def test_an_engine_loop_without_a_gate_takes_no_step(scene: Scene) -> None:
    assert scene.scheduler.has_requests()
    with pytest.raises(Unsupported, match="data-parallel"):
        scene.scheduler.schedule()


def test_gives_everything_back_once_the_grace_is_over(scene: Scene) -> None:
    scene.admits()
    scene.grant(ttl_ns=0)
    assert scene.flushes()
    assert scene.core.ended == ["a", "b"]
    assert not scene.admits()
    assert scene.core.ended == ["a", "b"], "and once only"


def test_a_grant_that_is_back_before_the_loop_wakes_aborts_nothing(scene: Scene) -> None:
    scene.admits()
    scene.grant(ttl_ns=0)
    scene.scheduler._slot.decide()
    scene.grant()
    assert scene.admits()
    assert scene.core.ended == []


@pytest.mark.parametrize("queue", ["waiting", "skipped_waiting"])
def test_a_turn_that_the_budget_cannot_hold_does_not_wait_for_ever(
    scene: Scene, queue: str
) -> None:
    """Also where a step has passed it over: up to 0.30 it then waits in a queue of its own."""
    scheduler = scene.scheduler
    scheduler._kv = SimpleNamespace(tokens_withheld=900, tokens_total=1000, keep_within=lambda _: 0)
    setattr(scheduler, queue, [SimpleNamespace(request_id="a", num_tokens=100)])
    scheduler._slot.kv_obeyed_tokens = scheduler._slot.kv_budget_tokens()
    assert scene.admits(), "the other turn goes on"
    assert scene.core.ended == ["a"]
    assert list(scheduler.requests) == ["b"]


def test_a_guest_that_shuts_down_ends_its_requests_instead_of_stepping_ungated(
    scene: Scene,
) -> None:
    scene.grant(mode=GrantMode.CLOSED)
    scene.core.running = False
    assert scene.admits(), "the workers are told"
    assert scene.core.ended == ["a", "b"]
    scene.scheduler.finished_req_ids.clear()
    assert not scene.scheduler.has_requests()
    assert not scene.admits()


@pytest.mark.timeout(60)
def test_a_guest_whose_grant_stays_away_does_not_spin(scene: Scene) -> None:
    from coserve.vllm.waker import Waker as RealWaker

    scene.admits()
    scene.grant(ttl_ns=0)
    woken = threading.Semaphore(0)
    waker = scene.scheduler._waker = RealWaker(scene.scheduler._slot, woken.release)
    waker.start()
    wakes = 0
    assert scene.flushes()
    while woken.acquire(timeout=0.3):
        wakes += 1
        assert not scene.admits()
        assert wakes < 5
    waker.stop()
    waker.join(timeout=5.0)


class Sleeper:
    """A guest that moves its weights to host memory, with a pool of four blocks of 16 tokens."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.log = scene, list[str]()
        self.usable = 4
        scheduler = scene.scheduler
        self.weights = scene.core.model_executor = Weights(self.log)
        scheduler._slot.sleeps = True
        scheduler._work = WorkGate(scene.directory)
        scheduler.block_size, scheduler._extended = 16, False
        scheduler._ask_workers = lambda: None
        scheduler._kv = SimpleNamespace(tokens_withheld=0, keep_within=self._keep)
        scheduler.finish_requests = self._finish
        scene.core.batch_queue = []

    def _keep(self, budget: int | None) -> int:
        self.usable = 4 if budget is None else 0
        self.scene.scheduler._kv.blocks_usable = self.usable
        self.log.append(f"{self.usable} blocks")
        return 64 if self.scene.scheduler.requests and budget == 0 else 0

    def _finish(self, request_ids: list[str], _status: Any) -> list[str]:
        self.log.append("aborted")
        self.scene.scheduler.requests.clear()
        self.scene.scheduler.running.clear()
        return list(request_ids)

    def slept(self) -> bool:
        self.scene.grant(mode=GrantMode.CLOSED, asleep=True)
        self.scene.scheduler._slot.decide()
        self.scene.scheduler.has_requests()
        return self.weights.is_sleeping


@pytest.fixture
def sleeper(scene: Scene) -> Sleeper:
    scene.scheduler.running = [
        SimpleNamespace(request_id="a", arrival_time=0.0, num_computed_tokens=64)
    ]
    scene.scheduler.has_requests()
    return Sleeper(scene)


def test_weights_go_once_everything_else_has_gone(scene: Scene, sleeper: Sleeper) -> None:
    assert sleeper.slept()
    assert sleeper.log == ["0 blocks", "0 blocks", "aborted", "0 blocks", "weights away"]
    assert scene.scheduler._slot.load.weights_away
    assert sleeper.slept()
    assert sleeper.log.count("weights away") == 1


def test_weights_wait_for_a_step_that_was_launched(scene: Scene, sleeper: Sleeper) -> None:
    scene.core.batch_queue = ["a step"]
    assert not sleeper.slept()
    assert scene.scheduler._slot.owes_memory(), "the loop is woken again"
    scene.core.batch_queue = []
    assert sleeper.slept()
    assert not scene.scheduler._slot.owes_memory()


def test_weights_are_back_before_the_first_block_is(scene: Scene, sleeper: Sleeper) -> None:
    sleeper.slept()
    sleeper.log.clear()
    scene.grant()
    scene.scheduler._slot.decide()
    scene.scheduler.has_requests()
    assert sleeper.log == ["weights back", "4 blocks"]
    assert not scene.scheduler._slot.load.weights_away


def test_weights_wait_for_slack_before_they_wake(
    scene: Scene, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper.slept()
    sleeper.log.clear()
    slack = [False]
    monkeypatch.setattr(scene.scheduler._work, "admits", lambda kind: slack[0])
    scene.scheduler.requests = {"b": SimpleNamespace(num_tokens=10)}
    scene.scheduler.waiting = [SimpleNamespace(request_id="b", num_tokens=10)]
    scene.scheduler._kv.tokens_withheld = 64
    scene.grant()
    for _ in range(3):
        assert not scene.admits()
    assert sleeper.log == [], "nothing is mapped or handed out, and the turn waits"
    assert list(scene.scheduler.requests) == ["b"]
    slack[0] = True
    scene.scheduler._kv.tokens_withheld = 0
    assert scene.admits()
    assert sleeper.log == ["weights back", "4 blocks"]


def test_no_step_starts_without_weights(
    scene: Scene, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper.slept()
    scene.scheduler.requests = {"b": SimpleNamespace(num_tokens=10)}
    # A grant comes after sleep was followed and before the gate is asked.
    monkeypatch.setattr(scene.scheduler, "_keep_within_budget", scene.grant)
    armed = scene.waker.armed
    assert not scene.admits()
    assert scene.waker.armed == armed, "no loop and waker that call each other without a pause"
    assert scene.scheduler._slot.owes_memory(), "the waker comes by itself"
    monkeypatch.undo()


def test_an_agent_that_is_gone_neither_wakes_nor_lays_down(scene: Scene, sleeper: Sleeper) -> None:
    slot = scene.scheduler._slot
    slot.granted = msgspec.structs.replace(slot.granted, abort_grace_s=60.0)
    scene.grant(ttl_ns=0)
    scene.scheduler._slot.decide()
    scene.scheduler.has_requests()
    assert not sleeper.weights.is_sleeping
    assert sleeper.log == []
