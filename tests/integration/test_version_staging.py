"""Engines prepare a version while turns are sampled: how long a switch waits for them."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from harvester.contracts.ids import JobId
from scheduler.gateway.engines import engine_control
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import GatewayInProcess, gateway_on

ENDLESS = 100_000


def engine() -> FakeEngine:
    return FakeEngine(step_s=0.002, epoch=None)


def tokens(gateway: GatewayInProcess) -> int:
    return sum(len(turn.token_ids) for turn in gateway.scheduler.ledgers[JobId("job")].turns())


def staged(gateway: GatewayInProcess, kind: str, outcome: str) -> int:
    """Preparations that have ended so."""
    labels = re.escape(f'_count{{kind="{kind}",outcome="{outcome}"}} ')
    name = "scheduler_version_staging_duration_seconds"
    found = re.search(f"{name}{labels}(.*)", gateway.scheduler.metrics.render().decode())
    return int(float(found[1])) if found else 0


@asynccontextmanager
async def sampling(*fakes: FakeEngine, **timeouts: float) -> AsyncIterator[GatewayInProcess]:
    """A gateway whose engines serve version 1 and sample a turn, and prepare any other for ever."""
    async with gateway_on(*fakes, timeouts=timeouts) as gateway:
        assert (await gateway.publish(1))[0] == 200
        running = asyncio.create_task(gateway.generate("r", ENDLESS))
        await gateway.until_tokens(2)
        for fake in fakes:
            fake.preparing = True
            fake.calls.clear()
            fake.staged.clear()
        yield gateway
        running.cancel()


async def test_turns_are_sampled_until_the_engine_is_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = engine()
    async with sampling(fake) as gateway:
        published = asyncio.create_task(gateway.publish(2))
        await gateway.until(lambda: len(fake.staged) > 20)
        before = tokens(gateway)
        await gateway.until(lambda: tokens(gateway) > before + 20)
        assert not fake.calls
        assert not published.done()
        fake.preparing = False
        assert (await published)[0] == 200
        assert fake.version == 2
        assert staged(gateway, "dedicated", "ready") == 1
    assert "unprepared" not in caplog.text


async def test_an_engine_that_never_gets_ready_holds_a_version_back_for_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow, quick = engine(), engine()
    async with sampling(slow, quick, stage_s=0.5) as gateway:
        quick.preparing = False
        published = asyncio.create_task(gateway.publish(2))
        await gateway.until(lambda: "/update_weights" in slow.calls)
        assert "engine e0 switches unprepared: version 2 of store job.store, 0.5 s" in caplog.text
        assert "engine e1 switches" not in caplog.text
        assert staged(gateway, "dedicated", "late") == 1
        slow.preparing = False
        assert (await published)[0] == 200


async def test_one_worker_s_fault_ends_the_wait_for_the_others() -> None:
    bad, good = engine(), engine()
    async with sampling(bad, good) as gateway:
        bad.stage_fault, good.preparing = "torn", False
        published = asyncio.create_task(gateway.publish(2))
        await gateway.until(lambda: good.version == 2)
        assert staged(gateway, "dedicated", "failed") == 1
        bad.preparing = False
        assert (await published)[0] == 200


async def test_an_engine_that_is_lost_while_it_prepares_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost, good = engine(), engine()
    async with sampling(lost, good) as gateway:
        good.preparing = False
        published = asyncio.create_task(gateway.publish(2))
        await gateway.until(lambda: lost.staged)
        await gateway.sites[0].close()
        assert (await published)[0] == 200
        assert good.version == 2
    assert "unprepared" not in caplog.text


async def test_an_engine_that_hangs_while_it_prepares_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_control, "STAGE_SILENCE_S", 0.3)
    hung, good = engine(), engine()
    async with sampling(hung, good) as gateway:
        good.preparing = False
        published = asyncio.create_task(gateway.publish(2))
        await gateway.until(lambda: hung.staged)
        hung.silent = True
        await gateway.until(lambda: good.version == 2)
        hung.silent = hung.preparing = False
        assert (await published)[0] == 200


async def test_a_publish_goes_on_without_its_caller_and_the_newest_in_line_is_next() -> None:
    """A publisher leaves the announcement of one version for that of the next."""
    fake = engine()
    async with sampling(fake) as gateway:
        left = asyncio.create_task(gateway.publish(2))
        await gateway.until(lambda: fake.staged)
        left.cancel()
        passed = asyncio.create_task(gateway.publish(3))
        newest = asyncio.create_task(gateway.publish(4))
        await asyncio.sleep(0.1)
        assert {version for _, version, _ in fake.staged} == {2}
        fake.preparing = False
        status, reply = await passed
        assert (status, reply["error"]) == (503, "nothing was changed: version 4 takes its place")
        assert (await newest)[0] == 200
        loads = fake.calls.count("/update_weights")
        assert (loads, fake.version) == (2, 4), "version 2 was served first"


async def test_a_publish_behind_an_activation_that_takes_the_engines_prepares_nothing() -> None:
    fake, jobs = engine(), [{"id": "job", "active": True}, {"id": "other"}]
    async with gateway_on(fake, jobs=jobs) as gateway:
        assert (await gateway.publish(1))[0] == 200
        fake.preparing = True
        fake.staged.clear()
        other = {"version": 7, "store": "other.store"}
        assert (await gateway.post("/v1/jobs/other/versions", other))[0] == 200
        activation = asyncio.create_task(gateway.post("/v1/jobs/other/activate", {}))
        await gateway.until(lambda: fake.staged)
        published = asyncio.create_task(gateway.publish(2))
        await asyncio.sleep(0.1)
        fake.preparing = False
        assert (await activation)[0] == 200
        status, reply = await published
        assert (status, reply["active"]) == (200, False)
        assert {version for _, version, _ in fake.staged} == {7}


async def test_a_guest_that_switches_is_not_asked_to_prepare_the_version_again() -> None:
    fake, guest = engine(), FakeEngine(step_s=0.002, epoch="1")
    async with sampling(fake) as gateway:
        await gateway.add_guest(guest)
        await gateway.until(lambda: guest.version == 1)
        guest.preparing, fake.preparing = True, False
        assert (await gateway.publish(2))[0] == 200, "a slow guest holds no version back"
        await gateway.until(lambda: "/update_weights" in guest.calls)
        await gateway.until(lambda: staged(gateway, "guest", "late") == 1)
        asked = len(guest.staged)
        guest.preparing = False
        await gateway.until(lambda: guest.version == 2)
        await asyncio.sleep(0.1)
        assert len(guest.staged) == asked
