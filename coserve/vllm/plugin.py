"""Entry point `vllm.general_plugins`: makes a stock engine a guest, in the guest's processes only.

Three methods are wrapped, once. The engine loop, because the scheduler needs the core whose input
queue it sleeps in and is woken through (gated_loop.py), and stock vLLM does not hand it out. The
readers of vLLM's shared-memory queues, which spin for a second after each message. And the start of
the workers (guest_start.py).
"""

from collections.abc import Callable
from typing import Any

from coserve.vllm import continuation, guest_start
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.environment import Role, slot_environment
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.stock_fallback import guarded

# Long enough that steps in a row find each other without a notification, short beside the second
# of stock vLLM, which beside production is production's.
_SPIN_S = 0.02
# The writer's socket drops a notification that follows on another one, and a reader in the idle
# class may be too late to find by spinning what it was about; stock vLLM looks again after five
# seconds. Long after the last message nothing is dropped any more.
_LOOK_AGAIN_MS = (2, 100)
_LOOK_AGAIN_RATIO = 0.25

_registered = False


def register() -> None:
    """Called by vLLM in each of its processes; does nothing outside a guest.

    Raises Unsupported, naming the supported range, in a guest of an unknown vLLM.
    """
    guarded(_register)
    continuation.register()


def _register() -> None:
    global _registered
    environment = slot_environment()
    if _registered or environment is None or environment.role is not Role.GUEST:
        return
    capabilities(installed_vllm_version())
    guest_start.end_with_starter(environment)
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.abstract import Executor

    EngineCoreProc.run_busy_loop = _attached(
        EngineCoreProc.run_busy_loop, EngineCoreRequestType.WAKEUP
    )
    SpinCondition.wait = _sleeping(SpinCondition.wait)
    Executor.__init__ = guest_start.under_launch_lock(Executor.__init__, environment)
    _registered = True


def _sleeping(wait: Callable[..., None]) -> Callable[..., None]:
    def sleeping_wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = _SPIN_S
        least, most = _LOOK_AGAIN_MS
        quiet_ms = 1e-6 * monotonic_ns() - 1e3 * self.last_read
        look_again_ms = int(min(most, max(least, _LOOK_AGAIN_RATIO * quiet_ms)))
        wait(self, look_again_ms if timeout_ms is None else min(timeout_ms, look_again_ms))

    return sleeping_wait


def _attached(run_busy_loop: Callable[[Any], Any], wakeup: Any) -> Callable[[Any], Any]:
    def attached_busy_loop(self: Any) -> Any:
        attach = getattr(self.scheduler, "attach", None)
        if attach is not None:
            attach(self, lambda: self.input_queue.put_nowait((wakeup, None)))
        guest_start.end()
        return run_busy_loop(self)

    return attached_busy_loop
