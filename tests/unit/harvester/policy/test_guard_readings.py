"""The readings of each guard: value, limit, and whether it gives way."""

from typing import Any

from msgspec.structs import replace

from harvester.contracts.page import Guest
from harvester.contracts.wire.error_budget import Allotment
from harvester.contracts.wire.leases import GuardReading


def reading(scene: Any, guard: str) -> GuardReading:
    readings: tuple[GuardReading, ...] = scene.policy.guard_readings()
    return next(each for each in readings if each.guard == guard)


def test_the_slack_law_binds_while_it_alone_holds_a_guest_that_has_work(open_scene: Any) -> None:
    assert reading(open_scene, "slack_law") == GuardReading(
        guard="slack_law", value=0.0, limit=0.0, binds=False
    )
    for reason in ("no_slack", "resting"):
        open_scene.guest = Guest(running=1, reason=reason)
        open_scene.beats_for(6)
    law = reading(open_scene, "slack_law")
    assert law.binds
    assert 0.15 < law.value < 0.2
    for other in (
        Guest(running=1, reason="grant_closed"),
        Guest(reason="no_slack"),
        Guest(running=1, reason="no_slack", leaving=True),
        None,
    ):
        open_scene.guest = other
        open_scene.beat()
        assert not reading(open_scene, "slack_law").binds
    open_scene.beats_for(600)
    assert reading(open_scene, "slack_law").value < 0.001


def test_only_the_level_guard_that_was_breached_binds(open_scene: Any) -> None:
    open_scene.guest_steps()
    open_scene.latencies(itl=(0.9,) * 5)
    open_scene.beat()
    assert reading(open_scene, "level_itl").binds
    assert not reading(open_scene, "level_ttft").binds
    open_scene.beats_for(20)
    assert not reading(open_scene, "level_itl").binds


def test_a_service_that_has_overspent_stops_with_a_value_above_its_limit(open_scene: Any) -> None:
    allotment = Allotment(number=1, misses=9.0, budget=100.0, spent=140.0)
    open_scene.lease = replace(open_scene.lease, allotment=allotment)
    open_scene.beat()
    budget = reading(open_scene, "error_budget")
    assert (budget.value, budget.limit, budget.binds) == (140.0, 100.0, True)
