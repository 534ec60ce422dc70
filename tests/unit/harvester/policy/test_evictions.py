"""Evictions an hour: counted over guests that come and go, and over restarts of the agent."""

from typing import Any

from harvester.contracts.page import Guest
from harvester.policy.durable import moved
from harvester.policy.evictions import EvictionState, EvictionWindow
from harvester.policy.slot import SlotPolicy


def test_more_than_the_bound_within_an_hour_is_too_many_and_passes() -> None:
    window = EvictionWindow(10)
    window.observe(100, now=0.0)
    assert window.count == 0, "what a guest did before the agent came is unknown"
    window.observe(110, now=10.0)
    assert not window.exceeded
    window.observe(111, now=100.0)
    assert window.exceeded
    window.observe(111, now=3609.0)
    assert window.exceeded
    window.observe(111, now=3611.0)
    assert not window.exceeded


def test_a_new_guest_s_count_begins_anew_and_a_silent_one_changes_nothing() -> None:
    window = EvictionWindow(10)
    window.observe(5, now=0.0)
    window.observe(9, now=1.0)
    window.observe(None, now=2.0)
    window.observe(0, now=3.0)
    window.observe(2, now=4.0)
    assert window.count == 6


def test_without_a_bound_nothing_is_too_many() -> None:
    window = EvictionWindow(0)
    window.observe(0, now=0.0)
    window.observe(1 << 40, now=1.0)
    assert not window.exceeded


def test_constant_evictions_take_constant_memory() -> None:
    window = EvictionWindow(10)
    for beat in range(72_000):
        window.observe(beat, now=beat / 10)
    assert len(window.state.bins) <= 61
    assert 35_000 <= window.count <= 36_600


def test_evictions_survive_a_restart_of_the_agent(make_scene: Any) -> None:
    scene = make_scene(evictions_per_hour_max=3)
    scene.guest = Guest(aborted_total=0)
    scene.beat()
    scene.guest = Guest(aborted_total=4)
    scene.beat()
    assert scene.policy.evictions.exceeded
    left = moved(scene.policy.durable(), from_s=scene.now, to_s=5.0)
    after = SlotPolicy(scene.settings)
    after.resume(left, now=5.0)
    assert after.evictions.exceeded
    after.evictions.observe(4, now=5.0 + 3599.0)
    assert after.evictions.exceeded
    after.evictions.observe(4, now=5.0 + 3601.0)
    assert not after.evictions.exceeded


def test_a_state_of_an_older_agent_has_none() -> None:
    assert EvictionWindow(1, EvictionState()).count == 0
