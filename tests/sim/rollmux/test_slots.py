"""Headroom of slots second by second, and their allotment to jobs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rollmux.lease_supply import (
    HeadroomRecord,
    LeaseSupply,
    LeaseTerms,
    allotted,
    kv_kept_s,
)

UNEVEN = np.concatenate([[0.0], np.cumsum(np.linspace(0.0, 1.0, 100))])
TERMS = LeaseTerms(activation_s=5.0, sync_s=20.0, kept_s=4.0, recomputed_s=3.0, accelerators=8)


@given(st.floats(0, 1e6), st.floats(0, 500))
def test_a_slot_s_headroom_adds_up_over_the_record_s_end(at_s: float, more_s: float) -> None:
    record = HeadroomRecord(UNEVEN)
    assert -1e-6 <= record.given(at_s, at_s + more_s) <= more_s + 1e-6
    assert record.given(at_s, at_s + 100.0) == pytest.approx(UNEVEN[-1], abs=1e-5)


@given(st.floats(0, 1e4), st.floats(0.01, 900), st.floats(0, 1), st.floats(0, 2))
def test_work_takes_as_long_as_both_speeds_need_for_it(
    from_s: float, left_s: float, own: float, leased: float
) -> None:
    record = HeadroomRecord(UNEVEN)
    if own + leased < 1e-3:
        return
    takes_s = record.takes_s(left_s, from_s=from_s, own=own, leased=leased)
    done_s = own * takes_s + leased * record.given(from_s, from_s + takes_s)
    assert done_s == pytest.approx(left_s, rel=1e-6, abs=1e-6)


def test_work_on_slots_that_give_nothing_never_ends() -> None:
    nothing = HeadroomRecord(np.zeros(11))
    assert nothing.takes_s(1.0, from_s=0.0, own=0.0, leased=1.0) == float("inf")
    assert nothing.takes_s(3.0, from_s=0.5, own=0.5, leased=1.0) == pytest.approx(6.0)
    assert nothing.takes_s(0.0, from_s=0.5, own=0.0, leased=1.0) == 0.0


def test_tails_get_what_they_need_and_bulks_share_the_rest_by_their_nodes() -> None:
    assert allotted(12, tails=[2, 2], bulks=[1, 1, 2]) == (2, 2, 2, 2, 4)
    assert allotted(3, tails=[2, 2], bulks=[1]) == (2, 1, 0)
    assert allotted(0, tails=[], bulks=[1]) == (0,)


def test_kv_is_kept_or_recomputed_whichever_is_cheaper() -> None:
    kept_s = kv_kept_s(600_000, bytes_per_token=147_456, link_bytes_per_s=25e9)
    assert kept_s == pytest.approx(3.54, abs=0.01)
    assert TERMS.move_s == 3.0


def test_leases_are_in_force_until_each_turn_and_then_not() -> None:
    supply = LeaseSupply(given_s=UNEVEN, turns_s=(0.0, 10.0, 20.0))
    assert [supply.in_force(now=t_s) for t_s in (0.0, 9.9, 10.0, 19.9, 20.0)] == [
        False,
        False,
        True,
        True,
        False,
    ]
