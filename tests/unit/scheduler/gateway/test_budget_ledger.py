"""The charges of a service, and the allowance of each of its slots."""

from msgspec.structs import replace

from harvester.contracts.ids import Epoch
from harvester.contracts.served import BUDGET_HOURS, HOUR_S, Served
from harvester.contracts.wire.error_budget import Allotment, BudgetReport
from scheduler.gateway.policy.budget_ledger import BudgetLedger

REPORT = BudgetReport(
    service="chat", life="a", run=1, served=Served(), charged=0.0, allowed_ratio=0.001,
    minimum_misses=10.0,
)  # fmt: skip


def heard(ledger: BudgetLedger, report: BudgetReport, *, now: float, epoch: int = 1) -> None:
    ledger.observe(report, slot="n.s", epoch=Epoch(epoch), now=now)


def allot(ledger: BudgetLedger, life: str, *, now: float, epoch: int | None = None) -> Allotment:
    given = None if epoch is None else Epoch(epoch)
    allotment = ledger.allot("chat", life, epoch=given, now=now)
    assert allotment is not None
    return allotment


def fleet(*requests: float) -> BudgetLedger:
    """Slots `a`, `b`, ... leased, with these requests each."""
    ledger = BudgetLedger()
    for life, count in zip("abcdef", requests, strict=False):
        report = replace(REPORT, life=life, limit=0.0)
        heard(ledger, report, now=0.0)
        heard(ledger, replace(report, served=Served(requests=count)), now=1.0)
    return ledger


def test_repeated_and_stale_reports_count_nothing_twice() -> None:
    ledger = fleet(100_000)
    for served in (100_000, 100_000, 60_000, 130_000):
        heard(ledger, replace(REPORT, served=Served(requests=served)), now=2.0)
    assert ledger.budget("chat", now=2.0).budget == 130.0


def test_a_restarted_agent_counts_from_zero_again() -> None:
    ledger = fleet(100_000)
    heard(ledger, replace(REPORT, run=2, served=Served(requests=20_000)), now=2.0)
    heard(ledger, replace(REPORT, run=1, served=Served(requests=900_000)), now=3.0)
    assert ledger.budget("chat", now=3.0).budget == 120.0


def test_counts_from_before_the_first_report_earn_nothing() -> None:
    ledger = BudgetLedger()
    heard(ledger, replace(REPORT, served=Served(requests=10_000_000)), now=0.0)
    assert ledger.budget("chat", now=0.0).budget == 10.0
    assert allot(ledger, "a", now=0.0).misses == 10.0


def test_the_rest_is_shared_by_traffic() -> None:
    ledger = fleet(300_000, 100_000)
    assert (allot(ledger, "a", now=1.0).misses, allot(ledger, "b", now=1.0).misses) == (300, 100)


def test_a_late_allotment_is_outstanding_until_it_can_arrive_no_more() -> None:
    ledger = fleet(100_000, 100_000)
    renewed = allot(ledger, "a", now=1.0, epoch=5)
    assert renewed.misses == 100
    # The slot has not received it, and its lease still is: it may come.
    for count in (1, 2):
        served = Served(requests=100_000 + count)
        heard(ledger, replace(REPORT, served=served, limit=0.0), now=1.0 + count, epoch=5)
        assert ledger.budget("chat", now=3.0).outstanding == 100
    assert allot(ledger, "a", now=3.0, epoch=5) == renewed
    heard(ledger, replace(REPORT, served=served), now=4.0, epoch=6)
    assert ledger.budget("chat", now=4.0).outstanding == 0


def test_a_lost_slot_keeps_its_part_of_the_budget_for_28_days() -> None:
    ledger = fleet(100_000, 100_000)
    lost = allot(ledger, "a", now=1.0)
    heard(ledger, replace(REPORT, life="new"), now=60.0)
    served = replace(REPORT, life="b", served=Served(requests=100_000), limit=0.0)
    heard(ledger, served, now=60.0)
    assert allot(ledger, "new", now=60.0).misses == 0
    assert allot(ledger, "b", now=60.0).misses <= 200 - lost.misses
    ledger.forget(now=BUDGET_HOURS * HOUR_S)
    assert ledger.budget("chat", now=BUDGET_HOURS * HOUR_S).outstanding >= lost.misses
    ledger.forget(now=(BUDGET_HOURS + 2) * HOUR_S)
    assert not ledger.accounts
    assert not ledger.hours


def test_a_life_that_was_rolled_back_is_lost_and_begins_again() -> None:
    """Its disk is that of run 3 again, when nothing was charged; 60 misses were since."""
    ledger = fleet(100_000)
    left = replace(REPORT, run=9, served=Served(requests=1000), charged=60.0, limit=90.0)
    heard(ledger, left, now=2.0)
    issued = allot(ledger, "a", now=2.0, epoch=1)
    again = replace(REPORT, run=4, limit=90.0)
    heard(ledger, again, now=3.0)
    doubtful = allot(ledger, "a", now=3.0, epoch=1)
    assert (doubtful.misses, doubtful.number > issued.number) == (0.0, True)
    assert allot(ledger, "a", now=4.0, epoch=1) == doubtful
    for now in range(4, 60):
        count = Served(requests=10.0 * now)
        heard(ledger, replace(again, served=count, charged=1.0, limit=1.0), now=now)
    whole = ledger.budget("chat", now=60.0)
    assert (whole.spent, whole.outstanding) == (61.0, issued.misses - 60.0)
    assert len(ledger.accounts) == 2
    first = allot(ledger, "a", now=60.0, epoch=2)
    assert first.number > doubtful.number
    assert first.misses - 1.0 <= whole.budget - whole.spent - whole.outstanding


def test_a_run_that_was_counted_before_a_roll_back_earns_nothing_again() -> None:
    ledger = fleet(100_000)
    heard(ledger, replace(REPORT, run=9, served=Served(requests=50_000)), now=2.0)
    for run, now in ((4, 3.0), (4, 40.0), (9, 41.0)):
        heard(ledger, replace(REPORT, run=run, served=Served(requests=50_000)), now=now)
    assert ledger.budget("chat", now=41.0).budget == 150.0
    heard(ledger, replace(REPORT, run=10, served=Served(requests=10_000)), now=42.0)
    assert ledger.budget("chat", now=42.0).budget == 160.0


def test_charges_that_a_later_run_does_not_know_stay_charged() -> None:
    ledger = fleet(100_000)
    heard(ledger, replace(REPORT, run=2, charged=40.0), now=2.0)
    heard(ledger, replace(REPORT, run=3, charged=5.0), now=3.0)
    heard(ledger, replace(REPORT, run=4, charged=1.0), now=4.0)
    assert ledger.budget("chat", now=4.0).spent == 40.0
    assert allot(ledger, "a", now=4.0).misses <= 100.0 - 39.0
    ledger.forget(now=(BUDGET_HOURS + 2) * HOUR_S)
    assert not ledger.accounts


def test_a_late_report_alone_is_no_roll_back() -> None:
    ledger = fleet(100_000)
    heard(ledger, replace(REPORT, run=2), now=2.0)
    for now in (3.0, 35.0, 67.0):
        heard(ledger, replace(REPORT, run=1), now=now)
        heard(ledger, replace(REPORT, run=2, served=Served(requests=now)), now=now + 1.0)
    assert len(ledger.accounts) == 1
    assert allot(ledger, "a", now=68.0).misses > 0


def test_harm_too_small_for_one_slot_is_seen_on_many() -> None:
    """0.8 % of its own in each hour and 0.3 % more beside a guest, with some noise."""

    def spent(slots: int) -> float:
        ledger = BudgetLedger()
        totals = dict.fromkeys(range(slots), Served())
        for hour in range(12):
            for slot in totals:
                noise = 12.0 * (1 if (hour * 7 + slot * 3) % 2 else -1)
                heard(ledger, replace(REPORT, life=f"l{slot}", served=totals[slot]),
                      now=hour * HOUR_S)  # fmt: skip
                totals[slot] += Served(
                    requests=1000, granted=950, granted_misses=950 * 0.011 + noise,
                    withheld=50, withheld_misses=0.4,
                )  # fmt: skip
                heard(ledger, replace(REPORT, life=f"l{slot}", served=totals[slot]),
                      now=hour * HOUR_S + 1)  # fmt: skip
        return ledger.budget("chat", now=12 * HOUR_S).spent

    assert spent(1) == 0
    assert spent(20) > 100


def test_slots_of_unlike_load_are_not_compared_with_each_other() -> None:
    """A slot with many misses of its own withholds little, one without withholds much."""
    ledger = BudgetLedger()
    for hour in range(12):
        for life, late, withheld in (("a", 0.05, 0.05), ("b", 0.0, 0.25)):
            total = Served(
                requests=1000 * (hour + 1), granted=(1 - withheld) * 1000 * (hour + 1),
                granted_misses=late * (1 - withheld) * 1000 * (hour + 1),
                withheld=withheld * 1000 * (hour + 1),
                withheld_misses=late * withheld * 1000 * (hour + 1),
            )  # fmt: skip
            heard(ledger, replace(REPORT, life=life, served=total), now=hour * HOUR_S)
    assert ledger.budget("chat", now=12 * HOUR_S).spent < 1e-6


def test_charges_of_slots_alone_are_charged_to_the_service() -> None:
    ledger, served = fleet(1000, 1000), Served(requests=1000)
    for life in "ab":
        heard(ledger, replace(REPORT, life=life, charged=6.0, served=served), now=2.0)
    whole = ledger.budget("chat", now=2.0)
    assert (whole.spent, whole.budget, whole.exhausted) == (12.0, 10.0, True)
    # Its part of what is overdrawn is taken off the 6 misses that it is charged.
    assert allot(ledger, "a", now=2.0).misses == 4.0


def test_misses_without_proof_slices_are_charged_each() -> None:
    ledger = fleet(1000)
    heard(ledger, replace(REPORT, served=Served(requests=2000, misses=4)), now=2.0)
    assert ledger.budget("chat", now=2.0).spent == 4
