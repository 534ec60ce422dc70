"""A guest on a GPU waits for its turn to start: from before its first memory until all is taken.

Held by the engine core's process, and given back when its loop is about to run: weights, KV and
graphs are there by then. Nothing to wait for on a CPU.
"""

import logging
import os
from pathlib import Path
from typing import Any

from coserve.guest.launch_lock import LaunchLock
from coserve.vllm.environment import SlotEnvironment
from harvester.contracts.errors import ConfigError
from harvester.contracts.page.directory import LAUNCH_DIRECTORY

LOCKS_VARIABLE = "ROSEMUX_GPU_LOCKS"
"""Directory of the locks; by default one beside the slot's pages, common to a node's slots."""
TIMEOUT_VARIABLE = "ROSEMUX_GPU_LOCK_TIMEOUT_S"

_TIMEOUT_S = 1800.0
_log = logging.getLogger(__name__)

_turn: LaunchLock | None = None


def begin(environment: SlotEnvironment, platform: Any, *, workers: int) -> None:
    """Wait for the GPUs of this engine. Raises Exhausted, ConfigError."""
    global _turn
    gpus = _gpus(platform, workers)
    if not gpus or _turn is not None:
        return
    directory = Path(os.environ.get(LOCKS_VARIABLE) or _locks_beside(environment.directory))
    turn = LaunchLock(directory, gpus)
    _log.info("this guest waits for its turn to start on %s", ", ".join(gpus))
    turn.acquire(timeout_s=_timeout_s())
    _turn = turn


def end() -> None:
    """All memory is taken, or the start has failed."""
    global _turn
    if _turn is not None:
        _turn.release()
        _turn = None


def _locks_beside(pages: Path) -> Path:
    """Guests that are no agents may not write in the directory above their slots'."""
    common = pages.parent / LAUNCH_DIRECTORY
    return common if common.is_dir() else pages.parent


def _gpus(platform: Any, workers: int) -> list[str]:
    """UUIDs: every pod and user counts GPUs in its own way."""
    if not platform.is_cuda():
        return []
    return [platform.get_device_uuid(device) for device in range(workers)]


def _timeout_s() -> float:
    said = os.environ.get(TIMEOUT_VARIABLE)
    if not said:
        return _TIMEOUT_S
    try:
        timeout_s = float(said)
    except ValueError:
        timeout_s = -1.0
    if not timeout_s > 0:
        raise ConfigError(f"{TIMEOUT_VARIABLE}={said!r}: give seconds above 0")
    return timeout_s
