"""Engines that are restarted one after another cost no turn, however slow their first token is."""

import asyncio

import pytest

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import gateway_on


@pytest.mark.parametrize("gap_s", [0.05, 0.7])
async def test_a_rolling_restart_refuses_no_sample_of_a_group(gap_s) -> None:
    step_s = 0.8
    engines = [FakeEngine(step_s=step_s, epoch=None) for _ in range(3)]
    async with gateway_on(*engines) as gateway:
        await gateway.publish(1)
        turns = [
            asyncio.create_task(gateway.generate(f"t{n}", 2, prompt=[1, 2, n % 2]))
            for n in range(16)
        ]
        async with asyncio.timeout(10):
            while sum(engine.open for engine in engines) < 16:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for site in gateway.sites:
            engines.append(FakeEngine(step_s=step_s, epoch=None))
            await site.serve(engines[-1].app())
            await asyncio.sleep(gap_s)
        # No engine dies any more, so that no step needs to be slow.
        for engine in engines:
            engine.step_s = 0.02
        for status, reply in await asyncio.gather(*turns):
            assert (status, reply.get("finish_reason")) == (200, "length"), reply
        status, reply = await gateway.generate("next step", 2, prompt=[1, 2, 0])
        assert status == 200, reply
