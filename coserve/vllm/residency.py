"""Where a sleeping guest's weights are: on its GPU, or in host memory by vLLM's own sleep mode.

    asleep   no KV anywhere, weights in pinned host memory; what stays is the driver's context
    awake    weights are copied back and KV is mapped anew before the first step

On a CPU, and where sleep mode is off, a guest that falls asleep gives its KV back and keeps its
weights: there is no other memory that they could go to. Calls vLLM's executor from the engine
loop's thread, as vLLM's own `/sleep` and `/wake_up` do; it decides nothing.

A new version comes through while the guest sleeps: the weights alone are woken for it, written,
verified, and go back to sleep with it. Nothing guards vLLM's own update, which would write to
addresses that no memory is behind and lose the context; so each call of one finds the weights
awake, whatever slept or woke since the call before it.
"""

import logging
from collections.abc import Callable
from typing import Any

from coserve.law.work_gate import WorkGate
from coserve.vllm.capabilities import Capabilities
from harvester.contracts.errors import ConfigError, Unsupported

_WEIGHTS = "weights"
"""vLLM's tag of them."""
WAKE = "wake"
"""The kind of work that copying them back is."""
_ALL = frozenset({_WEIGHTS, "kv_cache"})
_CALLS = ("start_weight_update", "start_draft_weight_update", "update_weights")
"""Of an update, in a worker; the second is there in some versions."""

_AWAY = "_rosemux_weights_away"

LEVEL = 1
"""Weights go to host memory; level 2 would drop them."""

_log = logging.getLogger(__name__)


def check(vllm: Capabilities) -> None:
    """Raises Unsupported where weights may not be woken and put back to sleep alone.

    vLLM's allocator must pass over what sleeps already. In 0.24 it would unmap it once more; it was
    read for 0.31 and later, whose table says that KV is released alone.
    """
    if not vllm.kv_memory_release:
        raise Unsupported(
            f"vLLM {vllm.version} was not checked to put weights back to sleep while its KV "
            "sleeps, so that no version could be followed: use 0.31 or later, or leave "
            "--enable-sleep-mode out"
        )


class Residency:
    """Used by the engine loop's thread alone."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    @property
    def asleep(self) -> bool:
        return bool(self._executor.is_sleeping)

    def fall_asleep(self) -> None:
        """Only without requests, launched steps or cached prefixes: KV is not kept."""
        if not self.asleep:
            self._executor.sleep(LEVEL)

    def wake(self) -> None:
        """All of it. What fails here fails the engine: it could not step."""
        if self.asleep:
            self._executor.wake_up(None)
        if self.asleep:
            raise Unsupported("vLLM left a part of this engine asleep")


def residency(
    vllm_config: Any, executor: Any, vllm: Capabilities, *, shared_kv: bool
) -> Residency | None:
    """None where a sleeping guest keeps its weights. Raises ConfigError, Unsupported."""
    if not vllm_config.model_config.enable_sleep_mode:
        return None
    check(vllm)
    if shared_kv:
        # Both would map and unmap the same engine's memory, each without knowing of the other.
        raise ConfigError("sleep mode and kvcached do not go together: leave one of them out")
    executor.collective_rpc("rosemux_follow_updates")
    return Residency(executor)


def follow_updates(worker: Any, gate: WorkGate) -> None:
    """Let one worker's updates through while it sleeps; called once, in the worker's process.
    Waking the weights for one asks the gate.

    A version that is being staged is read from the weights in the background, so it is dropped
    before they go, and none is begun while they are away: the update prepares by itself.
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
    """Stands before a worker's own methods."""

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
                # vLLM's executor goes on counting the weights as asleep, which is how this ends;
                # but where KV was woken alone, it would be unmapped with them.
                sleeps_again = self._asleep == _ALL
                with self._gate.piece(WAKE):
                    self.wake_up([_WEIGHTS])
                self._sleeps_again = sleeps_again
                _log.info("the weights are awake for an update")
            return call(*args, **kwargs)

        return called

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        # After a failed update they stay awake until one succeeds: what is there is in doubt, and
        # the next one starts from it.
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
        # vLLM's own state says as much of a worker whose KV alone is released.
        self._asleep, away = asleep, _WEIGHTS in asleep
        setattr(self._worker, _AWAY, away)
        engine = getattr(self._worker, "weight_transfer_engine", None)
        rest = getattr(engine, "rest", None)
        if rest is not None:
            rest(away=away)
