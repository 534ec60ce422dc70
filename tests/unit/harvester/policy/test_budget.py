import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.policy.budget import ErrorBudget, Ring
from harvester.policy.settings import BudgetSettings

DAY_S = 86_400.0


def serve(budget: ErrorBudget, *, start_s: float, minutes: int, requests: float, misses: float):
    """Observe this many requests and misses in every minute; returns the verdicts."""
    return [
        budget.observe(requests=requests, misses=misses, now=start_s + 60.0 * minute)
        for minute in range(minutes)
    ]


def test_allows_its_share_of_the_slos_error_budget() -> None:
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=0.1))
    serve(budget, start_s=0, minutes=100, requests=100, misses=0)
    assert budget.allowance == pytest.approx(10.0)


def test_stops_when_the_allowance_is_spent_though_it_burned_slowly() -> None:
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=0.1))
    verdicts = serve(budget, start_s=0, minutes=3000, requests=100, misses=0.2)
    assert not verdicts[30]
    assert verdicts[-1]
    assert "28 d" in budget.reason


def test_unknown_history_allows_nothing() -> None:
    budget = ErrorBudget(BudgetSettings(minimum_misses=5))
    assert budget.allowance == 0
    assert budget.observe(requests=5, misses=5, now=27 * DAY_S)


def test_forgets_after_28_days() -> None:
    budget = ErrorBudget(BudgetSettings())
    serve(budget, start_s=0, minutes=60, requests=100, misses=50)
    assert budget.stopped
    budget.observe(requests=0, misses=0, now=29 * DAY_S)
    assert budget.spent == 0
    assert not budget.stopped


def test_stops_at_half_the_rate_at_which_people_are_paged() -> None:
    generous = BudgetSettings(slo_target_ratio=0.99, share_ratio=1.0)
    slow, fast = ErrorBudget(generous), ErrorBudget(generous)
    for budget in (slow, fast):
        serve(budget, start_s=0, minutes=28 * 24 * 60 // 4, requests=1000, misses=0)
    start_s = 7 * DAY_S
    assert not any(serve(slow, start_s=start_s, minutes=120, requests=1000, misses=20))
    verdicts = serve(fast, start_s=start_s, minutes=120, requests=1000, misses=80)
    assert verdicts[-1]
    assert "burns" in fast.reason


def test_one_slow_request_in_little_traffic_is_no_trend() -> None:
    budget = ErrorBudget(BudgetSettings(minimum_requests=100, minimum_misses=10))
    assert not any(serve(budget, start_s=0, minutes=60, requests=1, misses=0.1))


def test_goes_on_only_after_the_hold_and_a_clear_recovery() -> None:
    budget = ErrorBudget(
        BudgetSettings(slo_target_ratio=0.99, share_ratio=1.0, hold_s=600, minimum_misses=10)
    )
    serve(budget, start_s=0, minutes=20_000, requests=1000, misses=0)
    start_s = 20_000 * 60.0
    assert serve(budget, start_s=start_s, minutes=60, requests=1000, misses=300)[-1]
    after = serve(budget, start_s=start_s + 3600, minutes=500, requests=1000, misses=0)
    assert all(after[:9])
    assert not after[-1]


def test_counts_without_stopping_where_it_is_not_enforced() -> None:
    budget = ErrorBudget(BudgetSettings(enforced=False))
    assert not any(serve(budget, start_s=0, minutes=10, requests=100, misses=100))
    assert budget.stopped


@given(st.lists(st.tuples(st.floats(0, 500), st.integers(0, 5)), max_size=60))
def test_a_ring_holds_exactly_its_last_periods(steps: list[tuple[float, int]]) -> None:
    ring = Ring(period_s=60.0, requests=[0.0] * 8, misses=[0.0] * 8)
    now, events = 0.0, []
    for elapsed_s, misses in steps:
        now += elapsed_s
        ring.add(requests=10, misses=misses, now=now)
        events.append((int(now // 60), misses))
        newest = int(now // 60)
        kept = [m for period, m in events if period > newest - 8]
        assert ring.last(8) == (10.0 * len(kept), float(sum(kept)))
