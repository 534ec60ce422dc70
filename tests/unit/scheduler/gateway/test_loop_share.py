"""Long work in parts: how often others get the event loop, by passes of it and not by time."""

import asyncio
from collections.abc import Iterator

import pytest

from scheduler.gateway import loop_share, serve_command
from scheduler.gateway.loop_share import ENTERED_AT_ONCE, LoopEntry, in_shares
from tests.virtual_clock import VirtualClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    monkeypatch.setattr(loop_share, "_CLOCK", clock)
    return clock


def costing(clock: VirtualClock, cost_s: float, made: list[int]) -> Iterator[int]:
    for each in range(100):
        clock.advance_to(clock.now() + cost_s)
        made.append(each)
        yield each


@pytest.mark.parametrize(("cost_s", "most"), [(2**-10, 21), (2**-7, 3), (1.0, 1), (0.0, 100)])
async def test_others_get_the_loop_whenever_the_work_has_had_its_time(
    clock: VirtualClock, cost_s: float, most: int
) -> None:
    made: list[int] = []
    work = asyncio.create_task(in_shares(costing(clock, cost_s, made)))
    steps, before = [], 0
    while not work.done():
        await asyncio.sleep(0)
        steps.append(len(made) - before)
        before = len(made)
    assert await work == list(range(100))
    assert max(steps) <= most
    assert sum(steps) == 100


async def test_work_that_fails_or_is_cancelled_makes_nothing_more(clock: VirtualClock) -> None:
    made: list[int] = []
    work = asyncio.create_task(in_shares(costing(clock, 1.0, made)))
    for _ in range(3):
        await asyncio.sleep(0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    assert 0 < len(made) < 5
    with pytest.raises(ZeroDivisionError):
        await in_shares(1 // each for each in (1, 0, 2))


async def test_objects_are_collected_while_no_turn_is_open_or_after_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collected, open_turns = [], [1]
    monkeypatch.setattr(serve_command, "_QUIET_S", 0.001)
    monkeypatch.setattr(serve_command, "_OVERDUE_S", 3600.0)
    monkeypatch.setattr("gc.collect", lambda: collected.append(open_turns[0]))
    collecting = asyncio.create_task(serve_command._collect_when_quiet(lambda: open_turns[0]))
    await asyncio.sleep(0.02)
    assert collected == []
    open_turns[0] = 0
    async with asyncio.timeout(30):
        while not collected:  # noqa: ASYNC110 - without an event
            await asyncio.sleep(0.001)
        monkeypatch.setattr(serve_command, "_OVERDUE_S", 0.001)
        open_turns[0] = 1
        while collected[-1] != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    collecting.cancel()


async def test_thousands_that_come_at_once_enter_a_few_in_each_pass_and_in_their_order() -> None:
    entry, entered = LoopEntry(), list[int]()

    async def enter(at: int) -> None:
        await entry.enter()
        entered.append(at)

    tasks = [asyncio.create_task(enter(at)) for at in range(1000)]
    await asyncio.sleep(0)
    steps = [len(entered)]
    left = tasks[500:600]
    for task in left:
        task.cancel()
    while len(entered) < 900:
        await asyncio.sleep(0)
        steps.append(len(entered) - sum(steps))
        assert any(steps[-3:]), "nobody enters any more"
    assert max(steps) <= ENTERED_AT_ONCE
    assert entered == [*range(500), *range(600, 1000)]
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(30):
        await entry.enter()
