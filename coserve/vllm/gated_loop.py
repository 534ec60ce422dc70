"""Stops vLLM's engine loop while the gate is closed, and changes none of the loop's predicates.

The scheduler's answers (is there a request, is one unfinished) stay true, so that a pause, a
release of KV and a shutdown know what is left. The gate stands between two of the loop's own calls:
after the input queue was looked at, and before a step. While it is closed the loop sleeps in the
very queue that aborts, pauses and weight updates come through. It decides nothing.
"""

import queue
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from coserve.vllm.capabilities import Capabilities


class StepGate(Protocol):
    """The gated scheduler, as its loop sees it."""

    in_step: bool
    """Whether vLLM's `has_requests` is called within a step, to ask for a launch."""

    def admits(self) -> bool:
        """Decides whether a step may be launched now. The decision holds for one `schedule`."""
        ...

    @property
    def sleep_s(self) -> float | None:
        """Longest sleep of the loop unless it is woken, in s; None: no limit."""
        ...


class GatedLoop:
    """Stands before two methods of one engine core; used by the loop's thread alone."""

    def __init__(self, core: Any, gate: StepGate, vllm: Capabilities) -> None:
        self._core, self._gate = core, gate
        self._process_input_queue = core._process_input_queue
        self._step = core.step_fn
        self._idle = _watched(vllm)
        core._process_input_queue = self.process_input_queue
        core.step_fn = self.step

    def process_input_queue(self) -> None:
        """Returns when a step is to be made: a step is admitted, or a launched step may end."""
        core = self._core
        self._process_input_queue()
        while not self._gate.admits() and core.has_work() and not core.batch_queue:
            try:
                with self._idle():
                    request = core.input_queue.get(timeout=self._gate.sleep_s)
            except queue.Empty:
                continue
            core._handle_client_request(*request)
            # Reads later requests; without work left, vLLM ends pauses here and sleeps by itself.
            self._process_input_queue()

    def step(self) -> Any:
        self._gate.in_step = True
        try:
            return self._step()
        finally:
            self._gate.in_step = False


def _watched(vllm: Capabilities) -> Callable[[], AbstractContextManager[None]]:
    """A factory of contexts that disable vLLM's watchdog, because a sleep behind the gate is no
    stall."""
    if not vllm.loop_watch_dog:
        return nullcontext
    from vllm.utils.watch_dog import get_watch_dog  # type: ignore[import-not-found,unused-ignore]

    return lambda: get_watch_dog().disable()
