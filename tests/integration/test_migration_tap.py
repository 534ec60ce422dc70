"""The tap of benchmarks.migration between a real gateway and a fake engine."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.migration import records
from benchmarks.migration.engine_tap import EngineTap
from benchmarks.migration.records import AttemptRecord, HeldRecord
from benchmarks.migration.rollout_plan import POISON_FAILS, FaultKind
from benchmarks.testbed.prerequisites import free_ports
from harvester.contracts.clock import MonotonicClock
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import (
    PROMPT,
    GatewayInProcess,
    Site,
    continued,
    gateway_on,
)

TOKENS = 12


@dataclass
class Tapped:
    tap: EngineTap
    gateway: GatewayInProcess
    root: Path

    def attempts(self) -> list[AttemptRecord]:
        return list(records.read(self.root / "attempts", AttemptRecord))


Start = Callable[..., Any]


@pytest.fixture
def tapped(tmp_path: Path) -> Start:
    @asynccontextmanager
    async def start(engine: FakeEngine) -> AsyncIterator[Tapped]:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            site = Site()
            await site.serve(engine.app())
            stack.push_async_callback(site.close)
            tap = EngineTap(
                "e0",
                session,
                port=free_ports(1)[0],
                engine_url=site.url,
                attempts=tmp_path / "attempts",
                held=tmp_path / "held",
                clock=MonotonicClock(),
            )
            await tap.listen()
            stack.push_async_callback(tap.close)
            gateway = await stack.enter_async_context(gateway_on(tap.url))
            assert (await gateway.publish(1))[0] == 200
            yield Tapped(tap, gateway, tmp_path)

    return start


def stopping() -> tuple[FakeEngine, list[int]]:
    """An engine, and the tokens of a turn that ends by its last one."""
    said = continued(PROMPT, TOKENS, version=1)
    engine = FakeEngine(step_s=0.0, epoch=None)
    engine.eos = [said[-1]]
    return engine, said[: said.index(said[-1]) + 1]


async def test_a_turn_passes_unchanged_and_its_engine_is_asked_for_its_weights(
    tapped: Start,
) -> None:
    async with tapped(FakeEngine(step_s=0.0, epoch=None)) as run:
        status, choice = await run.gateway.generate("a", TOKENS)
        assert status == 200
        (attempt,) = run.attempts()
        assert attempt.token_ids == choice["token_ids"] == continued(PROMPT, TOKENS, version=1)
        assert (attempt.request_id, attempt.number, attempt.context) == ("a", 1, PROMPT)
        assert (attempt.end, attempt.finish_reason) == ("whole", "length")
        assert sum(count for _, count in attempt.passed) == TOKENS
        await run.gateway.generate("b", 2)
        (held,) = records.read(run.root / "held", HeldRecord)
        assert (held.version, held.state_hash, held.identity) == (1, f"{1:032x}", attempt.identity)


async def test_a_connection_that_breaks_behind_the_end_costs_nothing(tapped: Start) -> None:
    engine, said = stopping()
    async with tapped(engine) as run:
        run.tap.armed[FaultKind.END_THEN_CUT] = 1
        status, choice = await run.gateway.generate("a", 2 * TOKENS)
        assert (status, choice["finish_reason"], choice["token_ids"]) == (200, "stop", said)
        (attempt,) = run.attempts()
        assert (attempt.end, run.tap.struck[FaultKind.END_THEN_CUT]) == ("broken", 1)


async def test_a_connection_that_breaks_within_the_end_costs_one_more_attempt(
    tapped: Start,
) -> None:
    engine, said = stopping()
    async with tapped(engine) as run:
        run.tap.armed[FaultKind.END_TORN] = 1
        status, choice = await run.gateway.generate("a", 2 * TOKENS)
        assert (status, choice["finish_reason"], choice["token_ids"]) == (200, "stop", said)
        first, second = run.attempts()
        # The torn event has not been passed on.
        assert first.token_ids == said[:-1]
        assert second.context == PROMPT + said[:-1]
        assert second.token_ids == said[-1:]


async def test_a_poison_request_fails_and_its_neighbour_does_not(tapped: Start) -> None:
    async with tapped(FakeEngine(step_s=0.0, epoch=None)) as run:
        poison = await run.gateway.generate("p", 4, prompt=[1, POISON_FAILS, 9])
        assert poison[0] == 422
        assert (await run.gateway.generate("a", 4))[0] == 200


async def test_a_closed_tap_is_a_dead_engine_and_one_that_listens_again_a_living_one(
    tapped: Start,
) -> None:
    async with tapped(FakeEngine(step_s=0.0, epoch=None)) as run:
        await run.tap.close()
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(f"{run.tap.url}/health")
        await run.tap.listen()
        status, choice = await run.gateway.generate("a", 4)
        assert (status, choice["token_ids"]) == (200, continued(PROMPT, 4, version=1))
