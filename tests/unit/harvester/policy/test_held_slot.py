"""A slot under an order to stop: what it grants, what it offers, and when its lease ends."""

from typing import Any

import msgspec
import pytest

from harvester.contracts.ids import Epoch
from harvester.contracts.page import Guest
from harvester.contracts.wire.leases import SlotState
from harvester.contracts.wire.stops import Stop, StopOrder, StopSource
from harvester.policy.sample import LeaseView
from harvester.policy.slot import SlotPolicy


def stop(order: StopOrder) -> Stop:
    return Stop(
        order=order, source=StopSource.OPERATOR, by="alice", at="2026", reason="driver update"
    )


def test_a_drain_closes_the_grant_and_ends_the_lease_in_the_same_beat(
    open_scene: Any, grant_in: Any, ended_in: Any
) -> None:
    open_scene.guest = Guest(running=3)
    open_scene.stop = stop(StopOrder.DRAIN)
    effects = open_scene.beat()
    assert grant_in(effects).mode == "closed"
    assert ended_in(effects) == ["drain"]
    assert "drain (operator) by alice since 2026: driver update" in grant_in(effects).reason


def test_a_hold_lets_running_turns_end_and_admits_none(
    open_scene: Any, grant_in: Any, ended_in: Any
) -> None:
    open_scene.guest = Guest(running=2)
    open_scene.stop = stop(StopOrder.HOLD)
    for _ in range(600):
        effects = open_scene.beat()
        assert ended_in(effects) == []
    assert grant_in(effects).mode == "open"
    assert grant_in(effects).held
    open_scene.guest = Guest(waiting=1)
    assert ended_in(open_scene.beats_for(5.0)) == []


def test_a_held_guest_without_a_request_loses_its_lease_and_the_slot_is_not_offered(
    open_scene: Any, ended_in: Any
) -> None:
    open_scene.stop = stop(StopOrder.HOLD)
    assert ended_in(open_scene.beat()) == []
    assert ended_in(open_scene.beats_for(1.0)) == ["drain"]
    open_scene.lease = LeaseView(epoch=Epoch(2))
    open_scene.beat()
    policy = open_scene.policy
    assert (policy.condition, policy.slot_state()) == ("held", SlotState.OFF)
    assert "driver update" in policy.reason


def test_a_turn_that_arrives_just_before_the_hold_is_waited_for(
    open_scene: Any, ended_in: Any
) -> None:
    open_scene.stop = stop(StopOrder.HOLD)
    assert ended_in(open_scene.beats_for(0.8)) == []
    open_scene.guest = Guest(running=1)
    assert ended_in(open_scene.beats_for(3.0)) == []


def test_production_s_guards_bind_a_held_slot(open_scene: Any, grant_in: Any) -> None:
    open_scene.guest = Guest(running=1)
    open_scene.stop = stop(StopOrder.HOLD)
    open_scene.pulse_fault = "expired"
    assert grant_in(open_scene.beat()).mode == "closed"


@pytest.mark.parametrize("order", [StopOrder.HOLD, StopOrder.DRAIN])
def test_a_lifted_order_offers_the_slot_again_and_never_opens_blind(
    open_scene: Any, grant_in: Any, order: StopOrder
) -> None:
    open_scene.stop = stop(order)
    open_scene.lease = LeaseView(epoch=Epoch(2))
    open_scene.beats_for(1.0)
    open_scene.stop = None
    assert grant_in(open_scene.beat()).mode == "closed"
    assert open_scene.policy.slot_state() is SlotState.OFFERED


def test_a_recorded_stop_replays(open_scene: Any) -> None:
    open_scene.guest = Guest(running=2)
    open_scene.stop = stop(StopOrder.HOLD)
    open_scene.beats_for(0.5)
    open_scene.guest = Guest()
    open_scene.beats_for(2.0)
    other = SlotPolicy(open_scene.settings)
    for now, sample, effects in open_scene.recorded:
        told = msgspec.convert(msgspec.to_builtins(sample), SlotPolicy.SAMPLE)
        assert other.observe(told, now=now) == effects
