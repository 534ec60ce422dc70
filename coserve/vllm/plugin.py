"""Entry point `vllm.general_plugins`: makes a stock engine a guest, in the guest's processes only.

Two methods are wrapped, once. The engine loop, because the scheduler needs the input queue that it
is woken through and stock vLLM does not hand it out. And the readers of vLLM's shared-memory
queues, which spin for a second after each message.
"""

from collections.abc import Callable
from typing import Any

from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.environment import Role, slot_environment

# Long enough that steps in a row find each other without a notification, short beside the second
# of stock vLLM, which beside production is production's.
_SPIN_S = 0.02
# The writer's socket drops a notification while it believes the one before unread; stock vLLM looks
# again after five seconds.
_LOOK_AGAIN_MS = 2

_registered = False


def register() -> None:
    """Called by vLLM in each of its processes; does nothing outside a guest.

    Raises Unsupported, naming the supported range, in a guest of an unknown vLLM.
    """
    global _registered
    environment = slot_environment()
    if _registered or environment is None or environment.role is not Role.GUEST:
        return
    capabilities(installed_vllm_version())
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_busy_loop = _attached(
        EngineCoreProc.run_busy_loop, EngineCoreRequestType.WAKEUP
    )
    SpinCondition.wait = _sleeping(SpinCondition.wait)
    _registered = True


def _sleeping(wait: Callable[..., None]) -> Callable[..., None]:
    def sleeping_wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = _SPIN_S
        wait(self, _LOOK_AGAIN_MS if timeout_ms is None else min(timeout_ms, _LOOK_AGAIN_MS))

    return sleeping_wait


def _attached(run_busy_loop: Callable[[Any], Any], wakeup: Any) -> Callable[[Any], Any]:
    def attached_busy_loop(self: Any) -> Any:
        attach = getattr(self.scheduler, "attach", None)
        if attach is not None:
            attach(self, lambda: self.input_queue.put_nowait((wakeup, None)))
        return run_busy_loop(self)

    return attached_busy_loop
