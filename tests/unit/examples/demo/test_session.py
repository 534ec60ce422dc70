import asyncio

import pytest

from benchmarks.testbed.parts import run_with_watchdog
from harvester.contracts.errors import ConfigError


class Work:
    cancelled = False

    async def run(self) -> str:
        try:
            await asyncio.sleep(10.0)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "done"


async def death_after(seconds: float) -> None:
    await asyncio.sleep(seconds)
    raise ConfigError("guest-0 ended with status -9")


async def test_work_is_given_up_as_soon_as_a_part_dies() -> None:
    work = Work()
    with pytest.raises(ConfigError, match="guest-0"):
        await run_with_watchdog(death_after(1.0), work.run())
    assert work.cancelled
    assert asyncio.get_running_loop().time() < 5.0


async def test_work_that_ends_first_is_the_result() -> None:
    assert await run_with_watchdog(death_after(11.0), Work().run()) == "done"
    assert len(asyncio.all_tasks()) == 1, "nobody watches any more"


async def test_an_interrupt_reaches_the_work() -> None:
    work = Work()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run_with_watchdog(death_after(11.0), work.run()), 1.0)
    assert work.cancelled
    assert len(asyncio.all_tasks()) == 1
