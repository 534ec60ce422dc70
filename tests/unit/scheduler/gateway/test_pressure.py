"""Shares of one bound: no tenant starves another, and what is held stays bounded."""

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from harvester.platform.tenant_shares import Pressure, TenantShares
from scheduler.gateway import pressure
from scheduler.gateway.pressure import check_values, connection_room

MOST = 120


def test_one_tenant_alone_has_the_whole_bound() -> None:
    shares = TenantShares(MOST, name="bytes")
    with shares.holding("a", 100), shares.holding("a", 20):
        assert shares.held == MOST
        with pytest.raises(Pressure, match=r"bytes is 120: 120 are held, 120 of them by a"):
            shares.holding("a", 1).__enter__()
    with shares.holding("a", 10 * MOST):
        assert shares.held == 10 * MOST
    assert shares.held == 0


def test_a_growing_body_counts_what_has_come_and_at_most_as_much_again() -> None:
    shares = TenantShares(1 << 20, name="bytes")
    with ExitStack() as held:
        count = shares.counter("a", held, most=1000)
        for so_far in range(1, 1001):
            count(so_far)
            assert so_far <= shares.held <= min(2 * so_far, 1000)
        with pytest.raises(web.HTTPRequestEntityTooLarge):
            count(1001)
    assert shares.held == 0


def test_connections_leave_room_for_the_turns_on_engines() -> None:
    assert connection_room(1 << 20, places=100) == (1 << 20) - 64 - 100
    assert connection_room(256, places=4096) == (256 - 64) // 2
    assert connection_room(16, places=1) == 1


def test_a_tenant_within_its_share_is_taken_when_another_has_filled_the_bound() -> None:
    shares = TenantShares(MOST, name="bytes")
    with shares.holding("a", MOST), shares.holding("b", 30), shares.holding("b", 30):
        for tenant in ("a", "b"):
            with pytest.raises(Pressure):
                shares.holding(tenant, 1).__enter__()
        with shares.holding("c", 40):
            assert shares.held == MOST + 60 + 40


def test_the_share_of_a_tenant_without_work_is_the_others() -> None:
    shares = TenantShares(MOST, name="bytes")
    with shares.holding("b", 10):
        pass
    with shares.holding("a", 60), shares.holding("b", 1), shares.holding("a", 59):
        assert shares.held == MOST


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.booleans()), max_size=60))
def test_held_amounts_stay_within_the_harmonic_bound(steps: list[tuple[str, int, bool]]) -> None:
    shares = TenantShares(MOST, name="bytes")
    open_: list[ExitStack] = []
    for tenant, amount, ends in steps:
        if ends and open_:
            open_.pop(0).close()
            continue
        held = ExitStack()
        try:
            held.enter_context(shares.holding(tenant, amount))
        except Pressure:
            continue
        open_.append(held)
        assert shares.held <= MOST * (1 + 1 / 2 + 1 / 3 + 1 / 4)


def values_in(value: Any) -> int:
    """Arrays, objects and members."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(values_in, value.values()))
    return 1 + sum(map(values_in, value)) if isinstance(value, list) else 0


TEXT = st.text('"\\\\[{:,a', max_size=6)
JSON = st.recursive(
    TEXT | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


@given(value=JSON, piece_bytes=st.integers(1, 8))
async def test_the_values_of_a_body_are_counted_and_its_text_is_not(
    value: Any, piece_bytes: int
) -> None:
    body, count = json.dumps(value).encode(), values_in(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pressure, "_LARGE_BYTES", 0)
        patch.setattr(pressure, "_PIECE_BYTES", piece_bytes)
        patch.setattr(pressure, "MOST_VALUES", count)
        await check_values(body)
        patch.setattr(pressure, "MOST_VALUES", count - 1)
        if count:
            with pytest.raises(web.HTTPRequestEntityTooLarge, match="arrays, objects and members"):
                await check_values(body)


async def test_other_tasks_run_while_the_values_of_a_large_body_are_counted() -> None:
    body = json.dumps(["[{:" * (1 << 20)] * 4).encode()
    counting, passes = asyncio.ensure_future(check_values(body)), 0
    while not counting.done():
        await asyncio.sleep(0)
        passes += 1
    assert passes >= len(body) >> 18
