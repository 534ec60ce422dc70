"""How long a guest's step outlasts its grant, however long that is."""

from dataclasses import dataclass
from typing import cast

import pytest

from benchmarks.coserve import reclaim
from benchmarks.coserve.reclaim import watch_closings
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Grant, GrantMode, Guest, PageReader, Reading

CLOSED_MS = 300


@dataclass
class ClosingPages:
    """A grant that closes at 300 ms and a step that ends later; a look takes a millisecond."""

    late_ms: int
    opens_ms: int = 1_000_000
    running: int = 16
    now_ms: int = 0

    def now(self) -> float:
        return self.now_ms / 1000

    def read(self) -> Reading[Grant]:
        self.now_ms += 1
        is_open = self.now_ms < CLOSED_MS or self.now_ms >= self.opens_ms
        mode = GrantMode.OPEN if is_open else GrantMode.CLOSED
        # A closed grant's first stamp is that of its closing.
        return Reading(Grant(epoch=1, mode=mode), None, min(self.now_ms, CLOSED_MS) * 1_000_000)

    def guest(self) -> Reading[Guest]:
        end_ms = CLOSED_MS + self.late_ms
        is_over = self.now_ms >= end_ms
        page = Guest(
            running=self.running,
            steps_launched=11,
            steps_finished=10 + is_over,
            last_step_end_ns=(end_ms if is_over else 100) * 1_000_000,
        )
        return Reading(page, None, self.now_ms * 1_000_000)


async def found(pages: ClosingPages) -> list[tuple[float, int, bool]]:
    each = await watch_closings(
        cast(PageReader[Grant], pages), pages.guest, seconds=0.6, clock=cast(Clock, pages)
    )
    return [(1e3 * one.seconds, one.steps, one.is_over) for one in each]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "_POLL_S", 0.0)


@pytest.mark.parametrize("late_ms", [5, 60, 150, 2000])
async def test_a_late_step_counts_until_it_ends(late_ms: int) -> None:
    assert await found(ClosingPages(late_ms)) == [(pytest.approx(late_ms), 1, True)]


async def test_a_grant_that_opens_before_the_step_has_ended_gives_a_lower_bound() -> None:
    ((told_ms, _, is_over),) = await found(ClosingPages(2000, opens_ms=800))
    assert not is_over
    assert 500.0 <= told_ms < 2000.0


async def test_a_guest_without_requests_has_nothing_to_yield() -> None:
    assert await found(ClosingPages(-200, running=0)) == []


async def test_a_guest_that_never_stops_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reclaim, "_STOPS_S", 1.0)
    with pytest.raises(ConfigError, match="still steps"):
        await found(ClosingPages(60_000))
