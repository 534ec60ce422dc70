"""Entry point `vllm.general_plugins`: vLLM then knows `--weight-transfer-config` backend "rosemux".

Runs in every vLLM process, so it imports little: the engine itself is loaded by name when a worker
asks for it. numba above all must wait: vLLM 0.32 looks through every loaded module when a CPU
worker starts, and trips over an object of llvmlite's. Which engine it is depends on the shape that
this vLLM gives one.
"""

import importlib.util
import inspect
import logging

from harvester.contracts.stock_fallback import guarded
from weightsync.vllm import executor_replies, rank_agreement
from weightsync.vllm.adapter_names import register_resolver

BACKEND = "rosemux"
ENGINES = {
    "vllm_config": ("weightsync.vllm.engine", "RoseMuxWeightTransferEngine"),
    "parallel_config": ("weightsync.vllm.loader_engine", "LoaderShapedEngine"),
}
"""Module and class by the arguments that only that shape takes; the second is vLLM 0.24's."""

_logger = logging.getLogger("vllm.rosemux.weightsync")
_registered = False


def register() -> None:
    """Registers the backend once a process; says why where it cannot."""
    guarded(_register)


def _register() -> None:
    global _registered
    if _registered or importlib.util.find_spec("vllm") is None:
        return
    _registered = True
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        _logger.warning("this vLLM has no weight transfer: backend %r is off", BACKEND)
        return
    parameters = inspect.signature(WeightTransferEngine.__init__).parameters
    shape = next((name for name in ENGINES if name in parameters), None)
    if shape is None:
        _logger.warning("weight engines of this vLLM are unknown: backend %r is off", BACKEND)
        return
    WeightTransferEngineFactory.register_engine(BACKEND, *ENGINES[shape])
    executor_replies.install(BACKEND)
    rank_agreement.install(BACKEND)
    from vllm import envs
    from vllm.platforms import current_platform

    if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        register_resolver()

    if current_platform.is_cpu():
        from weightsync.vllm import cpu_linear

        cpu_linear.install(BACKEND)
        _allow_amx()


def _allow_amx() -> None:
    """Ask the kernel for this process's AMX tiles, as torch does at its first large product.

    vLLM's CPU attention (0.28 to 0.32) uses the tiles without asking: an engine whose first step
    has at most four tokens would die of an illegal instruction. Does nothing without AMX.
    """
    import torch

    torch.cpu._init_amx()
