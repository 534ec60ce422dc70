"""A process with loaded states stays known to the control while it releases them."""

import threading
from statistics import median
from typing import Any

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.control.loaded_states import LoadedStates
from scheduler.rollmux.control.wire import Accepted
from scheduler.rollmux.permits.events import Unloaded

LEASE_S = 0.5
NODE = NodeId("t0")


class FakeControl:
    """Asks for the node at once, and notes when it hears of the process."""

    def __init__(self) -> None:
        self.called_s: list[float] = []
        self.called = threading.Semaphore(0)
        self.reported = threading.Event()

    def call(self, message: Any) -> Accepted:
        assert isinstance(message, Unloaded)
        self.called_s.append(MonotonicClock().now())
        self.called.release()
        if NODE in message.nodes:
            self.reported.set()
        return Accepted(unload=() if self.reported.is_set() else (NODE,))


def test_a_release_that_takes_longer_than_a_lease_is_no_silence() -> None:
    control, released = FakeControl(), threading.Event()
    states = LoadedStates(control, MonotonicClock(), JobId("a"), "a.1")  # type: ignore[arg-type]

    def release() -> None:
        began_s = MonotonicClock().now()
        while MonotonicClock().now() - began_s < 3 * LEASE_S or len(control.called_s) < 8:
            assert control.called.acquire(timeout=30.0)
        released.set()

    states.leave(PhaseKind.TRAINING, (NODE,), release, lease_s=LEASE_S)
    assert control.reported.wait(30.0)
    assert released.is_set(), "reported only once it is clear"
    gaps_s = [
        after - before
        for before, after in zip(control.called_s, control.called_s[1:], strict=False)
    ]
    assert len(gaps_s) > 6
    # A machine that stands still once delays one of them.
    assert median(gaps_s) < LEASE_S
