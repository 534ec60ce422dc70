"""A publisher tells gateways of its versions by itself; no gateway fails or delays a publish."""

import asyncio
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from tests.certificates import Authority, token_file
from tests.integration.conftest import Served
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import Site, gateway_on
from weightsync import Publisher
from weightsync.encoding.codec import warm_up

ANSWER_S = 20.0
WRONG = "no job of this name"
STEP_S = 2.0
"""A publish of a few bytes takes milliseconds; a gateway's timeouts are minutes."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """On a new machine, loops are compiled for as long as it takes."""
    warm_up((2, 4))


def published(publisher: Publisher) -> int:
    return publisher.publish({"w": torch.rand(8)}).version


async def in_thread(work: Callable[[], object]) -> object:
    return await asyncio.wait_for(asyncio.to_thread(work), ANSWER_S)


async def test_every_version_is_in_force_at_both_gateways_without_a_call(tmp_path: Path) -> None:
    engines = [FakeEngine(step_s=0.001, epoch=None) for _ in range(2)]
    async with gateway_on(engines[0]) as one, gateway_on(engines[1]) as other:
        urls = [f"{each.url}/v1/jobs/job" for each in (one, other)]
        with Publisher(tmp_path / "job.store", announce=urls) as publisher:
            for version in (1, 2):
                assert await in_thread(lambda: published(publisher)) == version
                assert await in_thread(lambda: publisher.announced(ANSWER_S))
                assert [engine.version for engine in engines] == [version, version]
                assert engines[0].updated is not None
                assert engines[0].updated["version"] == version
                assert engines[0].updated["state_hash"] == engines[0].held_hash


async def test_a_run_that_begins_anew_gets_no_turn_before_its_numbers_are_new(
    tmp_path: Path,
) -> None:
    """It counts from 1 again, from the same first weights, and heeds no refusal."""
    engine, store = FakeEngine(step_s=0.001, epoch=None), tmp_path / "job.store"
    async with gateway_on(engine, timeouts={"pin_s": 0}) as one:
        for last in (2, 3):
            shutil.rmtree(store, ignore_errors=True)
            with Publisher(store, announce=f"{one.url}/v1/jobs/job") as publisher:
                for number in range(1, last + 1):
                    weights = torch.ones(8) if number == 1 else torch.rand(8)
                    assert publisher.publish({"w": weights}).version == number
                    is_taken = last == 2 or number == 3
                    announced = await in_thread(lambda: publisher.announced(ANSWER_S))
                    assert bool(announced) == is_taken
                    for pin in ({}, {"minimum": number}, {"exact": number}):
                        status, reply = await one.generate(
                            f"{last} {number} {pin}", 2, weight_version=pin
                        )
                        assert status == (200 if is_taken else 409), reply
                        if is_taken:
                            assert {span["version"] for span in reply["spans"]} == {number}
                        else:
                            assert "last publish was refused" in reply["error"]["message"]


class SlowGateway:
    """Takes announcements and answers none before it is opened."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.answered: list[int] = []
        self.open = threading.Event()
        self.status = 200
        self.app = web.Application()
        self.app.router.add_post("/v1/jobs/job/versions", self.versions)

    async def versions(self, request: web.Request) -> web.Response:
        """A reply with an error for every status but 200."""
        version = (await request.json())["version"]
        self.received.append(version)
        while not self.open.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        self.answered.append(version)
        reply = {"version": version, "engines": {}} if self.status == 200 else {"error": WRONG}
        return web.json_response(reply, status=self.status)


def fault(publisher: Publisher, url: str) -> str:
    return publisher.announce_faults.get(url, "")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(ANSWER_S):
        while not holds():  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.01)


async def test_a_gateway_that_hangs_delays_no_publish_and_gets_the_newest_version(
    tmp_path: Path,
) -> None:
    slow, site, clock = SlowGateway(), Site(), MonotonicClock()
    await site.serve(slow.app)
    with Publisher(tmp_path / "job.store", announce=f"{site.url}/v1/jobs/job") as publisher:
        for version in (1, 2, 3):
            began_s = clock.now()
            await in_thread(lambda: published(publisher))
            assert clock.now() - began_s < STEP_S
            await until(lambda at=version: slow.received[-1:] == [at])
        assert not publisher.announced(0.0)
        assert fault(publisher, f"{site.url}/v1/jobs/job") == "no answer yet"
        slow.open.set()
        assert await in_thread(lambda: publisher.announced(ANSWER_S))
        assert slow.answered == [3]
    await site.close()


async def test_a_gateway_that_was_away_gets_the_version_when_it_is_back(tmp_path: Path) -> None:
    site = Site()
    await site.serve(web.Application())
    url, slow = f"{site.url}/v1/jobs/job", SlowGateway()
    slow.open.set()
    await site.close()
    with Publisher(tmp_path / "job.store", announce=url) as publisher:
        await in_thread(lambda: published(publisher))
        await until(
            lambda: f"Cannot connect to host 127.0.0.1:{site.port}" in fault(publisher, url)
        )
        assert "gave up" not in fault(publisher, url), "it is tried again"
        assert not publisher.announced(0.0)
        await site.serve(slow.app)
        assert await in_thread(lambda: publisher.announced(ANSWER_S))
        assert publisher.announce_faults == {}
    assert slow.answered == [1]
    await site.close()


@pytest.mark.parametrize("status", [400, 409])
async def test_a_refused_announcement_is_logged_and_not_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    slow, site = SlowGateway(), Site()
    slow.open.set()
    slow.status = status
    await site.serve(slow.app)
    publisher = Publisher(tmp_path / "job.store", announce=f"{site.url}/v1/jobs/job")
    await in_thread(lambda: published(publisher))
    # At once: a refusal is not waited for.
    assert not await in_thread(lambda: publisher.announced(2 * ANSWER_S))
    assert WRONG in fault(publisher, f"{site.url}/v1/jobs/job")
    assert f"cannot be announced to {site.url}" in caplog.text
    assert slow.received == [1]
    slow.status = 200
    await in_thread(lambda: published(publisher))
    assert await in_thread(lambda: publisher.announced(ANSWER_S))
    await in_thread(publisher.close)
    await site.close()


async def test_a_renewed_token_is_sent_to_a_gateway_of_a_private_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    site = Site(authority.server("gateway"))
    sent: list[str] = []

    async def versions(request: web.Request) -> web.Response:
        sent.append(request.headers["Authorization"])
        return web.json_response({"version": 1, "engines": {}})

    app = web.Application()
    app.router.add_post("/v1/jobs/job/versions", versions)
    await site.serve(app)
    token = token_file(tmp_path, "token", "first-token-of-16-characters")
    with Publisher(
        tmp_path / "job.store",
        announce=Publisher.Announce(
            f"{site.url}/v1/jobs/job", token_file=str(token), ca_file=str(authority.file)
        ),
    ) as publisher:
        for expected in ("first", "second"):
            await in_thread(lambda: published(publisher))
            assert await in_thread(lambda: publisher.announced(ANSWER_S))
            assert sent[-1] == f"Bearer {expected}-token-of-16-characters"
            token_file(tmp_path, "next", "second-token-of-16-characters").replace(token)
    await site.close()


def test_the_example_publishes_and_the_gateway_serves_it(
    tmp_path: Path, fake_engine: Callable[..., Served], gateway: Callable[..., Served]
) -> None:
    service = gateway(fake_engine())
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    script = Path(__file__).parents[2] / "examples/publish.py"
    where = ("--checkpoint", tmp_path / "model.safetensors", "--store", tmp_path / "job-a")
    printed = subprocess.check_output(
        [sys.executable, script, *where, "--job", "job", "--gateway", service.url],
        text=True,
        timeout=60,
    )
    assert printed.splitlines()[-1] == "served"


async def test_a_version_of_a_job_that_is_not_active_is_announced_and_not_served(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine, jobs=[{"id": "other", "active": True}, {"id": "job"}]) as one:
        url = f"{one.url}/v1/jobs/job"
        with Publisher(tmp_path / "job.store", announce=url) as publisher:
            await in_thread(lambda: published(publisher))
            assert await in_thread(lambda: publisher.announced(ANSWER_S)) == "announced, not active"
            assert engine.version == 0
        reply = (await one.publish(2))[1]
        assert (reply["version"], reply["active"]) == (2, False)
        assert (await one.post("/v1/jobs/job/activate", {}))[1]["active"]
        assert engine.version == 2


def test_an_address_that_is_no_job_s_is_refused_before_anything_is_published(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="/v1/jobs/JOB"):
        Publisher(tmp_path / "job.store", announce="http://127.0.0.1:8300")
