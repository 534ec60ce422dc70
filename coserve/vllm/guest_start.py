"""A guest's start: refused where its shape does not fit; on a GPU under the launch lock, and asking
for slack.

The lock is held from before the engine's first memory until its loop is about to run: weights, KV
and graphs are there by then. Each pass that vLLM makes meanwhile to measure and warm up asks for
slack, where one process works for the engine: with several ranks one that waits keeps the others
spinning on their GPUs, which production would feel more than the pass itself. Loading weights is
copies and not paced. On a CPU there is no lock: the guest's idle group bounds its start too.
"""

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coserve.guest.launch_lock import LaunchLock
from coserve.law.work_gate import WorkGate
from coserve.vllm.environment import SlotEnvironment, work_gate
from coserve.vllm.gloo_device import share_gloo_device
from coserve.vllm.pulse_reporter import ONE_NODE_BACKENDS
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.page.directory import LAUNCH_DIRECTORY
from harvester.platform.parent import end_with

LOCKS_VARIABLE = "ROSEMUX_GPU_LOCKS"
"""Directory of the locks; by default one beside the slot's pages, common to a node's slots."""
TIMEOUT_VARIABLE = "ROSEMUX_GPU_LOCK_TIMEOUT_S"

_TIMEOUT_S = 1800.0
_KIND = "start"
_PIECE_S = 0.05
"""A decode batch's pass, before one was measured."""

_log = logging.getLogger(__name__)

_Start = Callable[..., None]
_ends: dict[str, Callable[[], None]] = {}
"""How to end what this process has begun: its lock, its pace."""


def end_with_starter(environment: SlotEnvironment) -> None:
    """Have the kernel kill this engine core or worker with the process that started it: stock
    vLLM's core outlives a killed API server, and its memory with it. vLLM starts both from main
    threads. Not under MPS, where such a kill may end production's server."""
    starter = multiprocessing.parent_process()
    if starter is None or environment.isolation is IsolationBackend.MPS:
        return
    end_with(os.getppid(), signal.SIGKILL)
    if not starter.is_alive():
        os._exit(1)


def unfit_guest(parallel_config: Any) -> str:
    """Why an engine of this shape may not be a guest, with the remedy; "" if it may.

    The agent ends, pauses and isolates a guest by the processes on its page: they must be on this
    machine and descend from the guest, whose idle class or group they inherit. Ray's workers
    descend from Ray's daemon.
    """
    if parallel_config.nnodes > 1:
        return f"its ranks are on {parallel_config.nnodes} nodes; start all on production's node"
    backend = parallel_config.distributed_executor_backend
    if backend not in ONE_NODE_BACKENDS:
        return (
            f"the executor backend {backend} starts its workers outside of the guest's isolation, "
            "maybe on other nodes; leave out --distributed-executor-backend"
        )
    # vLLM gives a dense model's rank a configuration of its own, of size 1.
    if parallel_config.data_parallel_size > 1 or parallel_config.data_parallel_index > 0:
        return "it has several data-parallel ranks, which one gate does not hold; start one rank"
    return ""


def under_launch_lock(start: _Start, environment: SlotEnvironment) -> _Start:
    """vLLM's start of the workers, under the launch lock. A failure releases it. Raises Unsupported
    before any worker runs if the guest's shape does not fit."""

    def locked_start(self: Any, vllm_config: Any) -> None:
        from vllm.platforms import current_platform

        end_with_starter(environment)  # A forked core has not registered.
        parallel = vllm_config.parallel_config
        if reason := unfit_guest(parallel):
            raise Unsupported(f"this engine may not be a guest: {reason}")
        workers = parallel.world_size
        ranks = workers * parallel.data_parallel_size
        acquire_launch_lock(environment, current_platform, workers=workers)
        if current_platform.is_cuda() and ranks == 1:
            _pace_runner()
        try:
            with share_gloo_device(ranks=ranks):
                start(self, vllm_config)
        except BaseException:
            end()
            raise

    return locked_start


def end() -> None:
    """The engine's loop is about to run, or the start has failed. Idempotent."""
    while _ends:
        _, end_one = _ends.popitem()
        end_one()


def acquire_launch_lock(environment: SlotEnvironment, platform: Any, *, workers: int) -> None:
    """Wait for the GPUs of this engine. Raises Exhausted, ConfigError."""
    if not platform.is_cuda() or "lock" in _ends:
        return
    # UUIDs: every pod and user counts GPUs in its own way.
    gpus = [platform.get_device_uuid(device) for device in range(workers)]
    directory = Path(os.environ.get(LOCKS_VARIABLE) or _locks_beside(environment.directory))
    lock = LaunchLock(directory, gpus)
    _log.info("this guest waits for the launch lock of %s", ", ".join(gpus))
    lock.acquire(timeout_s=_timeout_s())
    _ends["lock"] = lock.release


def pace(runner: Any, gate: WorkGate, synchronize: Callable[[], None]) -> None:
    """Make each dummy pass of the runner's class wait for the gate, until `end`.

    The first pass waits too but is not measured, because vLLM compiles the model in it for about a
    minute. Counted, that minute would delay the next pass by twenty.
    """
    if "pace" in _ends:
        return
    stock = runner._dummy_run
    gate.expect(_KIND, _PIECE_S)
    compiled = False

    def paced_dummy_run(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal compiled
        if not compiled:
            compiled = True
            with gate.piece(_KIND):
                pass
            return stock(self, *arguments, **options)
        with gate.piece(_KIND):
            made = stock(self, *arguments, **options)
            # A pass is over when the GPU is done with it, not when it was launched.
            synchronize()
        return made

    runner._dummy_run = paced_dummy_run
    _ends["pace"] = lambda: setattr(runner, "_dummy_run", stock)


def _pace_runner() -> None:
    try:
        import torch
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        pace(GPUModelRunner, work_gate(), torch.accelerator.synchronize)
    except Exception:
        # A guest that starts at full speed is still gated in all of its steps.
        _log.exception("this guest starts at full speed: its start cannot be paced")


def _locks_beside(pages: Path) -> Path:
    """Guests that are no agents may not write in the directory above their slots'."""
    common = pages.parent / LAUNCH_DIRECTORY
    return common if common.is_dir() else pages.parent


def _timeout_s() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return _TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = -1.0
    if not timeout_s > 0:
        raise ConfigError(f"{TIMEOUT_VARIABLE}={text!r}: give seconds above 0")
    return timeout_s
