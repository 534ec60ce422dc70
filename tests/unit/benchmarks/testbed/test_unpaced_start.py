"""Real pages in a directory; the clock is the machine's, as their expiry is."""

import asyncio
import math
from pathlib import Path

import pytest

from benchmarks.testbed import unpaced_start
from benchmarks.testbed.unpaced_start import unpaced
from coserve.law.work_gate import WorkGate
from harvester.contracts.errors import RoseMuxError
from harvester.contracts.page import PageDirectory


def test_a_start_waits_for_nothing_while_it_lasts_and_for_slack_afterwards(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path / "slot")
    gate = WorkGate(pages)

    async def start() -> float | None:
        async with unpaced(pages):
            await asyncio.sleep(0)
            return gate.budget_s()

    assert gate.budget_s() == -math.inf
    assert asyncio.run(start()) == math.inf
    assert gate.budget_s() == -math.inf
    assert pages.grant_reader().read().record is None


def test_the_grant_is_renewed_for_as_long_as_the_start_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpaced_start, "_AGAIN_S", 0.01)
    pages = PageDirectory.create(tmp_path / "slot")

    async def stamps() -> list[int]:
        async with unpaced(pages):
            found = []
            for _ in range(2):
                await asyncio.sleep(0.1)
                found.append(pages.grant_reader().read().stamp_ns)
            return found

    first, second = asyncio.run(stamps())
    assert second > first > 0


def test_an_agent_takes_the_page_over_and_none_is_passed_over(tmp_path: Path) -> None:
    pages = PageDirectory.create(tmp_path / "slot")

    async def start() -> None:
        async with unpaced(pages):
            await asyncio.sleep(0)

    asyncio.run(start())
    agent = pages.grant_page()
    agent.make()
    with pytest.raises(RoseMuxError):
        asyncio.run(start())
    agent.close()
