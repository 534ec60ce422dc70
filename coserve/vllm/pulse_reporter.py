"""Publishes the pulse of a production engine from inside its API-server process.

The middleware and the statistics logger of one process feed one state. The page is written on every
event and by a timer, because an idle engine emits no events and silence must not look like
idleness. Step times are learned while the slot's grant is closed, beside the pulses of the engine's
other API servers, whose requests share its steps. No request is touched, and no error here reaches
one: after an error the pulse stops for good, which closes every gate. A page that cannot be written
(no space, another user's, a living engine of the same name) is retried on every beat.
"""

import itertools
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from coserve.pulse.engine_cores import NO_SIBLINGS, EngineStep, Siblings
from coserve.pulse.pulse_state import EngineShape, PulseState
from coserve.vllm.engine_gpus import engine_gpus, nvml_platform
from coserve.vllm.environment import Role, SlotEnvironment, slot_environment
from coserve.vllm.kv_connectors import remote_connectors
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import (
    MOST_SHAPE_CHARACTERS,
    KeptPage,
    PageDirectory,
    PageFault,
    PageReader,
    Pulse,
    pulse_page,
)
from harvester.contracts.page.owners import OWNERS_VARIABLE
from harvester.contracts.process import ProcessId, process_ids

BEAT_S = 0.1
PULSE_TTL_NS = 500_000_000
_REFIT_BEATS = 10
_CPU_INFO = Path("/proc/cpuinfo")

_log = logging.getLogger(__name__)


def shape_of(vllm_config: Any) -> EngineShape:
    """The shape that an engine's own configuration states."""
    parallel = vllm_config.parallel_config
    count, index = parallel._api_process_count, max(0, parallel._api_process_rank)
    alone = parallel.data_parallel_external_lb
    unfit = unfit_deployment(vllm_config)
    return EngineShape(
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        # Behind the operator's balancer each rank is a separate server, and no rank knows how many
        # share this directory.
        processes=0 if alone else count,
        process=parallel.data_parallel_rank * count + index if alone else index,
        shape=shape_line(vllm_config),
        unfit=unfit,
        # A page has no room for both; no guest needs the GPUs of an unfit engine.
        gpus=() if unfit else engine_gpus(parallel),
    )


ONE_NODE_BACKENDS = (None, "mp", "uni")
"""Executor backends whose workers are processes of the engine's own, on its node."""


def unfit_deployment(vllm_config: Any) -> str:
    """Why no guest may run beside this engine, with the remedy; "" if a guest may run.

    The slack law knows one machine: pulses in one directory, steps that begin when a request is
    there. Where a rank waits for other machines, a guest step on one of them delays all, unseen by
    its gate.
    """
    parallel = vllm_config.parallel_config
    ranks = parallel.data_parallel_size
    if parallel.nnodes > 1:
        return f"a replica over {parallel.nnodes} nodes; harvest replicas of one node"
    if parallel.distributed_executor_backend not in ONE_NODE_BACKENDS:
        # Also a class, or its import path.
        return (
            f"the executor backend {parallel.distributed_executor_backend} may place its ranks on "
            "other nodes; start it with mp"
        )
    if parallel.data_parallel_backend == "ray" and ranks > 1:
        return "Ray may place its data-parallel ranks on other nodes; take the backend mp"
    if vllm_config.model_config.is_moe and ranks > parallel.data_parallel_size_local:
        # A step of these ranks is one joint forward pass, with or without expert parallelism.
        return (
            f"a mixture of experts over {ranks} ranks, of which this API server has "
            f"{parallel.data_parallel_size_local}: all wait for each; harvest replicas whose ranks "
            "one API server of one node has"
        )
    transfer = vllm_config.kv_transfer_config
    for connector, role in () if transfer is None else remote_connectors(vars(transfer)):
        return (
            f"its requests may wait for KV of another machine ({connector}, {role}); harvest "
            "prefill engines (kv_producer), engines that offload KV to their own host "
            "(OffloadingConnector, SimpleCPUOffloadConnector, LMCache's CPU and disk), or engines "
            "without a connector"
        )
    return ""


def shape_line(vllm_config: Any) -> str:
    """Text such as `Qwen2ForCausalLM 48x5120 bfloat16 tp4 pp1 on NVIDIA H100 80GB HBM3`.

    Read in production's front end, which must not touch a GPU and where no error may surface:
    unreadable parts are left out.
    """
    words: list[str] = []
    # This runs in production: if upstream renames these fields, the pulse must go on.
    with suppress(Exception):
        words.append(_model(vllm_config.model_config))
    with suppress(Exception):
        parallel = vllm_config.parallel_config
        words.append(f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}")
    with suppress(Exception):
        words.append(f"on {_accelerator()}")
    return " ".join(words)[:MOST_SHAPE_CHARACTERS]


def _model(model: Any) -> str:
    text = model.hf_text_config
    size = f"{text.num_hidden_layers}x{text.hidden_size}"
    dtype = model.quantization or str(model.dtype).removeprefix("torch.")
    return f"{model.architecture} {size} {dtype}"


def _accelerator() -> str:
    from vllm.platforms import current_platform

    if (platform := nvml_platform()) is not None:
        return str(platform.get_device_name())
    if not current_platform.is_cpu():
        return str(current_platform.device_name)
    named = [line for line in _CPU_INFO.read_text().splitlines() if line.startswith("model name")]
    return " ".join(named[0].partition(":")[2].split())


class PulseReporter:
    """Thread-safe: the event loop reports, the timer beats."""

    def __init__(
        self,
        environment: SlotEnvironment,
        shape: Callable[[], EngineShape] = EngineShape,
    ) -> None:
        """`shape` reads upstream's configuration; its errors are caught here."""
        self._directory = PageDirectory(environment.directory, environment.owners)
        self._engine, self._process = environment.engine, environment.process
        self._siblings: tuple[PageReader[Pulse], ...] = ()
        self._state = PulseState(root=_root(), middleware=False)
        self._grant = self._directory.grant_reader()
        self._grant_seen: bytes | None = None
        self._reported_stranger = False
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._silent = False
        self._beats = 0
        self._page: KeptPage[Pulse] | None = None
        self.report(lambda _: self._take(shape()))
        self._page = page = self._directory.own_pulse(self._engine, self._process)
        page.keep()
        threading.Thread(target=self._run, args=(page,), name="rosemux-pulse", daemon=True).start()

    def attach_middleware(self) -> None:
        """Record that the middleware is installed, so that arrivals are reported from now on."""
        self.report(lambda _: setattr(self._state, "middleware", True))

    def connect(self) -> int:
        """Record an opened WebSocket; returns the key for `finish`."""
        key = next(self._keys)
        self.report(lambda _: self._state.connect(key))
        return key

    def record_websocket_message(self) -> None:
        """Record a message over a WebSocket; it is published with the next step."""
        self._state.spoken_ns = monotonic_ns()

    def arrive(self, *, body_bytes: int) -> int:
        """Record a request whose body is complete; returns the key for `finish`."""
        key = next(self._keys)
        self.report(
            lambda now_ns: self._state.arrive(
                key, body_bytes=body_bytes, now_ns=now_ns, beside=self._beside(now_ns)
            )
        )
        return key

    def finish(self, key: int, *, outlived: bool = False) -> None:
        self.report(lambda now_ns: self._state.finish(key, now_ns=now_ns, outlived=outlived))

    def step(self, read: Callable[[], EngineStep]) -> None:
        """Record a step. `read` makes it from upstream's objects; its errors are caught here."""
        self.report(lambda now_ns: self._step(read(), now_ns))

    def report(self, change: Callable[[int], None]) -> None:
        """Apply one change to the state and publish it."""
        with self._lock:
            if self._silent:
                return
            try:
                now_ns = monotonic_ns()
                change(now_ns)
                if self._page is not None:
                    pulse = self._state.pulse(now_ns=now_ns)
                    self._page.write(pulse, now_ns=now_ns, ttl_ns=PULSE_TTL_NS)
            except Exception:
                self._fall_silent()

    def _fall_silent(self) -> None:
        self._silent = True
        _log.exception("RoseMux reports no pulse any more; production is not affected")

    def _run(self, page: KeptPage[Pulse]) -> None:
        timer = threading.Event()
        while not (timer.wait(BEAT_S) or self._silent):
            try:
                # Again if it was lost, its directory appeared later or another engine held it.
                page.keep()
            except Exception:
                with self._lock:
                    self._fall_silent()
            self.report(self._beat)

    def _step(self, step: EngineStep, now_ns: int) -> None:
        if self._grant.sequence() != self._grant_seen:
            self._look_at_grant(now_ns)
        self._state.step(step, now_ns=now_ns, beside=self._beside(now_ns))

    def _take(self, shape: EngineShape) -> None:
        self._state.engine = shape
        if shape.process is not None:
            self._process = shape.process
        others = [place for place in range(shape.processes) if place != self._process]
        self._siblings = tuple(
            self._directory.pulse_reader(pulse_page(self._engine, place)) for place in others
        )

    def _beside(self, now_ns: int) -> Siblings | None:
        """State of the other API servers; None if one is silent or nothing can be learned."""
        if not self._siblings:
            return NO_SIBLINGS
        if self._state.alone_since_ns is None:
            return None
        pulses = [page.read(now_ns=now_ns).record for page in self._siblings]
        present = [pulse for pulse in pulses if pulse is not None]
        if len(present) < len(pulses):
            return None
        return Siblings(
            in_flight=sum([pulse.in_flight for pulse in present]),
            waiting=sum([pulse.waiting for pulse in present]),
            decoding=sum([pulse.decoding for pulse in present]),
            requests_total=sum([pulse.requests_total for pulse in present]),
            steps_total=sum([pulse.steps_total for pulse in present]),
        )

    def _look_at_grant(self, now_ns: int) -> None:
        """Track the SLO and whether a guest may step. A missing or expired grant closes the guest's
        gate; a grant that only this process cannot read may not."""
        grant = self._grant.read(now_ns=now_ns)
        self._grant_seen = self._grant.sequence()
        if grant.fault is PageFault.FOREIGN and not self._reported_stranger:
            self._reported_stranger = True
            _log.warning(
                "RoseMux: the grant in %s belongs to a user that %s does not name as agent: step "
                "times are not learned, and the slot stays closed",
                self._grant.path.parent,
                OWNERS_VARIABLE,
            )
        if grant.record is None:
            closed = grant.fault in (PageFault.MISSING, PageFault.EXPIRED)
        else:
            closed = not grant.record.mode.admits
            self._state.itl_slo_s = grant.record.itl_slo_s
        if not closed:
            self._state.alone_since_ns = None
        elif self._state.alone_since_ns is None:
            self._state.alone_since_ns = now_ns

    def _beat(self, now_ns: int) -> None:
        self._look_at_grant(now_ns)
        self._beats += 1
        if self._beats % _REFIT_BEATS == 0:
            self._state.refit()


def _root() -> ProcessId | None:
    """Root process: vLLM starts further API servers beside the engine's cores, as children of one
    process."""
    parent = multiprocessing.parent_process()
    pid = os.getpid() if parent is None or parent.pid is None else parent.pid
    return next(iter(process_ids([pid])), None)


_reporter: PulseReporter | None = None
_reporter_lock = threading.Lock()


def process_reporter(
    shape: Callable[[], EngineShape] = EngineShape,
) -> PulseReporter | None:
    """The one reporter of this process, with the `shape` of the first caller.

    vLLM makes its statistics loggers, which know the shape, before its middleware. None outside a
    production engine of a slot.
    """
    global _reporter
    with _reporter_lock:
        if _reporter is None:
            environment = slot_environment()
            if environment is None or environment.role is not Role.PRODUCTION:
                return None
            _reporter = PulseReporter(environment, shape)
        return _reporter
