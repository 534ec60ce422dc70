"""vLLM's own engine loop with a batch queue two deep, the gated scheduler in it, a played executor.

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
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.page import Grant, GrantMode, Guest, PageDirectory, Pulse
from harvester.contracts.page.directory import DIRECTORY_VARIABLE
from scheduler.demo.job.model import write_checkpoint
from tests.integration.engine_slot import SHAPE

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

DEPTH = 2
HOUR_NS = 3_600_000_000_000
WITHIN_S = 60.0
SCHEDULER = "coserve.vllm.scheduler.CoserveScheduler"
PULSE = "pulse.prod.0"


class PlayedWorkers:
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


def executor_class(workers: PlayedWorkers) -> Any:
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

    class PlayedExecutor(Executor):
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

    return PlayedExecutor


class Scene:
    """A guest's engine loop in a thread; agent and production are the test."""

    def __init__(self, root: Path, pages: PageDirectory) -> None:
        self.pages = pages
        self.workers = PlayedWorkers()
        self._grants, self._pulses = pages.grant_writer(), pages.pulse_writer("prod", 0)
        self.pulse()
        self.grant()
        self.core = self._made(root)
        self._loop = threading.Thread(target=self._run, daemon=True)
        self._loop.start()

    def grant(self, mode: GrantMode = GrantMode.OPEN) -> None:
        record = Grant(epoch=1, mode=mode, pulses=(PULSE,), ttft_slo_s=1.0, epsilon=math.inf)
        self._grants.write(record, now_ns=monotonic_ns(), ttl_ns=HOUR_NS)

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

    def tokens(self) -> dict[str, int]:
        """That came out of the engine so far, by request."""
        found: dict[str, int] = {}
        for item in list(self.core.output_queue.queue):
            for output in item[1].outputs:
                found[output.request_id] = found.get(output.request_id, 0) + len(
                    output.new_token_ids
                )
        return found

    def close(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType
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

            def __init__(self, config: Any, workers: PlayedWorkers) -> None:
                self.input_queue: Any = queue.Queue()
                self.output_queue: Any = queue.Queue()
                self.engines_running = self.publish_dp_lb_stats = self.has_coordinator = False
                self.process_input_queue_block = True
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
        # What a GPU has by default, and a CPU's platform takes back.
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
