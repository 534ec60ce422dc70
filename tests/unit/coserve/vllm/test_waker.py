"""The waker against a slot whose every answer the test sets."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.law.gate import Closed, StepDecision
from coserve.vllm import waker
from coserve.vllm.waker import Waker
from harvester.contracts import bell
from harvester.contracts.bell import PrivateBell, Word

OPEN = StepDecision(8, None, 1.0)
SHUT = StepDecision(0, Closed.NO_SLACK, 0.0)
RESTING = StepDecision(0, Closed.RESTING, 0.0, rest_s=0.01)
HELD = StepDecision(0, Closed.GRANT_CLOSED, 0.0)
WAIT_S = 5.0


class FakeSlot:
    """Counts what it is asked; `asked` is set on every full decision."""

    def __init__(self) -> None:
        self.decision = SHUT
        self.page = PrivateBell()
        self.pulse = PrivateBell()
        self.over = self.owes = self.missed = self.closed = False
        self.load = SimpleNamespace(processes=("engine", "worker"))
        self.error: Exception | None = None
        self.unwritable: Exception | None = None
        self.decisions = self.published = 0
        self.asked = threading.Semaphore(0)
        self.told = threading.Semaphore(0)

    def decide(self) -> StepDecision:
        self.decisions += 1
        error, self.error = self.error, None
        self.asked.release()
        if error is not None:
            raise error
        return self.decision

    @property
    def last(self) -> StepDecision:
        return self.decision

    def written(self, *, grant_only: bool = False) -> tuple[Word, ...]:
        return (self.page.word(),) if grant_only else (self.page.word(), self.pulse.word())

    def grace_over(self) -> bool:
        return self.over

    def owes_memory(self) -> bool:
        return self.owes

    def memory_missed(self) -> bool:
        return self.missed

    def close(self) -> None:
        self.closed = True

    def publish(self) -> None:
        if self.unwritable is not None:
            raise self.unwritable
        self.published += 1
        self.told.release()


class Scene:
    def __init__(self) -> None:
        self.slot = FakeSlot()
        self.woken = threading.Semaphore(0)
        self.ended: list[Any] = []
        self.over = threading.Event()
        self.waker = Waker(self.slot, self.woken.release, end=self.end)  # type: ignore[arg-type]
        self.waker.start()

    def end(self, processes: Any) -> None:
        assert self.slot.closed, "no page says any more what is held"
        self.ended.append(processes)
        self.over.set()

    def arm_and_look(self) -> None:
        """Arm, and wait until the waker has evaluated the gate."""
        while self.slot.asked.acquire(blocking=False):
            pass
        self.waker.arm()
        assert self.slot.asked.acquire(timeout=WAIT_S)


@pytest.fixture(params=[True, False], ids=["rung", "napping"])
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """On a kernel that can wake a sleeper, and on one that cannot."""
    if not request.param:
        monkeypatch.setattr(bell, "_call", None)
    scene = Scene()
    yield scene
    scene.waker.stop()
    scene.waker.join(timeout=WAIT_S)
    assert not scene.waker.is_alive()


def eventually(semaphore: threading.Semaphore) -> bool:
    return semaphore.acquire(timeout=WAIT_S)


def not_within_beats(semaphore: threading.Semaphore) -> bool:
    return not semaphore.acquire(timeout=0.15)


def test_wakes_the_loop_when_a_changed_page_opens_the_gate(scene: Scene) -> None:
    scene.arm_and_look()
    scene.slot.decision = OPEN
    scene.slot.page.ring()
    assert eventually(scene.woken)


def test_finds_an_opening_that_no_sequence_shows(scene: Scene) -> None:
    scene.arm_and_look()
    scene.slot.decision = OPEN
    assert eventually(scene.woken)


def test_wakes_no_loop_that_is_not_armed(scene: Scene) -> None:
    scene.slot.decision = OPEN
    assert not_within_beats(scene.woken)


def test_wakes_once_per_arming(scene: Scene) -> None:
    scene.slot.decision = OPEN
    scene.waker.arm()
    assert eventually(scene.woken)
    assert not_within_beats(scene.woken)
    scene.waker.arm()
    assert eventually(scene.woken)


def test_evaluates_the_gate_rarely_while_no_page_changes(scene: Scene) -> None:
    scene.arm_and_look()
    while scene.slot.told.acquire(blocking=False):
        pass
    decisions = scene.slot.decisions
    for _ in range(5):
        assert eventually(scene.slot.told)
    assert scene.slot.decisions - decisions < 20


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> Scene:
    """It looks at nothing by itself, only when something is written."""
    monkeypatch.setattr(waker, "BEAT_S", 60.0)
    return scene


def test_a_pulse_that_can_open_the_gate_is_looked_at(patient: Scene) -> None:
    patient.arm_and_look()
    patient.slot.decision = OPEN
    patient.slot.pulse.ring()
    assert eventually(patient.woken)


def test_a_rest_that_is_over_is_looked_at_without_a_word(patient: Scene) -> None:
    patient.slot.decision = RESTING
    patient.arm_and_look()
    patient.slot.decision = OPEN
    assert eventually(patient.woken)


def test_while_the_grant_closes_the_gate_only_the_grant_is_looked_at(patient: Scene) -> None:
    patient.slot.decision = HELD
    patient.arm_and_look()
    decisions = patient.slot.decisions
    for _ in range(50):
        patient.slot.pulse.ring()
        time.sleep(0.002)
    assert patient.slot.decisions - decisions <= 2
    patient.slot.decision = OPEN
    patient.slot.page.ring()
    assert eventually(patient.woken)


def test_pulses_count_again_once_a_grant_has_opened(patient: Scene) -> None:
    patient.slot.decision = HELD
    patient.arm_and_look()
    patient.slot.decision = SHUT
    patient.slot.page.ring()
    assert eventually(patient.slot.asked)
    patient.slot.decision = OPEN
    patient.slot.pulse.ring()
    assert eventually(patient.woken)


def test_wakes_once_when_the_grace_is_over_and_not_again_while_it_stays_so(scene: Scene) -> None:
    scene.arm_and_look()
    scene.slot.over = True
    assert eventually(scene.woken)
    scene.waker.arm()
    assert not_within_beats(scene.woken)
    scene.slot.over = False
    scene.slot.page.ring()
    scene.arm_and_look()
    scene.slot.over = True
    assert eventually(scene.woken), "a grant that was lost again"


def test_a_grace_that_ended_without_work_is_still_reported(scene: Scene) -> None:
    scene.slot.over = True
    assert eventually(scene.slot.told)
    assert eventually(scene.slot.told)
    scene.waker.arm()
    assert eventually(scene.woken)


@pytest.mark.parametrize("prepare", [Scene.arm_and_look, lambda scene: None])
def test_keeps_the_guest_page_fresh_armed_and_idle(
    scene: Scene, prepare: Callable[[Scene], None]
) -> None:
    prepare(scene)
    for _ in range(3):
        assert eventually(scene.slot.told)


@pytest.mark.parametrize("prepare", [Scene.arm_and_look, lambda scene: None])
def test_wakes_the_loop_for_memory_that_is_due_whether_or_not_there_is_work(
    scene: Scene, prepare: Callable[[Scene], None]
) -> None:
    prepare(scene)
    scene.slot.owes = True
    assert eventually(scene.woken)


@pytest.mark.parametrize("prepare", [Scene.arm_and_look, lambda scene: None])
def test_ends_the_guest_whose_memory_is_not_back_in_time(
    scene: Scene, prepare: Callable[[Scene], None]
) -> None:
    prepare(scene)
    assert scene.ended == []
    scene.slot.missed = True
    assert scene.over.wait(WAIT_S)
    assert scene.ended[0] == ("engine", "worker")


def test_ends_the_guest_also_where_its_page_cannot_be_written(scene: Scene) -> None:
    scene.slot.missed = True
    scene.slot.unwritable = OSError("no space left")
    assert scene.over.wait(WAIT_S)


def test_leaves_a_guest_to_its_agent_that_must_not_end_itself() -> None:
    slot = FakeSlot()
    slot.missed = True
    waker = Waker(slot, lambda: None, end=None)  # type: ignore[arg-type]
    waker.start()
    assert eventually(slot.told)
    assert eventually(slot.told)
    waker.stop()
    waker.join(timeout=WAIT_S)
    assert not slot.closed


def test_lives_on_after_an_error_and_still_wakes(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.slot.error = OSError("page gone")
    scene.arm_and_look()
    scene.slot.decision = OPEN
    assert eventually(scene.woken)
    assert "page gone" in caplog.text


def test_stops_while_armed(scene: Scene) -> None:
    scene.arm_and_look()
    scene.waker.stop()
    scene.waker.join(timeout=WAIT_S)
    assert not scene.waker.is_alive()
    assert not scene.woken.acquire(blocking=False)
