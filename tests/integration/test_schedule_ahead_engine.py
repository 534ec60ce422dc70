"""vLLM's own engine loop with a batch queue two deep, the gated scheduler in it, a fake executor.

On a CPU vLLM never schedules ahead. Here the core, its loop, its scheduler and queue are vLLM's,
and a step ends when the test says so: the executor hands out futures, as one on a GPU does.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from coserve.vllm.environment import ENGINE_VARIABLE, ROLE_VARIABLE, Role
from examples.grpo.model import write_checkpoint
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.page import Grant, GrantMode, Guest, PageDirectory, Pulse
from harvester.contracts.page.directory import DIRECTORY_VARIABLE
from tests.integration.engine_slot import SHAPE

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

DEPTH = 2
HOUR_NS = 3_600_000_000_000
WITHIN_S = 60.0
SCHEDULER = "coserve.vllm.scheduler.CoserveScheduler"
PULSE = "pulse.prod.0"


class FakeWorkers:
    """Steps in the order of their launch; each ends when it is released."""

    def __init__(self) -> None:
        self.launched: list[dict[str, int]] = []
        """Tokens by request."""
        self._unfinished: queue.Queue[tuple[Future[Any], Any]] = queue.Queue()

    def launch(self, tokens: dict[str, int], output: Any) -> "Future[Any]":
        self.launched.append(tokens)
        future: Future[Any] = Future()
        self._unfinished.put((future, output))
        return future

    def release(self) -> None:
        future, output = self._unfinished.get(timeout=WITHIN_S)
        future.set_result(output)

    @property
    def running(self) -> int:
        return self._unfinished.qsize()


def executor_class(workers: FakeWorkers) -> Any:
    import torch
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

    layer = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    said = {
        "get_kv_cache_spec": {"layer.0": layer},
        "get_supported_kv_cache_layouts": ["LBNHC"],
        "determine_available_memory": 8 << 20,
    }

    class FakeExecutor(Executor):
        def _init_executor(self) -> None:
            self._scheduled: Any = None

        def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
            return [] if method == "compile_or_warm_up_model" else [said.get(method)]

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            assert non_block
            self._scheduled = scheduler_output
            done: Future[Any] = Future()
            empty = scheduler_output.total_num_scheduled_tokens == 0
            done.set_result(EMPTY_MODEL_RUNNER_OUTPUT if empty else None)
            return done

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            tokens = dict(self._scheduled.num_scheduled_tokens)
            output = ModelRunnerOutput(
                req_ids=list(tokens),
                req_id_to_index={name: place for place, name in enumerate(tokens)},
                sampled_token_ids=[[7] for _ in tokens],
            )
            return workers.launch(tokens, output)

        def check_health(self) -> None:
            pass

    return FakeExecutor


class Scene:
    """A guest's engine loop in a thread; agent and production are the test."""

    def __init__(self, root: Path, pages: PageDirectory) -> None:
        self.pages = pages
        self.workers = FakeWorkers()
        self._calls = 0
        self._grants, self._pulses = pages.grant_writer(), pages.pulse_writer("prod", 0)
        self._granting, self._over = threading.Lock(), threading.Event()
        self.pulse()
        self.grant()
        self._renewing = threading.Thread(target=self._agent, daemon=True)
        self._renewing.start()
        self.core = self._made(root)
        self._loop = threading.Thread(target=self._run, daemon=True)
        self._loop.start()

    def grant(self, mode: GrantMode = GrantMode.OPEN, *, abort_grace_s: float = 60.0) -> None:
        record = Grant(
            epoch=1,
            mode=mode,
            pulses=(PULSE,),
            ttft_slo_s=1.0,
            epsilon=math.inf,
            abort_grace_s=abort_grace_s,
        )
        with self._granting:
            self._granted = record
            self._grants.write(record, now_ns=monotonic_ns(), ttl_ns=HOUR_NS)

    def _agent(self) -> None:
        """A grant is believed for seconds."""
        while not self._over.wait(1.0):
            with self._granting:
                self._grants.write(self._granted, now_ns=monotonic_ns(), ttl_ns=HOUR_NS)

    def pulse(self, **fields: Any) -> None:
        self._pulses.write(Pulse(**fields), now_ns=monotonic_ns(), ttl_ns=HOUR_NS)

    def production_arrives(self) -> None:
        """A request that has used up its whole slack."""
        arrival_ns = monotonic_ns() - 2_000_000_000
        self.pulse(in_flight=1, waiting=1, oldest_waiting_arrival_ns=arrival_ns, requests_total=1)

    def guest(self) -> Guest:
        reader = self.pages.guest_reader()
        try:
            return reader.read_left().record or Guest()
        finally:
            reader.close()

    def begin(self, name: str, *, max_tokens: int) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType

        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[5, 6, 7, 8],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        added = self.core.preprocess_add_request(request)
        self.core.input_queue.put_nowait((EngineCoreRequestType.ADD, added))

    def abort(self, name: str) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self.core.input_queue.put_nowait((EngineCoreRequestType.ABORT, [name]))

    def ask(self, method: str, *given: Any) -> Callable[[], Any]:
        """Calls a method as a front end does; the answer of vLLM's loop, None until it comes."""
        from vllm.v1.engine import EngineCoreRequestType

        call, self._calls = self._calls, self._calls + 1
        self.core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, call, method, given)))

        def answer() -> Any:
            said = [item[1].utility_output for item in list(self.core.output_queue.queue)]
            return next((one for one in said if one is not None and one.call_id == call), None)

        return answer

    def said(self, method: str, *given: Any) -> Any:
        answer = self.ask(method, *given)
        until(answer, f"{method} is answered")
        return answer()

    def within_loop(self, question: Callable[[], Any]) -> Any:
        """The answer between two steps: within one, vLLM's questions have other answers."""
        self.core.question = question
        return self.said("question").result.result

    def close_the_gate(self, *, abort_grace_s: float = 60.0) -> None:
        """Closes the gate with a turn unfinished and no step left in the queue."""
        until(lambda: self.workers.running == DEPTH, "two steps are launched")
        self.grant(GrantMode.CLOSED, abort_grace_s=abort_grace_s)
        self.workers.release()
        self.workers.release()
        until(lambda: self.guest().steps_finished == DEPTH, "they have ended")
        until(lambda: self.guest().gate == "closed", "the gate is closed")

    def tokens(self) -> dict[str, int]:
        """Number of tokens that came out of the engine so far, by request."""
        found: dict[str, int] = {}
        for item in list(self.core.output_queue.queue):
            for output in item[1].outputs:
                found[output.request_id] = found.get(output.request_id, 0) + len(
                    output.new_token_ids
                )
        return found

    def close(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self._over.set()
        self._renewing.join()
        from vllm.v1.engine.core import EngineShutdownState

        self.core.stopped = True
        self.core.shutdown_state = EngineShutdownState.REQUESTED
        self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        while self._loop.is_alive():
            if self.workers.running:
                self.workers.release()
            self._loop.join(timeout=0.05)
        self.core.scheduler.shutdown()

    def _run(self) -> None:
        with pytest.raises(SystemExit):
            self.core.run_busy_loop()

    def _made(self, root: Path) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState

        class Core(EngineCoreProc):
            """vLLM's, without the sockets to its front end."""

            stopped = False

            def __init__(self, config: Any, workers: FakeWorkers) -> None:
                self.input_queue: Any = queue.Queue()
                self.output_queue: Any = queue.Queue()
                self.engines_running = self.publish_dp_lb_stats = self.has_coordinator = False
                self.process_input_queue_block = True
                self._idle_state_callbacks: list[Any] = []
                self.shutdown_state = EngineShutdownState.RUNNING
                self.engine_index = 0
                EngineCore.__init__(self, config, executor_class(workers), log_stats=False)

            def _handle_shutdown(self) -> bool:
                return not self.stopped

        write_checkpoint(root / "model", SHAPE)
        config = EngineArgs(
            model=str(root / "model"),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            enforce_eager=True,
            scheduler_cls=SCHEDULER,
        ).create_engine_config()
        # The default on a GPU, which the CPU platform takes back.
        config.scheduler_config.async_scheduling = True
        core = Core(config, self.workers)
        assert core.batch_queue_size == DEPTH
        core.scheduler.attach(
            core, lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        )
        return core


def until(holds: Callable[[], object], what: str) -> None:
    clock = MonotonicClock()
    until_s = clock.now() + WITHIN_S
    while not holds():
        if clock.now() > until_s:
            pytest.fail(f"never so: {what}")
        time.sleep(0.005)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    core = pytest.importorskip("vllm.v1.engine.core")
    # Other tests of this process set variables of their own.
    monkeypatch.setattr(core, "enable_envs_cache", lambda: None, raising=False)
    pages = PageDirectory.create(tmp_path / "pages")
    for name, value in {
        ROLE_VARIABLE: Role.GUEST,
        ENGINE_VARIABLE: "guest",
        DIRECTORY_VARIABLE: str(pages.path),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    made = Scene(tmp_path, pages)
    yield made
    made.close()


def test_after_an_arrival_only_the_steps_in_the_queue_run(scene: Scene) -> None:
    workers = scene.workers
    scene.begin("a", max_tokens=8)
    until(lambda: workers.running == DEPTH, "two steps are launched, and none has ended")
    assert workers.launched == [{"a": 4}, {"a": 1}]
    until(lambda: scene.guest().steps_launched == DEPTH, "the page says so")
    assert scene.guest().steps_finished == 0
    scene.production_arrives()
    workers.release()
    until(lambda: scene.tokens() == {"a": 1}, "the first step's token is out")
    workers.release()
    until(lambda: scene.tokens() == {"a": 2}, "the second one's too")
    until(lambda: scene.guest().gate == "closed", "the gate is closed")
    assert scene.guest().reason == "no_slack"
    assert (scene.guest().steps_launched, scene.guest().steps_finished) == (DEPTH, DEPTH)
    assert len(workers.launched) == DEPTH, "nothing was launched after the arrival"
    scene.pulse(requests_total=1)
    until(lambda: workers.running == DEPTH, "idle production is found, and the queue filled again")
    for _ in range(6):
        workers.release()
    until(lambda: scene.tokens() == {"a": 8}, "the turn ends whole")


def test_an_arrival_before_the_second_launch_stops_it(scene: Scene) -> None:
    scene.production_arrives()
    scene.begin("a", max_tokens=4)
    until(lambda: scene.guest().waiting == 1, "the request waits at the gate")
    assert scene.workers.launched == []


def test_aborts_pass_a_closed_gate_with_steps_in_the_queue(scene: Scene) -> None:
    workers = scene.workers
    scene.begin("a", max_tokens=100)
    scene.begin("b", max_tokens=100)
    until(lambda: workers.running == DEPTH, "two steps are launched")
    scene.grant(GrantMode.CLOSED)
    scene.abort("a")
    workers.release()
    workers.release()
    until(lambda: list(scene.core.scheduler.requests) == ["b"], "the request is gone")
    until(lambda: scene.guest().steps_finished == DEPTH, "its steps have ended")
    assert len(workers.launched) == DEPTH
    scene.grant()
    until(lambda: len(workers.launched) > DEPTH, "the other goes on")
    assert all("a" not in tokens for tokens in workers.launched[DEPTH:])


def test_behind_a_closed_gate_unfinished_requests_stay_visible_to_vllm(scene: Scene) -> None:
    scene.begin("a", max_tokens=50)
    scene.close_the_gate()
    core, scheduler = scene.core, scene.core.scheduler
    assert scene.within_loop(scheduler.has_requests)
    assert scene.within_loop(scheduler.has_unfinished_requests)
    assert scene.within_loop(scheduler.get_num_unfinished_requests) == 1
    assert scene.within_loop(core.has_work)
    assert not scene.within_loop(core._pause_complete)


def test_a_pause_that_waits_behind_a_closed_gate_waits_for_the_turns(scene: Scene) -> None:
    scene.begin("a", max_tokens=4)
    scene.close_the_gate()
    paused = scene.ask("pause_scheduler", "wait", False)
    scene.said("is_scheduler_paused")
    assert paused() is None, "a turn is unfinished"
    assert list(scene.core.scheduler.requests) == ["a"]
    scene.grant()
    for _ in range(2):
        scene.workers.release()
    until(paused, "the pause completes once the turn has ended")
    assert scene.tokens() == {"a": 4}
    assert paused().failure_message is None


def test_a_pause_waits_no_longer_than_the_grace_for_a_gate_that_stays_closed(scene: Scene) -> None:
    scene.begin("a", max_tokens=50)
    scene.close_the_gate(abort_grace_s=0.3)
    paused = scene.ask("pause_scheduler", "wait", False)
    until(paused, "the pause completes")
    assert paused().failure_message is None
    assert not scene.core.scheduler.requests, "the turn has ended with what it had"
    assert len(scene.workers.launched) == DEPTH, "and nothing was computed for it"


def test_a_pause_that_is_over_starts_no_grace_for_the_next(scene: Scene) -> None:
    scene.begin("a", max_tokens=50)
    scene.close_the_gate()
    scene.ask("pause_scheduler", "wait", False)
    scene.said("resume_scheduler")
    assert scene.core.scheduler.sleep_s is None
    assert list(scene.core.scheduler.requests) == ["a"]


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_that_ends_or_keeps_turns_completes_behind_a_closed_gate(
    scene: Scene, mode: str
) -> None:
    """Also where the workers do not know yet that a turn is over."""
    scene.begin("a", max_tokens=50)
    scene.begin("b", max_tokens=50)
    scene.close_the_gate()
    scene.abort("b")
    assert scene.said("pause_scheduler", mode, False).failure_message is None
    assert len(scene.workers.launched) == DEPTH


def test_kv_is_not_released_under_turns_that_a_closed_gate_holds_up(scene: Scene) -> None:
    if not hasattr(scene.core, "release_kv_cache_memory"):
        pytest.skip("this vLLM releases no KV alone")
    scene.begin("a", max_tokens=50)
    scene.close_the_gate()
    scene.ask("pause_scheduler", "wait", False)
    assert "completed pause" in scene.said("release_kv_cache_memory").failure_message


def test_the_gate_decides_once_for_each_launched_step(scene: Scene) -> None:
    slot, decided = scene.core.scheduler._slot, [0]
    decide = slot.decide

    def counted(*, for_step: bool = False) -> Any:
        decided[0] += for_step
        return decide(for_step=for_step)

    slot.decide = counted
    scene.begin("a", max_tokens=100)
    until(lambda: scene.workers.running == DEPTH, "two steps are launched")
    before, launched = decided[0], len(scene.workers.launched)
    for _ in range(20):
        scene.workers.release()
        until(lambda: scene.workers.running == DEPTH, "the next is launched")
    assert decided[0] - before == len(scene.workers.launched) - launched == 20


def test_a_loop_behind_a_closed_gate_sleeps(scene: Scene) -> None:
    scene.begin("a", max_tokens=50)
    scene.close_the_gate()
    core, turns = scene.core, [0]
    has_work = core.has_work

    def counted() -> bool:
        turns[0] += 1
        return bool(has_work())

    core.has_work = counted
    scene.said("is_scheduler_paused")
    turns[0] = 0
    time.sleep(0.5)
    assert turns[0] == 0
