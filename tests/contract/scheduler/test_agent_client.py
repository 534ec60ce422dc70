"""An agent's replies as a network brings them: in pieces, and never more than is read."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import Epoch, JobId, LeaseId, NodeId, SlotId, TenantId
from harvester.contracts.wire.leases import (
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRequest,
    SlotOffer,
    SlotOffers,
    SlotState,
)
from scheduler.gateway.capacity import agent_client
from scheduler.gateway.capacity.agent_client import AgentClient

OFFERS = SlotOffers(
    node=NodeId("n"),
    slots=tuple(
        SlotOffer(
            slot=SlotId(f"slot-{place}"),
            node=NodeId("n"),
            state=SlotState.OFFERED,
            engine_url=f"http://n:{8100 + place}",
            model="policy",
            epoch=Epoch(1),
            concurrency=16,
            kv_tokens=100_000,
            idle_ratio=0.5,
        )
        for place in range(8)
    ),
)


def agent_that_says(pieces: Sequence[bytes]) -> TestServer:
    async def offers(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Length": str(sum(map(len, pieces)))})
        await reply.prepare(request)
        for piece in pieces:
            await reply.write(piece)
            await asyncio.sleep(0.02)
        return reply

    application = web.Application()
    application.router.add_get("/v1/slots", offers)
    application.router.add_post("/v1/leases", offers)
    return TestServer(application)


@asynccontextmanager
async def asking(server: TestServer) -> AsyncIterator[AgentClient]:
    async with server, aiohttp.ClientSession() as session:
        yield AgentClient(session, str(server.make_url("")).rstrip("/"), timeout_s=5)


async def offers_of(server: TestServer) -> SlotOffers:
    async with asking(server) as client:
        return await client.offers()


async def lease_of(server: TestServer) -> LeaseGranted | LeaseRefused:
    wanted = LeaseRequest(
        request_id="r", slot=SlotId("s"), tenant=TenantId("t"), job=JobId("j"), duration_s=1.0
    )
    async with asking(server) as client:
        return await client.take(wanted)


async def test_offers_that_come_in_several_segments_are_read_whole() -> None:
    said = msgspec.json.encode(OFFERS)
    pieces = [said[at : at + 700] for at in range(0, len(said), 700)]
    assert len(pieces) > 2
    assert await offers_of(agent_that_says(pieces)) == OFFERS


async def test_a_reply_that_is_longer_than_one_may_be_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = msgspec.json.encode(OFFERS)
    monkeypatch.setattr(agent_client, "MAX_REPLY_BYTES", len(said) - 1)
    with pytest.raises(PeerProtocolError):
        await offers_of(agent_that_says([said]))


async def test_a_slot_that_is_nonsense_costs_the_agents_other_slots_nothing() -> None:
    said = msgspec.to_builtins(OFFERS)
    said["slots"][3]["lending"]["share_ratio"] = None
    found = await offers_of(agent_that_says([msgspec.json.encode(said)]))
    assert [offer.slot for offer in found.slots] == [f"slot-{n}" for n in range(8) if n != 3]


@pytest.mark.parametrize("epoch", [-1, 1 << 63])
async def test_an_epoch_that_no_file_can_record_is_the_agents_fault(epoch: int) -> None:
    said = {"type": "granted", "lease": "l", "slot": "s", "epoch": epoch, "duration_s": 1.0}
    with pytest.raises(PeerProtocolError):
        await lease_of(agent_that_says([msgspec.json.encode(said)]))


@pytest.mark.parametrize("said", [b'{"node": "\xff", "slots": []}', b'{"slots": ' + b"[" * 100_000])
async def test_bytes_that_are_no_reply_are_the_agent_s_fault_and_no_one_else_s(said: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        await offers_of(agent_that_says([said]))


@pytest.mark.parametrize("ask", ["take", "renew"])
async def test_a_prefix_tells_slots_apart_and_its_agent_never_sees_it(ask: str) -> None:
    granted = {"type": "granted", "lease": "l", "slot": "s", "epoch": 1, "duration_s": 1.0}
    seen: list[bytes] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.read())
        return web.json_response(granted)

    application = web.Application()
    application.router.add_post("/v1/leases", answer)
    application.router.add_post("/v1/leases/l/renew", answer)
    async with TestServer(application) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        client = AgentClient(session, url, timeout_s=5, prefix="node-1.")
        if ask == "take":
            wanted = LeaseRequest(
                request_id="r",
                slot=SlotId("node-1.s"),
                tenant=TenantId("t"),
                job=JobId("j"),
                duration_s=1.0,
            )
            reply: LeaseGranted | LeaseRefused | LeaseEnded = await client.take(wanted)
            assert msgspec.json.decode(seen[0])["slot"] == "s"
        else:
            reply = await client.renew(LeaseId("l"), epoch=Epoch(1), duration_s=1.0)
        assert isinstance(reply, LeaseGranted)
        assert reply.slot == "node-1.s"


async def test_a_slot_whose_name_is_too_long_with_its_agent_s_is_left_out() -> None:
    server = agent_that_says([msgspec.json.encode(OFFERS)])
    async with server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        client = AgentClient(session, url, timeout_s=5, prefix="n" * 60 + ".")
        assert (await client.offers()).slots == ()
