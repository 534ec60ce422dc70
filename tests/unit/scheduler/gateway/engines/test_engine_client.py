"""Failures of one engine's calls, by the party at fault."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from harvester.contracts.ids import JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.gateway.engines.engine_client import EngineClient
from scheduler.gateway.engines.engine_faults import EngineBusy, EngineUnreachable
from scheduler.gateway.engines.identity import Change
from scheduler.gateway.policy.turn_ledger import TurnLedger


class NoConnection:
    """A session none of whose calls gets a connection."""

    def __init__(self, number: int) -> None:
        self._error = OSError(number, "no connection")

    def request(self, *_: object, **__: object) -> Any:
        address = SimpleNamespace(host="engine", port=9, ssl=True)
        raise aiohttp.ClientConnectorError(cast(Any, address), self._error)


@pytest.mark.parametrize(
    ("number", "raised"),
    [(errno.ECONNREFUSED, EngineUnreachable), (errno.EMFILE, EngineBusy)],
)
async def test_a_gateway_without_descriptors_takes_no_engine_for_lost(
    number: int, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_connection(*_: object, **__: object) -> None:
        raise OSError(number, "no connection")

    monkeypatch.setattr("aiohappyeyeballs.start_connection", no_connection)
    sampling = SamplingParams(max_tokens=1)
    request = GenerateRequest(request_id="r", token_ids=(1,), sampling_params=sampling)
    turn = TurnLedger(JobId("job")).open(request, trajectory=TrajectoryId("t"))
    assert turn is not None
    attempt = turn.begin(engine="e0", version=WeightVersion(0), numerics="")
    client = EngineClient(cast(Any, None), "http://127.0.0.1:9", connect_s=1.0)
    with pytest.raises(raised):
        await anext(client.generate(attempt, request_id="r", epoch=None))


class Answers:
    """A session all of whose calls get this status."""

    def __init__(self, status: int) -> None:
        self._status = status

    @asynccontextmanager
    async def request(self, *_: object, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(status=self._status, content=aiohttp.EMPTY_PAYLOAD, headers={})


@pytest.mark.parametrize(
    ("session", "change"),
    [
        (NoConnection(errno.ECONNREFUSED), Change.PROCESS),
        (NoConnection(errno.EHOSTUNREACH), Change.UNKNOWN),
        (NoConnection(errno.ECONNRESET), Change.UNKNOWN),
        (NoConnection(errno.ETIMEDOUT), Change.UNKNOWN),
        (Answers(200), Change.NONE),
        (Answers(503), Change.PROCESS),
        (Answers(502), Change.PROCESS),
        (Answers(504), Change.UNKNOWN),
        (Answers(401), Change.UNKNOWN),
    ],
)
async def test_only_a_refused_connection_or_its_own_report_shows_that_an_engine_died(
    session: Any, change: Change
) -> None:
    assert await EngineClient(session, "http://127.0.0.1:9", connect_s=1.0).became() is change


async def test_an_engine_that_is_well_but_not_identified_is_not_taken_for_the_same_one() -> None:
    client = EngineClient(cast(Any, Answers(200)), "http://127.0.0.1:9", connect_s=1.0)
    client.identity = "a1.4"
    assert await client.became() is Change.UNKNOWN
