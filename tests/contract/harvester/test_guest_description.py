"""The description of a guest's engine in a slot offer, read from a server over HTTP."""

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from harvester.agent.engine_probes import GuestDescription
from harvester.contracts.wire.engines import ENGINE_ROUTE, EngineDescription

UNKNOWN = EngineDescription()
TOLD = {"identity": "a.0", "description": {"context_tokens": 4096, "vocabulary": 512}}


class Guest:
    def __init__(self) -> None:
        self.reply = web.json_response(TOLD)
        self.application = web.Application()
        self.application.router.add_get(ENGINE_ROUTE, self._answer)
        self.application.router.add_get("/other", self._other)

    async def _other(self, _request: web.Request) -> web.Response:
        return web.json_response(TOLD)

    async def _answer(self, _request: web.Request) -> web.Response:
        return self.reply


@pytest.mark.parametrize(
    "reply",
    [
        lambda: web.Response(status=404, text="not found"),
        lambda: web.Response(status=500),
        lambda: web.json_response({"description": 3}),
        lambda: web.Response(body=b"x" * (1 << 20)),
        lambda: web.Response(body=b'{"identity": "\xff"}'),
        lambda: web.Response(body=b'{"x": ' + b"[" * 4000),
        lambda: web.Response(status=302, headers={"Location": "/other"}),
    ],
    ids=["no route", "failing", "nonsense", "endless", "no UTF-8", "nested without end", "moved"],
)
async def test_a_guest_that_no_longer_says_what_it_is_is_unknown(reply) -> None:
    guest = Guest()
    async with TestServer(guest.application) as server, aiohttp.ClientSession() as session:
        description = GuestDescription(lambda: str(server.make_url("/")))
        assert description.latest == UNKNOWN
        await description.ask(session)
        assert description.latest == EngineDescription(context_tokens=4096, vocabulary=512)
        guest.reply = reply()
        await description.ask(session)
        assert description.latest == UNKNOWN


async def test_a_guest_that_is_gone_or_named_no_more_is_unknown() -> None:
    urls = []
    async with aiohttp.ClientSession() as session:
        async with TestServer(Guest().application) as server:
            urls.append(str(server.make_url("/")))
            description = GuestDescription(lambda: urls[-1])
            await description.ask(session)
            assert description.latest != UNKNOWN
        await description.ask(session)
        assert description.latest == UNKNOWN
        urls.append("")
        await description.ask(session)
        assert description.latest == UNKNOWN
