"""State that survives a restart, converted to the new process's clock."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harvester.contracts.page import Guest, PageFault
from harvester.contracts.served import Served
from harvester.contracts.wire.error_budget import Allotment
from harvester.contracts.wire.leases import SlotState
from harvester.policy.budget import ErrorBudget
from harvester.policy.durable import DurableState, moved
from harvester.policy.level import MissState
from harvester.policy.proof import ProofState
from harvester.policy.settings import BudgetSettings, ProofSettings
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import Condition

DAY_S = 86_400.0


def restarted(scene: Any, *, now: float) -> None:
    """Another agent's policy resumes this one's state, at another clock's `now`."""
    left = moved(scene.policy.durable(), from_s=scene.now, to_s=now)
    scene.policy, scene.now = SlotPolicy(scene.settings), now
    scene.policy.resume(left, now=now)


def test_a_restart_keeps_the_life_and_spends_nothing_before_a_renewal(make_scene: Any) -> None:
    scene = make_scene(proof=ProofSettings(share_ratio=0.0))
    scene.policy.begin("first")
    allotment = Allotment(number=3, misses=9.0, budget=100.0, spent=0.0)
    scene.lease = replace(scene.lease, allotment=allotment)
    scene.beat()
    before = scene.policy.budget_report("chat", number=3, leased=True)
    assert (before.life, before.run, before.limit) == ("first", 1, 9.0)
    restarted(scene, now=500.0)
    scene.policy.begin("second")
    scene.lease = replace(scene.lease, allotment=None)
    scene.beat()
    after = scene.policy.budget_report("chat", number=0, leased=True)
    assert (after.life, after.run, after.limit) == ("first", 2, after.charged)
    assert after.served.requests == 0
    assert SlotPolicy(scene.settings).budget_report("chat", number=0, leased=False).life == ""


@given(
    at_s=st.floats(0, 90 * DAY_S),
    to_s=st.floats(0, 90 * DAY_S),
    counts=st.lists(st.tuples(st.floats(0, 3 * DAY_S), st.integers(0, 99)), max_size=8),
)
def test_an_error_budget_is_the_same_on_any_clock(
    at_s: float, to_s: float, counts: list[tuple[float, int]]
) -> None:
    budget = ErrorBudget(BudgetSettings())
    for back_s, misses in sorted(counts, reverse=True):
        if back_s <= at_s:
            budget.observe(
                Served(requests=1000, granted=1000, granted_misses=misses), now=at_s - back_s
            )
    budget.observe(Served(), now=at_s)
    left = moved(DurableState(budget=budget.state), from_s=at_s, to_s=to_s)
    later = ErrorBudget(BudgetSettings(), left.budget)
    stopped = later.observe(Served(), now=to_s)
    assert (later.spent, later.allowance) == (budget.spent, budget.allowance)
    assert later.burn_rate(60) == budget.burn_rate(60)
    assert stopped == budget.stopped


@pytest.mark.parametrize("to_s", [0.0, 100.0, 1e7])
def test_a_harm_stop_goes_on_for_as_long_as_it_had_left(make_scene: Any, to_s: float) -> None:
    scene = make_scene()
    scene.beats_for(1)
    stopped = ProofState(stopped_at_s=scene.now - 3000.0)
    scene.policy.resume(DurableState(proof=stopped), now=scene.now)
    restarted(scene, now=to_s)
    scene.beats_for(590)
    assert scene.policy.condition is Condition.HARMFUL
    scene.beats_for(20)
    assert scene.policy.condition is not Condition.HARMFUL


def test_a_quarantine_and_its_reason_outlive_the_agent(open_scene: Any) -> None:
    open_scene.policy.quarantine("guest lost 3 times")
    restarted(open_scene, now=5.0)
    open_scene.beats_for(60)
    assert open_scene.policy.slot_state() is SlotState.QUARANTINED
    assert open_scene.policy.reason == "guest lost 3 times"


def test_losses_are_counted_over_restarts(open_scene: Any) -> None:
    for now in (1e6, 10.0, 500.0):
        open_scene.guest = Guest()
        open_scene.beats_for(1)
        open_scene.guest = None
        open_scene.beats_for(7.1)
        restarted(open_scene, now=now)
    open_scene.beat()
    assert open_scene.policy.slot_state() is SlotState.QUARANTINED


def test_crashes_of_production_are_counted_over_restarts(open_scene: Any) -> None:
    for now in (1e6, 10.0, 500.0):
        open_scene.pulse_fault = None
        open_scene.beats_for(5)
        open_scene.guest_steps()
        assert open_scene.policy.condition is Condition.CLEAR
        open_scene.beat()
        open_scene.pulse_fault = PageFault.EXPIRED
        open_scene.beats_for(5.2)
        restarted(open_scene, now=now)
    open_scene.beat()
    assert open_scene.policy.slot_state() is SlotState.QUARANTINED
    assert "production was lost or restarted 3 times" in open_scene.policy.reason


def test_a_level_that_was_halved_stays_halved(open_scene: Any, grant_in: Any) -> None:
    open_scene.guest_steps()
    open_scene.latencies(ttft=(0.9,) * 5)
    cap = grant_in(open_scene.beat()).step_tokens_cap
    restarted(open_scene, now=3.0)
    assert grant_in(open_scene.beat()).step_tokens_cap == cap < 2048


def test_a_restart_is_followed_by_a_quiet_time(open_scene: Any) -> None:
    restarted(open_scene, now=4.0)
    open_scene.beats_for(1.8)
    assert open_scene.policy.condition is Condition.COOLING
    open_scene.beats_for(0.3)
    assert open_scene.policy.condition is Condition.CLEAR


def test_a_history_that_is_not_known_is_spent_until_traffic_has_earned_it_back() -> None:
    budget = ErrorBudget(BudgetSettings())
    assert not budget.observe(Served(requests=1.0), now=0.0), "a new slot"
    budget.lose_history(now=50.0)
    assert budget.observe(Served(), now=60.0)
    assert "history not known" in budget.reason
    charged, allowed = budget.charge
    assert (charged, round(allowed, 6)) == (10.0, 0.001)
    assert budget.observe(Served(requests=9000.0), now=3600.0)
    assert not budget.observe(Served(requests=1000.0), now=3660.0)


def test_a_lost_history_is_spent_for_a_whole_window_and_no_longer() -> None:
    budget = ErrorBudget(BudgetSettings())
    budget.lose_history(now=0.0)
    assert budget.observe(Served(), now=27.9 * DAY_S)
    assert not budget.observe(Served(), now=28.1 * DAY_S)


def test_a_state_of_an_older_agent_is_read() -> None:
    left = msgspec.json.encode(DurableState(life="old", misses=MissState(samples=5.0)))
    older = msgspec.json.decode(left)
    for group, added in (
        ("proof", ("outlines",)),
        ("misses", ("own_samples", "own_weighed", "own_misses", "own_squares", "breached")),
        ("budget", ("unknown_at_s",)),
    ):
        for name in added:
            del older[group][name]
    older["proof"]["ended"] = [[1.0, 2.0, True], [3.0, 4.0, None]]
    assert msgspec.convert(older, DurableState) == msgspec.json.decode(left, type=DurableState)
