"""Entry point `vllm.general_plugins`: connects a guest's scheduler with its engine loop.

The scheduler needs the engine's input queue to be woken through it. Stock vLLM does not hand it
out, so the engine loop is wrapped: one method, once, in the guest's processes only.
"""

from collections.abc import Callable
from typing import Any

from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.environment import Role, slot_environment

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
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_busy_loop = _attached(
        EngineCoreProc.run_busy_loop, EngineCoreRequestType.WAKEUP
    )
    _registered = True


def _attached(run_busy_loop: Callable[[Any], Any], wakeup: Any) -> Callable[[Any], Any]:
    def attached_busy_loop(self: Any) -> Any:
        attach = getattr(self.scheduler, "attach", None)
        if attach is not None:
            attach(self, lambda: self.input_queue.put_nowait((wakeup, None)))
        return run_busy_loop(self)

    return attached_busy_loop
