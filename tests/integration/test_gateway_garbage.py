"""Turns leave by reference counts: the gateway collects no old garbage while any turn is open."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.stall_watch import WATCH_S
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import GatewayInProcess, gateway_on

NATIVE = "/inference/v1/generate"


def body(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"token_ids": [1, 2], "sampling_params": {"max_tokens": max_tokens}, **more}


async def leave_after_a_token(gateway: GatewayInProcess, **more: Any) -> None:
    leaving = asyncio.create_task(gateway.post(NATIVE, body(100_000, **more)))
    await gateway.until_tokens(1)
    await asyncio.sleep(2 * WATCH_S)  # So that what looks at open turns has seen this one.
    leaving.cancel()
    await asyncio.wait((leaving,))


async def streamed(gateway: GatewayInProcess) -> None:
    url = gateway.url + NATIVE
    async with gateway._session.post(url, json=body(4, stream=True)) as reply:
        assert b"[DONE]" in await reply.read()


async def left(gateway: GatewayInProcess) -> None:
    await leave_after_a_token(gateway)


async def left_in_a_stream(gateway: GatewayInProcess) -> None:
    await leave_after_a_token(gateway, stream=True)


async def aborted(gateway: GatewayInProcess) -> None:
    turn = asyncio.create_task(gateway.post(NATIVE, body(100_000, request_id="r")))
    await gateway.until_tokens(1)
    await gateway.post("/abort_request", {"rid": "r"})
    assert (await turn)[1]["choices"][0]["finish_reason"] == "abort"


async def broken(gateway: GatewayInProcess) -> None:
    """Each stream breaks off after two tokens."""
    assert (await gateway.post(NATIVE, body(4)))[1]["choices"][0]["finish_reason"] == "length"


async def refused(gateway: GatewayInProcess) -> None:
    asked = body(4) | {"token_ids": [9]}
    assert (await gateway.post(NATIVE, asked))[0] == 400


async def several(gateway: GatewayInProcess) -> None:
    sampling = {"max_tokens": 4, "n": 4}
    asked = {"token_ids": [1, 2], "sampling_params": sampling}
    assert len((await gateway.post(NATIVE, asked))[1]["choices"]) == 4


def kept_turns() -> int:
    # Not isinstance, which asks objects of other tests' libraries for their class.
    return sum(type(each) is Turn for each in gc.get_objects())


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "serve",
    [streamed, left, left_in_a_stream, aborted, broken, refused, several],
    ids=lambda f: f.__name__,
)
async def test_a_turn_is_freed_without_the_garbage_collector(
    serve: Callable[[GatewayInProcess], Awaitable[None]],
) -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    engine.answers = {"9": 400}
    engine.breaks_after = 2 if serve is broken else 0
    async with gateway_on(engine, timeouts={"rejoin_s": 0.01}) as gateway:
        before = kept_turns()
        for _ in range(3):
            await serve(gateway)
        await gateway.until(lambda: not any(map(len, gateway.scheduler.ledgers.values())))
        await gateway.until(lambda: kept_turns() <= before)
