"""An engine that schedules ahead: a loop in the shape of vLLM's, with a batch queue two deep.

On a GPU the engine core launches a step before the one before has ended. The executor here ends a
step when the loop waits for it, so that every order of events is the test's.
"""

from collections import deque

import pytest

from coserve.guest.guest_slot import GuestSlot
from tests.unit.coserve.conftest import Slot

DEPTH = 2
DECODES = 4


class EngineLoop:
    """`has_requests`, `schedule` and `update_from_output` around a queue of launched steps."""

    def __init__(self, guest: GuestSlot, *, depth: int = DEPTH) -> None:
        self._guest = guest
        self._depth = depth
        self._queue: deque[int] = deque()
        self.launched: list[int] = []
        self.finished: list[int] = []
        guest.load.running = DECODES

    @property
    def asleep(self) -> bool:
        return not self._queue

    def turn(self) -> None:
        """One turn of the busy loop: launch if the gate opens, wait for a step if it must."""
        tokens = self._guest.decide().tokens
        if tokens > 0:
            step = min(tokens, DECODES)
            self._guest.launched(decodes=step, prefill_tokens=0)
            self._queue.append(step)
            self.launched.append(step)
            if len(self._queue) < self._depth:
                return
        if self._queue:
            self.finished.append(self._queue.popleft())
            self._guest.finished()


@pytest.fixture
def loop(guest: GuestSlot) -> EngineLoop:
    return EngineLoop(guest)


def test_keeps_the_queue_full_beside_idle_production(loop: EngineLoop) -> None:
    for _ in range(10):
        loop.turn()
    assert len(loop.launched) - len(loop.finished) == DEPTH - 1
    assert set(loop.launched) == {DECODES}


def test_after_an_arrival_only_the_steps_already_launched_run(slot: Slot, loop: EngineLoop) -> None:
    for _ in range(5):
        loop.turn()
    launched, running = len(loop.launched), len(loop.launched) - len(loop.finished)
    assert 0 < running <= DEPTH
    slot.production_arrives()
    for _ in range(10):
        loop.turn()
    assert len(loop.launched) == launched
    assert loop.finished == loop.launched
    assert loop.asleep


def test_an_arrival_between_two_launches_stops_the_second(slot: Slot, loop: EngineLoop) -> None:
    loop.turn()
    assert len(loop.launched) == 1
    slot.production_arrives()
    loop.turn()
    assert (len(loop.launched), len(loop.finished)) == (1, 1)


def test_goes_on_when_production_is_idle_again(slot: Slot, loop: EngineLoop) -> None:
    loop.turn()
    slot.production_arrives()
    loop.turn()
    assert loop.asleep
    slot.pulse()
    loop.turn()
    assert len(loop.launched) == 2


def test_steps_in_the_queue_use_up_the_slack_of_the_next_one(
    guest: GuestSlot, slot: Slot, loop: EngineLoop
) -> None:
    # The phantom leaves 26 ms; each step of four decodes is predicted to take 12 ms.
    slot.grant(ttft_slo_s=0.050)
    guest.steps.model.factor = 1.0
    guest.steps.model.base_s, guest.steps.model.decode_s = 0.008, 0.001
    deep = EngineLoop(guest, depth=8)
    for _ in range(3):
        deep.turn()
    assert deep.launched == [DECODES, DECODES]
    assert deep.finished == [DECODES], "the third turn found no slack and waited"


def test_a_queue_one_deep_never_holds_a_second_step(guest: GuestSlot) -> None:
    loop = EngineLoop(guest, depth=1)
    for _ in range(5):
        loop.turn()
        assert loop.asleep
    assert loop.finished == loop.launched == [DECODES] * 5
