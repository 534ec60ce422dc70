"""Offloads a sleeping guest's weights from its GPU to host memory, by vLLM's own sleep mode.

    asleep   no KV anywhere, weights in pinned host memory; the driver's context stays
    awake    weights are copied back and KV is mapped again before the first step

On a CPU, or with sleep mode off, a sleeping guest keeps its weights: there is no other memory for
them. For a version that arrives meanwhile the weights alone are woken, written, verified, and put
back to sleep. vLLM does not guard its own update, which would write to unmapped addresses and lose
the context; so each call of an update first wakes the weights, whatever slept since the last one.
"""

import logging
from collections.abc import Callable
from typing import Any

from coserve.law.work_gate import WorkGate
from coserve.vllm.capabilities import Capabilities
from harvester.contracts.errors import ConfigError, Unsupported

_WEIGHTS = "weights"
"""vLLM's sleep-mode tag for weights."""
WAKE = "wake"
"""Kind of work for pacing: copying the weights back."""
_ALL = frozenset({_WEIGHTS, "kv_cache"})
_CALLS = ("start_weight_update", "start_draft_weight_update", "update_weights")
"""Calls of an update in a worker; the second exists in some versions only."""

_AWAY = "_rosemux_weights_away"

LEVEL = 1
"""Level 1 moves weights to host memory; level 2 would drop them."""

_log = logging.getLogger(__name__)


def check(vllm: Capabilities, *, shared_kv: bool) -> None:
    """Raises ConfigError beside kvcached, Unsupported if weights cannot be woken and put back to
    sleep alone.

    vLLM's allocator must skip memory that already sleeps. Version 0.24 would unmap it again; the
    code was read for 0.31 and later, whose table says that KV is released alone.
    """
    if shared_kv:
        # Both would map and unmap the same engine's memory, unaware of each other.
        raise ConfigError("sleep mode and kvcached do not go together: choose one")
    if not vllm.kv_memory_release:
        raise Unsupported(
            f"vLLM {vllm.version} was not checked to put weights back to sleep while its KV "
            "sleeps, so that no version could be followed: use 0.31 or later, or leave "
            "--enable-sleep-mode out"
        )


def sleeps(vllm_config: Any, executor: Any, vllm: Capabilities, *, shared_kv: bool) -> bool:
    """Whether weights leave while the slot sleeps; then the workers accept versions meanwhile.
    Raises ConfigError, Unsupported."""
    if not vllm_config.model_config.enable_sleep_mode:
        return False
    check(vllm, shared_kv=shared_kv)
    executor.collective_rpc("rosemux_follow_updates")
    return True


def wake(executor: Any) -> None:
    """Wake weights and KV. A failure fails the engine: it could not step."""
    executor.wake_up(None)
    if executor.is_sleeping:
        raise Unsupported("vLLM left a part of this engine asleep")


def follow_updates(worker: Any, gate: WorkGate) -> None:
    """Let one worker's updates through while it sleeps; called once, in the worker's process.
    Waking the weights for an update asks the gate.

    A version that is being staged reads the weights in the background, so it is dropped before they
    are offloaded, and none is started while they are away: the update itself prepares it.
    """
    update = _Update(worker, gate)
    for name in _CALLS:
        if hasattr(worker, name):
            setattr(worker, name, update.on_awake_weights(getattr(worker, name)))
    for name in ("finish_weight_update", "sleep", "wake_up"):
        setattr(worker, name, getattr(update, name))


def weights_away(worker: Any) -> bool:
    return bool(getattr(worker, _AWAY, False))


class _Update:
    """Wraps a worker's own sleep and update methods."""

    def __init__(self, worker: Any, gate: WorkGate) -> None:
        self._worker = worker
        self._gate = gate
        self._finish = self.on_awake_weights(worker.finish_weight_update)
        self._sleep, self._wake_up = worker.sleep, worker.wake_up
        self._asleep: frozenset[str] = frozenset()
        self._sleeps_again = False

    def on_awake_weights(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if _WEIGHTS in self._asleep:
                # vLLM's executor still counts the weights as asleep, and they will be again; but if
                # KV was woken alone, it would be unmapped with them.
                sleeps_again = self._asleep == _ALL
                with self._gate.piece(WAKE):
                    self.wake_up([_WEIGHTS])
                self._sleeps_again = sleeps_again
                _log.info("the weights are awake for an update")
            return call(*args, **kwargs)

        return called

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        # After a failed update the weights stay awake until one succeeds: their content is in
        # doubt, and the next update starts from it.
        done = self._finish(*args, **kwargs)
        if self._sleeps_again:
            self.sleep(LEVEL)
        return done

    def sleep(self, level: int = LEVEL) -> Any:
        self._sleeps_again = False
        self._tell(_ALL)
        return self._sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> Any:
        self._sleeps_again = False
        done = self._wake_up(tags)
        self._tell(self._asleep - frozenset(tags or _ALL))
        return done

    def _tell(self, asleep: frozenset[str]) -> None:
        # vLLM's own state says the same of a worker whose KV alone is released.
        self._asleep = asleep
        setattr(self._worker, _AWAY, _WEIGHTS in asleep)
