"""Engines that are restarted one after another cost no turn, however slow their first token is."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import PROMPT, gateway_on


def slow_engine() -> FakeEngine:
    """Makes no token before it is told to."""
    engine = FakeEngine(step_s=0.02, epoch=None)
    engine.holds_at = 1
    return engine


@pytest.mark.parametrize("gap_s", [0.05, 0.7])
async def test_a_rolling_restart_refuses_no_sample_of_a_group(gap_s) -> None:
    engines = [slow_engine() for _ in range(3)]
    async with gateway_on(*engines) as gateway:
        await gateway.publish(1)
        turns = [
            asyncio.create_task(gateway.generate(f"t{n}", 2, prompt=[1, 2, n % 2]))
            for n in range(16)
        ]
        async with asyncio.timeout(30):
            while sum(engine.open for engine in engines) < 16:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for site in gateway.sites:
            engines.append(slow_engine())
            await site.serve(engines[-1].app())
            await asyncio.sleep(gap_s)
        # No engine dies any more.
        for engine in engines:
            engine.holds_at = 0
        for status, reply in await asyncio.gather(*turns):
            assert (status, reply.get("finish_reason")) == (200, "length"), reply
        status, reply = await gateway.generate("next step", 2, prompt=[1, 2, 0])
        assert status == 200, reply


OURS, OTHER = "a" * 32, "b" * 32


@pytest.mark.parametrize("announced", [OURS, ""], ids=["announced", "as_the_first_engine_holds_it"])
async def test_an_engine_that_finds_another_run_in_the_store_serves_no_turn(announced: str) -> None:
    first, second = (FakeEngine(step_s=0.001, epoch=None) for _ in range(2))
    first.stored_hash = second.stored_hash = OURS
    async with gateway_on(first, second) as gateway:
        assert (await gateway.publish(1, state_hash=announced))[0] == 200
        await gateway.sites[1].close()
        restarted = FakeEngine(step_s=0.001, epoch=None)
        restarted.stored_hash = OTHER
        await gateway.sites[1].serve(restarted.app())
        fleet = gateway.scheduler.fleet
        await gateway.until(lambda: OTHER in fleet.members["e1"].fault)
        for number in range(16):
            status, reply = await gateway.generate(f"t{number}", 2, weight_version={"exact": 1})
            assert (status, reply["spans"][0]["engine"]) == (200, "e0")
        restarted.stored_hash = OURS
        await gateway.until(lambda: fleet.policy.serves("e1", "job", 1))
        assert restarted.held_hash == OURS


async def test_a_restarted_gateway_knows_which_run_its_job_is_at(tmp_path: Path) -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    state = tmp_path / "state.sqlite"
    async with gateway_on(engine, state=state) as gateway:
        await gateway.publish(1, state_hash=OURS)
    engine.stored_hash = OTHER
    async with gateway_on(engine, state=state) as gateway:
        await gateway.until(lambda: OTHER in gateway.scheduler.fleet.members["e0"].fault)
        assert (await gateway.publish(1, state_hash=OTHER))[0] == 409
        assert (await gateway.generate("t", 2))[0] == 409
    engine.stored_hash = OURS
    async with gateway_on(engine, state=state) as gateway:
        await gateway.until(lambda: gateway.scheduler.fleet.policy.serves("e0", "job", 1))
        assert (await gateway.generate("t", 2))[0] == 409, "its trainer is still the other run's"
        assert (await gateway.publish(1))[0] == 200, "no run is named, and nothing resolved"
    engine.stored_hash = OTHER
    async with gateway_on(engine, state=state) as gateway:
        assert (await gateway.generate("t", 2))[0] == 409
        assert (await gateway.publish(2, state_hash=OTHER))[0] == 200
        assert (await gateway.generate("t", 2))[0] == 200
    async with gateway_on(engine, state=state) as gateway:
        assert (await gateway.generate("t", 2))[0] == 200


async def test_open_turns_of_a_run_that_began_anew_end_with_the_reason() -> None:
    async with gateway_on(FakeEngine(step_s=0.01, epoch=None)) as gateway:
        await gateway.publish(2, state_hash=OURS)
        turn = asyncio.create_task(gateway.generate("t", 500))
        await gateway.until_tokens(2)
        assert (await gateway.publish(2, state_hash=OTHER))[0] == 409
        status, reply = await turn
        assert (status, reply["finish_reason"]) == (200, "abort")
        assert "last publish was refused" in reply["fault"]
        assert (await gateway.generate("u", 2))[0] == 409
        assert (await gateway.publish(2))[0] == 200, "no run is named, and nothing resolved"
        assert (await gateway.generate("u", 2))[0] == 409
        assert (await gateway.publish(2, state_hash=OURS))[0] == 200
        assert (await gateway.generate("u", 2))[0] == 200


async def test_a_run_that_began_anew_takes_no_kept_answer_of_another_job() -> None:
    """Its client would get another sample under the same id."""
    engine = FakeEngine(step_s=0.001, epoch=None)
    jobs = [{"id": "job", "active": True}, {"id": "other", "tenant": "bob"}]
    async with gateway_on(engine, jobs=jobs) as gateway:
        body = {"request_id": "r", "token_ids": PROMPT, "sampling_params": {"max_tokens": 5}}
        sent = ("/inference/v1/generate", body, {"X-RoseMux-Job": "job"})
        first = await gateway.post(*sent)
        for version, status in ((2, 200), (1, 409)):
            published = {
                "version": version,
                "store": "other.store",
                "state_hash": f"{version}" * 32,
            }
            assert (await gateway.post("/v1/jobs/other/versions", published))[0] == status
        assert await gateway.post(*sent) == first
        assert len(engine.models) == 1, "sampled once"


async def test_an_overtaken_announcement_is_answered_as_that() -> None:
    engine = FakeEngine(step_s=0.01, epoch=None)
    async with gateway_on(engine) as gateway:
        assert (await gateway.publish(1, state_hash="1"))[0] == 200
        pinned = asyncio.create_task(gateway.generate("p", 100, weight_version={"exact": 1}))
        await gateway.until_tokens(2)
        policy = gateway.scheduler.fleet.policy
        overtaken = asyncio.create_task(gateway.publish(2, state_hash="2"))
        await gateway.until(lambda: policy.target.version == 2)
        newest = asyncio.create_task(gateway.publish(3, state_hash="3"))
        status, reply = await overtaken
        assert (status, reply["error"]) == (
            409,
            "version 2 was overtaken: job job is at version 3",
        )
        assert (await pinned)[1]["finish_reason"] == "length"
        assert (await newest)[0] == 200


async def test_a_dedicated_engine_whose_update_fails_counts_for_no_place() -> None:
    """Else its job's turns would wait for it while a slot could be leased."""
    broken, good = (FakeEngine(step_s=0.001, epoch=None) for _ in range(2))
    async with gateway_on(broken, good) as gateway:
        members, demands = gateway.scheduler.fleet.members, gateway.scheduler.demands.observe
        each = members["e0"].engine.concurrency
        await gateway.until(lambda: demands()[0].dedicated_places == 2 * each)
        broken.fail_updates = 1 << 20
        await gateway.publish(1)
        await gateway.until(lambda: demands()[0].dedicated_places == each)
        broken.fail_updates = 0
        await gateway.until(lambda: demands()[0].dedicated_places == 2 * each)
