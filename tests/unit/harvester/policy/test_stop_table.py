"""Orders to stop: the stronger one stays, and each source lifts its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import Exhausted
from harvester.contracts.wire.stops import (
    KUEUE_WORDS,
    NUMBER_MAX,
    Stop,
    StopOrder,
    StopSource,
    order_of,
)
from harvester.policy.stop_table import STOPS_MAX, StopTable, binding

OPERATOR = StopSource.OPERATOR


def stop(order: str, source: StopSource = OPERATOR, **more: object) -> Stop:
    return Stop(order=StopOrder(order), source=source, **more)  # type: ignore[arg-type]


def test_a_weaker_order_never_replaces_a_stronger_one() -> None:
    table = StopTable()
    drain = table.place(stop("drain", by="alice"))
    assert table.place(stop("hold", by="bob")) == drain
    assert table.stops == (drain,)


def test_a_stronger_order_replaces_a_weaker_one_and_a_repeated_one_keeps_its_author() -> None:
    table = StopTable()
    first = table.place(stop("hold", by="alice", at="1"))
    assert table.place(stop("hold", by="bob", at="2")) == first
    assert table.place(stop("drain", by="bob", at="2")).by == "bob"
    assert [each.order for each in table.stops] == ["drain"]


def test_a_source_lifts_its_own_order_of_the_same_scope_only() -> None:
    table = StopTable()
    for order in (
        stop("drain", StopSource.CLUSTER, number=4),
        stop("hold"),
        stop("hold", slot="slot0"),
        stop("hold", tenant="t"),
    ):
        table.place(order)
    assert table.lift(OPERATOR) is None
    assert [(s.source, s.slot, s.tenant) for s in table.stops] == [
        ("cluster", "", ""),
        ("operator", "", "t"),
        ("operator", "slot0", ""),
    ]


def test_a_cluster_order_that_is_later_than_its_end_stays() -> None:
    table = StopTable()
    later = table.place(stop("hold", StopSource.CLUSTER, number=5))
    assert table.lift(StopSource.CLUSTER, number=4) is later
    assert table.lift(StopSource.CLUSTER, number=5) is None
    assert table.stops == ()


def test_a_late_end_of_an_earlier_cluster_order_does_not_lift_the_next_one() -> None:
    table = StopTable()
    table.place(stop("drain", StopSource.CLUSTER, number=1, by="alice"))
    again = table.place(stop("hold", StopSource.CLUSTER, number=3, by="bob"))
    assert (again.order, again.by, again.number) == ("drain", "alice", 3)
    assert table.lift(StopSource.CLUSTER, number=2) == again
    assert table.lift(StopSource.CLUSTER, number=4) is None


def test_tenants_named_from_outside_do_not_fill_memory() -> None:
    table = StopTable()
    for number in range(STOPS_MAX):
        table.place(stop("hold", tenant=f"t{number}"))
    with pytest.raises(Exhausted):
        table.place(stop("hold", tenant="one-more"))
    assert table.place(stop("drain", tenant="t3")).order is StopOrder.DRAIN
    for source in (OPERATOR, StopSource.CLUSTER):
        assert table.place(stop("drain", source)).order is StopOrder.DRAIN
    assert table.place(stop("drain", slot="slot0")).slot == "slot0"


def test_the_end_of_an_order_repeated_by_one_gateway_lifts_no_later_one_of_another() -> None:
    table, cluster = StopTable(), StopSource.CLUSTER
    table.place(stop("drain", cluster, number=1))
    assert table.lift(cluster, number=2) is None
    later = table.place(stop("drain", cluster, number=1))
    assert table.lift(cluster, number=2) is later
    assert table.lift(cluster, number=later.number) is None


def test_an_order_lifted_at_the_agent_can_be_given_and_lifted_again() -> None:
    table, cluster = StopTable(), StopSource.CLUSTER
    for number in (1, 3):
        placed = table.place(stop("drain", cluster, number=number))
        assert placed.number < 10
        assert table.lift(cluster, number=NUMBER_MAX) is None
    assert table.stops == ()


ORDERS = st.builds(
    Stop,
    order=st.sampled_from([StopOrder.HOLD, StopOrder.DRAIN]),
    source=st.sampled_from(list(StopSource)),
    slot=st.sampled_from(["", "slot0", "slot1"]),
    tenant=st.sampled_from(["", "a", "b"]),
)


@given(st.lists(ORDERS, max_size=12))
def test_the_strongest_order_in_reach_binds(orders: list[Stop]) -> None:
    table = StopTable()
    for order in orders:
        table.place(order)
    for slot in ("slot0", "slot1"):
        for tenant in ("", "a"):
            reach = [
                each.order.strength
                for each in orders
                if each.slot in ("", slot) and each.tenant in ("", tenant)
            ]
            found = binding(table.stops, slot=slot, tenant=tenant)
            assert (found.order.strength if found else 0) == max(reach, default=0)


def test_kueues_words_mean_our_orders() -> None:
    assert {word: order_of(word) for word in KUEUE_WORDS} == {
        "None": "none",
        "Hold": "hold",
        "HoldAndDrain": "drain",
    }
    assert order_of("drain") is StopOrder.DRAIN
    assert order_of("Drain") is None
