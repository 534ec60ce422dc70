"""The gate between two calls of a loop in the shape of vLLM's."""

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.vllm.capabilities import Capabilities, capabilities
from coserve.vllm.gated_loop import GatedLoop

NEWEST, WITHOUT_WATCH_DOG = capabilities("0.33.0"), capabilities("0.32.0")
WITHIN_S = 20.0


class Gate:
    in_step = False

    def __init__(self) -> None:
        self.open = False
        self.decisions = 0
        self.sleep_s: float | None = None
        self.decided = threading.Semaphore(0)

    def admits(self) -> bool:
        self.decisions += 1
        self.decided.release()
        return self.open


class Core:
    def __init__(self) -> None:
        self.input_queue: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.batch_queue: list[str] = []
        self.requests = {"a"}
        self.looked = 0
        self.in_step: list[bool] = []
        self.gate = Gate()
        self.step_fn = self._stock_step

    def has_work(self) -> bool:
        return bool(self.requests or self.batch_queue)

    def _process_input_queue(self) -> None:
        self.looked += 1
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())

    def _handle_client_request(self, kind: str, what: Any) -> None:
        match kind:
            case "abort":
                self.requests.discard(what)
            case "open":
                self.gate.open = True

    def _stock_step(self) -> str:
        self.in_step.append(self.gate.in_step)
        return "stepped"


def gated(vllm: Capabilities = WITHOUT_WATCH_DOG) -> Core:
    core = Core()
    GatedLoop(core, core.gate, vllm)
    return core


def test_an_open_gate_lets_the_loop_go_after_one_decision() -> None:
    core = gated()
    core.gate.open = True
    core._process_input_queue()
    assert (core.gate.decisions, core.looked) == (1, 1)


def test_a_closed_gate_sleeps_until_a_message_and_handles_it() -> None:
    core = gated()
    loop = threading.Thread(target=core._process_input_queue, daemon=True)
    loop.start()
    assert core.gate.decided.acquire(timeout=WITHIN_S)
    core.input_queue.put(("utility", None))
    assert core.gate.decided.acquire(timeout=WITHIN_S)
    assert loop.is_alive(), "it was no message that opens"
    core.input_queue.put(("open", None))
    loop.join(WITHIN_S)
    assert not loop.is_alive()
    assert core.gate.decisions == 3


def test_the_loop_goes_on_when_an_abort_has_left_no_work() -> None:
    core = gated()
    core.input_queue.put(("utility", None))
    loop = threading.Thread(target=core._process_input_queue, daemon=True)
    loop.start()
    assert core.gate.decided.acquire(timeout=WITHIN_S)
    core.input_queue.put(("abort", "a"))
    loop.join(WITHIN_S)
    assert not loop.is_alive()


def test_steps_in_the_queue_are_waited_for_behind_a_closed_gate() -> None:
    core = gated()
    core.batch_queue.append("a step")
    core._process_input_queue()
    assert core.gate.decisions == 1


def test_a_gate_that_limits_its_sleep_decides_again() -> None:
    core = gated()
    core.gate.sleep_s = 0.01
    loop = threading.Thread(target=core._process_input_queue, daemon=True)
    loop.start()
    for _ in range(3):
        assert core.gate.decided.acquire(timeout=WITHIN_S)
    core.gate.open = True
    loop.join(WITHIN_S)
    assert not loop.is_alive()


def test_within_a_step_alone_the_gate_says_so_also_where_it_fails() -> None:
    core = gated()
    assert core.step_fn() == "stepped"
    assert core.in_step == [True]
    assert not core.gate.in_step
    failing = Core()
    failing.step_fn = lambda: 1 // 0  # type: ignore[assignment,return-value]
    GatedLoop(failing, failing.gate, WITHOUT_WATCH_DOG)
    with pytest.raises(ZeroDivisionError):
        failing.step_fn()
    assert not failing.gate.in_step


def test_a_watchdog_is_disabled_during_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[str] = []

    @contextmanager
    def disable() -> Iterator[None]:
        slept.append("begun")
        yield
        slept.append("ended")

    module = SimpleNamespace(get_watch_dog=lambda: SimpleNamespace(disable=disable))
    monkeypatch.setitem(sys.modules, "vllm.utils.watch_dog", module)
    core = gated(NEWEST)
    loop = threading.Thread(target=core._process_input_queue, daemon=True)
    loop.start()
    assert core.gate.decided.acquire(timeout=WITHIN_S)
    core.input_queue.put(("open", None))
    loop.join(WITHIN_S)
    assert slept == ["begun", "ended"]
