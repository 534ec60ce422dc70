"""Orders, conditions and lost guests that end a slot's lease."""

from typing import Any

import pytest

from harvester.contracts.ids import Epoch, LeaseId
from harvester.contracts.page import Guest, PageFault
from harvester.contracts.wire.leases import SlotState
from harvester.policy.effects import Quarantine
from harvester.policy.sample import (
    KillSwitch,
    LeaseView,
)
from harvester.policy.settings import (
    Mode,
)
from harvester.policy.states import Condition


def test_hold_keeps_the_lease_and_drain_ends_it(open_scene: Any, ended_in: Any) -> None:
    open_scene.kill_switch = KillSwitch.HOLD
    assert ended_in(open_scene.beats_for(20)) == []
    open_scene.kill_switch = KillSwitch.DRAIN
    assert ended_in(open_scene.beat()) == ["kill_switch"]


def test_ends_the_lease_of_a_guest_that_stays_away(open_scene: Any, ended_in: Any) -> None:
    open_scene.guest = None
    assert ended_in(open_scene.beats_for(7)) == []
    assert open_scene.policy.slot_state() is SlotState.OFF
    assert ended_in(open_scene.beats_for(0.1)) == ["guest_lost"]


def test_a_guest_that_production_starves_is_not_lost(
    open_scene: Any, grant_in: Any, ended_in: Any
) -> None:
    open_scene.guest, open_scene.guest_runs_below_production = None, True
    open_scene.set_pulse(in_flight=1)
    for _ in range(600):
        open_scene.set_pulse(steps_total=open_scene.pulse.steps_total + 1)
        effects = open_scene.beat()
        assert ended_in(effects) == []
    assert grant_in(effects).reason == "guest alive and without a core"
    assert (grant_in(effects).mode, open_scene.policy.slot_state()) == ("closed", "offered")
    open_scene.guest = Guest()
    assert grant_in(open_scene.beat()).mode == "open"


def test_a_pulse_that_was_late_is_no_pause_in_which_a_starved_guest_could_have_spoken(
    open_scene: Any, ended_in: Any
) -> None:
    open_scene.guest, open_scene.guest_runs_below_production = None, True
    for beat in range(300):
        open_scene.set_pulse(in_flight=1, steps_total=open_scene.pulse.steps_total + 1)
        open_scene.pulse_fault = PageFault.EXPIRED if beat == 100 else None
        assert ended_in(open_scene.beat()) == []


@pytest.mark.parametrize(("runs_below_production", "in_flight"), [(False, 1), (True, 0)])
def test_a_guest_that_is_gone_or_silent_on_a_core_of_its_own_is_lost(
    runs_below_production: bool, in_flight: int, open_scene: Any, ended_in: Any
) -> None:
    open_scene.guest, open_scene.guest_runs_below_production = None, runs_below_production
    ended: list[str] = []
    for _ in range(75):
        open_scene.set_pulse(in_flight=in_flight, steps_total=open_scene.pulse.steps_total + 1)
        ended += ended_in(open_scene.beat())
        open_scene.lease = LeaseView(epoch=Epoch(2)) if ended else open_scene.lease
    assert ended == ["guest_lost"]


def test_ends_the_lease_when_production_stays_silent(open_scene: Any, ended_in: Any) -> None:
    open_scene.pulse_fault = PageFault.EXPIRED
    assert ended_in(open_scene.beats_for(4.5)) == []
    open_scene.beats_for(0.5)
    assert ended_in(open_scene.beat()) == ["production_lost"]


def test_quarantines_a_slot_that_loses_its_guest_again_and_again(
    open_scene: Any, grant_in: Any
) -> None:
    quarantines = 0
    for _ in range(3):
        open_scene.guest = None
        open_scene.lease = LeaseView(epoch=Epoch(1), lease=LeaseId("l"))
        for _ in range(75):
            effects = open_scene.beat()
            quarantines += sum(isinstance(effect, Quarantine) for effect in effects)
            if len(effects) > 1:
                open_scene.lease = LeaseView(epoch=Epoch(2))
        open_scene.guest = Guest()
        open_scene.beats_for(1)

    assert quarantines == 1
    assert open_scene.policy.slot_state() is SlotState.QUARANTINED
    open_scene.lease = LeaseView(epoch=Epoch(3), lease=LeaseId("l"))
    assert grant_in(open_scene.beats_for(1000)).mode == "closed"


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_a_slot_that_no_longer_harvests_ends_its_lease(
    make_scene: Any, ended_in: Any, mode: Mode
) -> None:
    assert ended_in(make_scene(mode=mode).beat()) == ["drain"]


def test_a_guest_that_was_stopped_on_purpose_is_no_loss(open_scene: Any, ended_in: Any) -> None:
    ended: list[str] = []
    for stop in range(5):
        open_scene.lease = LeaseView(epoch=Epoch(stop), lease=LeaseId("l"))
        open_scene.guest = Guest()
        open_scene.beats_for(1)
        open_scene.guest = Guest(leaving=True)
        ended += ended_in(open_scene.beat())
        assert open_scene.policy.condition is Condition.STOPPED
        open_scene.lease = LeaseView(epoch=Epoch(stop))
        open_scene.guest, open_scene.guest_fault = None, PageFault.MISSING
        open_scene.beats_for(60)
        assert open_scene.policy.condition is Condition.STOPPED
        assert open_scene.policy.slot_state() is SlotState.OFF
    assert ended == ["drain"] * 5
    assert open_scene.policy.guest.state.losses_s == []


def test_a_guest_that_crashes_after_one_that_was_stopped_is_lost(
    open_scene: Any, ended_in: Any
) -> None:
    open_scene.guest = Guest(leaving=True)
    open_scene.beat()
    open_scene.guest = Guest()
    open_scene.beats_for(1)
    open_scene.guest = None
    open_scene.beats_for(7)
    assert ended_in(open_scene.beats_for(0.1)) == ["guest_lost"]
