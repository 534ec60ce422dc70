import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from harvester.contracts.served import Served
from harvester.contracts.wire.error_budget import Allotment
from harvester.policy.budget import ErrorBudget, Ring
from harvester.policy.settings import BudgetSettings

DAY_S = 86_400.0


def serve(budget: ErrorBudget, *, start_s: float, minutes: int, requests: float, misses: float):
    """Observe this many requests and misses in every minute; returns the verdicts."""
    return [
        budget.observe(
            Served(requests=requests, misses=misses, granted=requests, granted_misses=misses),
            now=start_s + 60.0 * minute,
            withheld_share=0.25,
        )
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
    budget = ErrorBudget(BudgetSettings(minimum_misses=5), proven=False)
    assert budget.allowance == 0
    assert budget.observe(Served(requests=5, misses=5), now=27 * DAY_S)


def test_forgets_after_28_days() -> None:
    budget = ErrorBudget(BudgetSettings())
    serve(budget, start_s=0, minutes=60, requests=100, misses=50)
    assert budget.stopped
    budget.observe(Served(), now=29 * DAY_S)
    assert budget.spent == 0
    assert not budget.stopped


def test_stops_at_half_the_rate_at_which_people_are_paged() -> None:
    generous = BudgetSettings(slo_target_ratio=0.99, share_ratio=1.0)
    slow, fast = ErrorBudget(generous), ErrorBudget(generous)
    for budget in (slow, fast):
        serve(budget, start_s=0, minutes=2 * 24 * 60, requests=1000, misses=0)
    start_s = 2 * DAY_S
    assert not any(serve(slow, start_s=start_s, minutes=120, requests=1000, misses=20))
    verdicts = serve(fast, start_s=start_s, minutes=120, requests=1000, misses=80)
    assert verdicts[-1]
    assert "burns" in fast.reason


def test_one_slow_request_in_little_traffic_is_no_trend() -> None:
    budget = ErrorBudget(BudgetSettings(minimum_requests=100, minimum_misses=10))
    assert not any(serve(budget, start_s=0, minutes=60, requests=1, misses=0.1))


def test_late_tokens_without_a_new_request_give_no_verdict() -> None:
    budget = ErrorBudget(BudgetSettings(minimum_requests=0))
    late = Served(misses=20, granted_beats=20, granted_late_beats=20)
    assert not any(budget.observe(late, now=60.0 * minute) for minute in range(30))


def test_goes_on_only_after_the_hold_and_a_clear_recovery() -> None:
    budget = ErrorBudget(
        BudgetSettings(slo_target_ratio=0.99, share_ratio=1.0, hold_s=600, minimum_misses=10)
    )
    serve(budget, start_s=0, minutes=4_000, requests=1000, misses=0)
    start_s = 4_000 * 60.0
    assert serve(budget, start_s=start_s, minutes=60, requests=1000, misses=300)[-1]
    after = serve(budget, start_s=start_s + 3600, minutes=500, requests=1000, misses=0)
    assert all(after[:9])
    assert not after[-1]


def test_counts_without_stopping_where_it_is_not_enforced() -> None:
    budget = ErrorBudget(BudgetSettings(enforced=False))
    assert not any(serve(budget, start_s=0, minutes=30, requests=100, misses=100))
    assert budget.stopped


OWN = Served(
    requests=1000, misses=8, granted=760, granted_misses=6.08, withheld=40, withheld_misses=0.32
)
HARM = replace(OWN, misses=16, granted_misses=12.16)


def test_production_s_own_misses_are_not_charged() -> None:
    """0.8 % of its own, of 1 % that it may miss: a tenth of that is harvesting's."""
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=0.1))
    assert not any(budget.observe(OWN, now=60.0 * minute) for minute in range(2_000))
    assert budget.spent == pytest.approx(0, abs=1e-6)


def test_misses_that_withheld_slices_do_not_explain_are_charged() -> None:
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=0.1))
    verdicts = [budget.observe(HARM, now=60.0 * minute) for minute in range(600)]
    assert verdicts[-1]
    assert budget.spent == pytest.approx(760 * 600 * 0.008)


def test_hours_that_differ_much_are_less_certain() -> None:
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=0.1))
    for minute in range(1200):
        # Now one kind of slice has met the bursts, now the other.
        late = 100.0 if (minute // 60) % 2 else -60.0
        burst = replace(OWN, granted_misses=200.0 + late, withheld_misses=10.0)
        budget.observe(burst, now=60.0 * minute)
    assert budget.spent == 0


def test_an_outage_of_production_is_no_burn() -> None:
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=1.0))
    down = Served(requests=300, misses=270, granted=270, granted_misses=270, withheld=15,
                  withheld_misses=15)  # fmt: skip
    for minute in range(600):
        stopped = budget.observe(down if 300 <= minute < 310 else OWN, now=60.0 * minute)
        assert not stopped, minute


def test_an_overload_s_long_slices_count_as_few_when_slices_are_short_again() -> None:
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=1.0))
    # Two withheld slices of forty, both in the overload's quiet moments.
    overload = Served(requests=300, granted=270, granted_misses=130, withheld=14, withheld_misses=1)
    for minute in range(360):
        served, slice_s = (overload, 120.0) if 280 <= minute < 320 else (OWN, 2.0)
        assert not budget.observe(served, now=60.0 * minute, slice_s=slice_s), minute


def test_an_overload_after_a_quiet_first_half_hour_is_no_burn() -> None:
    """A quarter of the quiet slices was withheld, and a twentieth of the overload's."""
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=1.0))
    for minute in range(60):
        share, late = (0.25, 0.0) if minute < 30 else (0.05, 0.15)
        granted = 300 * (1 - share)
        served = Served(
            requests=300,
            granted=granted,
            granted_misses=late * granted,
            withheld=granted,
            withheld_misses=late * granted,
        )
        stopped = budget.observe(served, now=60.0 * minute, slice_s=2.0, withheld_share=share)
        assert not stopped, minute


@pytest.mark.parametrize(("slice_s", "withheld_share"), [(2.0, 0.05), (30.0, 0.5)])
def test_a_burn_stops_before_people_are_paged(slice_s: float, withheld_share: float) -> None:
    """25 % misses beside the guest: 14.4 times the pace over an hour is reached after 35 min. Long
    slices show less, but half of them are withheld as soon as the proof suspects the guest."""
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=1.0))
    quiet = Served(requests=300, granted=270, withheld=270)
    for minute in range(24 * 60):
        budget.observe(quiet, now=60.0 * minute, slice_s=slice_s, withheld_share=0.05)
    granted = 285 * (1 - withheld_share)
    harm = replace(quiet, misses=67, granted=granted, granted_misses=granted / 4, withheld=granted)
    minute = 24 * 60
    while not budget.observe(
        harm, now=60.0 * minute, slice_s=slice_s, withheld_share=withheld_share
    ):
        minute += 1
    assert minute - 24 * 60 < 35
    assert budget.state.guard == "burn_1h"


def test_many_late_tokens_of_few_requests_hide_nothing() -> None:
    """A reply of 50 s is one request, however many of its tokens are late."""
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, share_ratio=0.1))
    for minute in range(1200):
        budget.observe(
            Served(
                requests=12, misses=12, granted=10, granted_misses=10, granted_beats=500,
                granted_late_beats=100, withheld=1, withheld_misses=0, withheld_beats=30,
                withheld_late_beats=1,
            ),
            now=60.0 * minute,
        )  # fmt: skip
    assert budget.stopped


def test_every_miss_counts_where_nothing_was_withheld_for_hours() -> None:
    budget = ErrorBudget(BudgetSettings(minimum_misses=1))
    for hour in range(2):
        budget.observe(Served(requests=9000, granted=9000, granted_misses=7), now=3600.0 * hour)
    assert budget.spent == 0
    budget.observe(Served(requests=200, granted=200, granted_misses=7), now=7200.0)
    assert budget.spent == 21
    unproven = ErrorBudget(BudgetSettings(minimum_misses=1), proven=False)
    unproven.observe(Served(requests=100, misses=3, withheld=50, withheld_misses=50), now=0.0)
    assert unproven.spent == 3


@pytest.mark.parametrize(
    ("slice_s", "share", "minutes"), [(2.0, 0.25, 1), (60.0, 0.25, 24), (60.0, 0.05, 120)]
)
def test_a_burn_counts_every_miss_where_no_control_is_no_chance(
    slice_s: float, share: float, minutes: int
) -> None:
    """A busy service has thousands of requests, and misses of its own, before chance withholds the
    first slice; six withheld ones are due by then."""
    budget = ErrorBudget(BudgetSettings())
    late = Served(requests=30_000, granted=30_000, granted_misses=3000)
    stopped = [
        budget.observe(late, now=60.0 * at, slice_s=slice_s, withheld_share=share)
        for at in range(minutes + 2)
    ]
    assert not any(stopped[: minutes - 1])
    assert stopped[-1]


def test_an_hour_without_a_control_is_judged_by_the_hours_before_it() -> None:
    """Slices of two minutes, one of twenty withheld, leave every fifth hour without one."""
    budget = ErrorBudget(BudgetSettings())
    late = Served(requests=1000, granted=1000, granted_misses=230)
    control = Served(requests=1000, withheld=1000, withheld_misses=230)
    for at in range(300):
        served = control if at % 60 == 30 and at < 200 else late
        stopped = budget.observe(served, now=60.0 * at, slice_s=120.0, withheld_share=0.05)
        assert not stopped, at


def test_slices_of_an_hour_without_a_lease_are_no_control() -> None:
    budget, rare = ErrorBudget(BudgetSettings()), {"slice_s": 30.0, "withheld_share": 0.25}
    for at in range(60):
        budget.observe(Served(requests=30_000, misses=0), now=60.0 * at, **rare)
    late = Served(requests=30_000, granted=30_000, granted_misses=3000)
    stopped = [budget.observe(late, now=60.0 * at, **rare) for at in range(60, 75)]
    assert not any(stopped[:11])
    assert stopped[-1]


ALLOTTED = Allotment(number=1, misses=3.0, budget=100.0, spent=0.0)


def test_a_leased_slot_stops_above_its_allotment_and_not_at_its_own_allowance() -> None:
    budget = ErrorBudget(BudgetSettings(hold_s=0.0), proven=False)
    three = Served(requests=3, misses=3)
    assert not budget.observe(three, now=0.0, leased=True, allotment=ALLOTTED)
    assert budget.observe(Served(misses=1), now=1.0, leased=True, allotment=ALLOTTED)
    assert "of 3.0 allotted" in budget.reason


def test_no_allotment_lets_a_slot_spend_more_than_its_whole_error_budget() -> None:
    budget = ErrorBudget(BudgetSettings(slo_target_ratio=0.99, hold_s=0.0), proven=False)
    endless = replace(ALLOTTED, misses=1e15, budget=1e15)
    few, one_more = Served(requests=5000, misses=50), Served(misses=1)
    assert not budget.observe(few, now=0.0, leased=True, allotment=endless)
    assert budget.observe(one_more, now=1.0, leased=True, allotment=endless)


def test_an_overspent_service_stops_its_slots_that_spent_nothing() -> None:
    budget = ErrorBudget(BudgetSettings(), proven=False)
    whole = replace(ALLOTTED, spent=101.0)
    assert budget.observe(Served(), now=0.0, leased=True, allotment=whole)
    assert "the service" in budget.reason


def test_a_lease_without_an_allotment_after_one_with_it_spends_nothing_more() -> None:
    budget = ErrorBudget(BudgetSettings(hold_s=0.0), proven=False)
    budget.observe(Served(requests=9, misses=2), now=0.0, leased=True, allotment=ALLOTTED)
    assert not budget.observe(Served(), now=60.0)
    assert budget.limit is None
    assert not budget.observe(Served(), now=61.0, leased=True)
    assert budget.limit == 2
    assert budget.observe(Served(misses=1), now=62.0, leased=True)


def test_a_slot_that_stopped_at_its_allotment_may_be_leased_again_after_the_hold() -> None:
    budget = ErrorBudget(BudgetSettings(hold_s=600.0), proven=False)
    assert budget.observe(Served(misses=4), now=0.0, leased=True, allotment=ALLOTTED)
    assert budget.observe(Served(), now=300.0)
    assert not budget.observe(Served(), now=660.0)
    more = replace(ALLOTTED, number=2, misses=9.0)
    assert not budget.observe(Served(misses=4), now=661.0, leased=True, allotment=more)


@given(st.lists(st.tuples(st.floats(0, 500), st.integers(0, 5)), max_size=60))
def test_a_ring_holds_exactly_its_last_periods(steps: list[tuple[float, int]]) -> None:
    ring = Ring(period_s=60.0, requests=[0.0] * 8, misses=[0.0] * 8)
    now, events = 0.0, []
    for elapsed_s, misses in steps:
        now += elapsed_s
        ring.add(Served(requests=10, misses=misses), now=now)
        events.append((int(now // 60), misses))
        newest = int(now // 60)
        kept = [m for period, m in events if period > newest - 8]
        assert ring.last(8) == Served(requests=10.0 * len(kept), misses=float(sum(kept)))
