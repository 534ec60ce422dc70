"""The description of a guest's engine in a slot offer, read from a server over HTTP."""

import logging
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from harvester.agent.engine_probes import GuestDescription
from harvester.config import AgentConfig
from harvester.contracts.wire.engines import ENGINE_ROUTE, EngineDescription
from harvester.platform.http_kit import listen, serving
from harvester.platform.tls import Credentials
from tests.certificates import Authority, token_file

UNKNOWN = EngineDescription()
TOLD = {"identity": "a.0", "description": {"context_tokens": 4096, "vocabulary": 512}}


class Guest:
    def __init__(self, token: str = "") -> None:
        self._token = token
        self.reply = web.json_response(TOLD)
        self.application = web.Application()
        self.application.router.add_get(ENGINE_ROUTE, self._answer)
        self.application.router.add_get("/other", self._other)

    async def _other(self, _request: web.Request) -> web.Response:
        return web.json_response(TOLD)

    async def _answer(self, request: web.Request) -> web.Response:
        if self._token and request.headers.get("Authorization") != f"Bearer {self._token}":
            return web.Response(status=401)
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


NOWHERE = "http://127.0.0.1:1"


async def test_a_guest_in_another_pod_is_asked_through_its_engine_proxy(tmp_path: Path) -> None:
    """On the agent's own loopback there is no guest: pods have one each."""
    authority, token = Authority(tmp_path), "t" * 24
    file = token_file(tmp_path, "data", token)
    known = authority.trusted(server_name="rosemux-guest.rosemux", token_file=file)
    async with (
        serving(Guest(token).application) as runner,
        aiohttp.ClientSession() as session,
    ):
        tls = authority.server("guest", "rosemux-guest.rosemux")
        url = await listen(runner, "127.0.0.1", 0, remedy="", tls=tls)
        for credentials, answers in (
            (known, True),
            (known.model_copy(update={"server_name": None}), False),
            (authority.trusted(server_name="rosemux-guest.rosemux"), False),
            (None, False),
        ):
            description = GuestDescription(lambda: NOWHERE, lambda: url, credentials)
            await description.ask(session)
            assert (description.latest != UNKNOWN) is answers


async def test_a_guest_on_this_machine_is_asked_itself(tmp_path: Path) -> None:
    async with TestServer(Guest().application) as server, aiohttp.ClientSession() as session:
        here = str(server.make_url("/"))
        description = GuestDescription(lambda: here, lambda: NOWHERE, Credentials())
        await description.ask(session)
        assert description.latest != UNKNOWN


async def test_a_token_that_cannot_be_read_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = Credentials(token_file=tmp_path / "absent")
    description = GuestDescription(lambda: "", lambda: "https://127.0.0.1:1", absent)
    async with aiohttp.ClientSession() as session:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                await description.ask(session)
    assert description.latest == UNKNOWN
    assert len(caplog.records) == 1


def test_the_token_for_guests_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    fields = {
        "guests": {"token_file": tmp_path / "data"},
        "slots": [{"name": "chat", "offered_url": "http://192.0.2.21:8443"}],
    }
    with pytest.raises(ValueError, match=r"offered_url: token_file: .* plain HTTP"):
        AgentConfig.model_validate(fields)
