"""The agent's stops as an operator, a gateway and the commands see them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from harvester.agent.http import application
from harvester.agent.node import NodeAgent
from harvester.cli.root import main
from harvester.config import AgentConfig, HttpConfig
from harvester.contracts.audit import AuditEvent, read_audit
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.wire.leases import SlotOffers
from harvester.platform.bearer import TokenFile
from harvester.platform.http_kit import listen, serving
from tests.certificates import token_file

TAKE = {"request_id": "r1", "slot": "slot0", "tenant": "t", "job": "j", "duration_s": 5.0}
DRAIN = {"order": "drain", "by": "alice", "reason": "driver update"}
GATEWAY, OPERATOR, OBSERVER = "g" * 32, "o" * 32, "b" * 32


def sends(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeAgent]:
    pages = PageDirectory.create(tmp_path / "pages" / "slot0")
    stamp_ns = monotonic_ns()
    pages.pulse_writer("prod", 0).write(Pulse(model_samples=1000), now_ns=stamp_ns, ttl_ns=10**11)
    pages.guest_writer().write(Guest(), now_ns=stamp_ns, ttl_ns=10**11)
    config = AgentConfig.model_validate(
        {
            "mode": "harvest",
            "page_root": tmp_path / "pages",
            "state_dir": tmp_path / "state",
            "tenants": ["configured"],
            "slots": [{"name": "slot0"}],
        }
    )
    node = NodeAgent(config, clock=MonotonicClock(), version="1")
    node.beat()
    yield node
    node.close()


@pytest.fixture
async def client(node: NodeAgent, tmp_path: Path) -> AsyncIterator[TestClient[Any, Any]]:
    leases = TokenFile(token_file(tmp_path, "leases", GATEWAY))
    operators = TokenFile(token_file(tmp_path, "operators", OPERATOR))
    observers = TokenFile(token_file(tmp_path, "observers", OBSERVER))
    app = application(node, tokens=leases, operators=operators, observers=observers)
    async with TestClient(TestServer(app)) as client:
        yield client


async def test_an_operator_s_order_is_in_force_when_it_is_answered(
    client: Any, node: NodeAgent
) -> None:
    taken = await (await client.post("/v1/leases", json=TAKE, headers=sends(OPERATOR))).json()
    assert taken["type"] == "granted"
    reply = await client.post("/v1/stops", json=DRAIN, headers=sends(OPERATOR))
    assert reply.status == 200
    assert (await reply.json())["recorded"] is True
    body = await (await client.get("/v1/slots", headers=sends(GATEWAY))).read()
    offers = msgspec.json.decode(body, type=SlotOffers)
    (offer,) = offers.slots
    for stop in (offer.stop, *offers.stops):
        assert stop is not None
        assert (stop.by, stop.reason, stop.order) == ("alice", "driver update", "drain")
    assert offer.state == "off"
    assert "driver update" in offer.reason
    said = await (await client.get("/metrics", headers=sends(GATEWAY))).text()
    assert 'reason="driver update"' in said


async def test_the_audit_names_who_stopped_and_who_resumed(
    client: Any, node: NodeAgent, tmp_path: Path
) -> None:
    await client.post("/v1/stops", json=DRAIN, headers=sends(OPERATOR))
    lifts = {"order": "none", "by": "bob"}
    await client.post("/v1/stops", json=lifts, headers=sends(OPERATOR))
    (tmp_path / "pages" / "stop").write_text("hold the file says so")
    node.beat()
    events = [
        event
        for event in read_audit(tmp_path / "state" / "audit.jsonl")
        if isinstance(event, AuditEvent)
    ]
    told = [(event.event, event.who, event.reason) for event in events if "stop_" in event.event]
    caller = "token 1 of operators, from 127.0.0.1"
    assert told[:2] == [
        ("stop_placed", f"alice, {caller}", "drain (operator): driver update"),
        ("stop_lifted", f"bob, {caller}", "drain (operator): driver update"),
    ]
    assert told[2][0] == "stop_placed"
    assert told[2][2] == "hold (file): the file says so"
    assert OPERATOR not in str(told)


async def test_a_gateway_s_token_lifts_no_operator_s_order(client: Any, node: NodeAgent) -> None:
    await client.post("/v1/stops", json=DRAIN, headers=sends(OPERATOR))
    for body in ({"order": "none"}, {**DRAIN, "tenant": "t"}):
        reply = await client.post("/v1/stops", json=body, headers=sends(GATEWAY))
        assert reply.status == 403
    lifts = {"order": "none", "cluster": True, "number": 9}
    assert (await client.post("/v1/stops", json=lifts, headers=sends(GATEWAY))).status == 200
    assert [stop.source for stop in node.stops.stops] == ["operator"]
    assert (await client.post("/v1/stops", json=DRAIN)).status == 401


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"order":"halt","reason":"r"}',
        b'{"order":"hold"}',
        b'{"order":"hold","reason":"r","slot":"../etc"}',
        b'{"order":"hold","reason":"r","slot":"slot9"}',
        b'{"order":"hold","reason":"r","extra":1}',
        b'{"order":"hold","reason":"' + b"x" * 201 + b'"}',
        b'{"order":"none","cluster":true,"number":-1}',
    ],
)
async def test_a_malformed_order_gets_400_and_changes_nothing(
    client: Any, node: NodeAgent, body: bytes
) -> None:
    reply = await client.post("/v1/stops", data=body, headers=sends(OPERATOR))
    assert reply.status == 400
    assert (await reply.json())["error"]
    assert node.stops.stops == ()


def test_a_token_file_of_a_role_needs_one_for_the_others(tmp_path: Path) -> None:
    for role in ("operator_token_file", "observer_token_file"):
        with pytest.raises(ValueError, match=f"{role}: needs a token_file"):
            HttpConfig.model_validate({role: tmp_path})


READ = ("/v1/slots", "/v1/stops", "/healthz", "/readyz", "/metrics", "/openapi.json")


async def test_every_role_reads_and_a_wrong_token_reads_nothing(client: Any) -> None:
    for path in READ:
        for token in (GATEWAY, OPERATOR, OBSERVER):
            for method in ("GET", "HEAD"):
                assert (await client.request(method, path, headers=sends(token))).status == 200
        for headers in (sends("w" * 32), {"Authorization": OBSERVER}, {}):
            status = 200 if path.endswith("z") else 401
            assert (await client.get(path, headers=headers)).status == status


async def test_an_observer_changes_nothing(client: Any, node: NodeAgent) -> None:
    taken = await (await client.post("/v1/leases", json=TAKE, headers=sends(GATEWAY))).json()
    lease = f"/v1/leases/{taken['lease']}"
    for method, path, body in (
        ("POST", "/v1/leases", TAKE | {"request_id": "r2"}),
        ("POST", f"{lease}/renew", {"duration_s": 5.0}),
        ("DELETE", lease, None),
        ("POST", "/v1/stops", DRAIN),
        ("POST", "/v1/stops", {"order": "none"}),
        ("POST", "/v1/stops", {**DRAIN, "cluster": True, "number": 9}),
        ("PUT", "/v1/slots", None),
        ("POST", "/v1/nothing", None),
    ):
        reply = await client.request(method, path, json=body, headers=sends(OBSERVER))
        assert (reply.status, list(await reply.json())) == (403, ["error"]), (method, path)
        reply = await client.request(method, path, json=body, headers=sends("w" * 32))
        assert reply.status == 401
    assert node.stops.stops == ()
    assert (await client.delete(lease, headers=sends(GATEWAY))).status == 200


async def test_a_token_in_two_files_only_observes(node: NodeAgent, tmp_path: Path) -> None:
    leases = TokenFile(token_file(tmp_path, "leases", GATEWAY, OBSERVER))
    observers = TokenFile(token_file(tmp_path, "observers", OBSERVER))
    app = application(node, tokens=leases, observers=observers)
    async with TestClient(TestServer(app)) as client:
        for token, status in ((OBSERVER, 403), (GATEWAY, 200)):
            assert (await client.get("/v1/slots", headers=sends(token))).status == 200
            reply = await client.post("/v1/leases", json=TAKE, headers=sends(token))
            assert reply.status == status


async def test_the_commands_stop_show_and_resume(
    node: NodeAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    async def command(*words: str) -> tuple[int, str]:
        def run() -> int:
            with pytest.raises(SystemExit) as left:
                main(list(words))
            return int(left.value.code or 0)

        code = await asyncio.to_thread(run)
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    async with serving(application(node)) as runner:
        url = await listen(runner, "127.0.0.1", 0, remedy="")
        agent = ("--agent", url)
        code, said = await command("hold", *agent, "--slot", "slot0", "--reason", "new rack")
        assert (code, "in force: hold (operator) by" in said) == (0, True), said
        code, said = await command("drain", *agent, "--tenant", "t", "--reason", "leak")
        assert code == 0, said
        code, said = await command("status", *agent, "--pages", "/nowhere")
        flat = " ".join(said.split())
        assert "Stopped, slot0: hold (operator)" in flat
        assert "Stopped, tenant t: drain (operator)" in flat
        code, said = await command("resume", *agent, "--slot", "slot0")
        assert (code, "resumed" in said, "reaches" in said) == (0, True, False), said
        assert "still in force, tenant t: drain (operator)" in said
        code, said = await command("resume", *agent, "--slot", "slot0")
        assert (code, said.startswith("nothing was stopped")) == (0, True), said
        code, said = await command("resume", *agent, "--slot", "slot9")
        assert (code, "no slot slot9" in said) == (1, True), said
        assert [stop.tenant for stop in node.stops.stops] == ["t"]
        code, said = await command("hold", *agent, "--slot", "slot9", "--reason", "r")
        assert (code, "no slot slot9" in said) == (1, True), said
        code, said = await command("hold", *agent, "--reason", " ")
        assert code == 2, said
        code, said = await command("resume", *agent, "--tenant", "t")
        assert (code, said) == (0, "resumed\nno order is in force any more\n")
    code, said = await command("hold", *agent, "--reason", "r")
    assert (code, "gives no answer" in said) == (1, True), said


async def test_a_command_says_which_leases_its_order_reaches(
    client: Any, node: NodeAgent, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    agent = ("--agent", str(client.make_url("/")), "--token-file", str(tmp_path / "operators"))

    async def ordered(*words: str) -> str:
        def run() -> None:
            with pytest.raises(SystemExit, match="0"):
                main([*words, *agent, "--reason", "leak"])

        await asyncio.to_thread(run)
        return capsys.readouterr().out

    await client.post("/v1/leases", json=TAKE, headers=sends(GATEWAY))
    said = await ordered("drain", "--tenant", "typo")
    assert "reaches no lease in force of tenant typo\n" in said
    assert "no tenant typo is known here (known: configured, t): the order waits" in said
    assert "reaches: slot0 (t/j)\n" in await ordered("hold", "--slot", "slot0")
    said = await ordered("drain", "--tenant", "t")
    assert "reaches: slot0 (t/j)\n" in said
    assert "known" not in said
    assert "known" not in await ordered("hold", "--tenant", "configured")
    assert "reaches no lease in force\n" in await ordered("drain")


async def test_status_says_why_the_audit_cannot_be_written(client: Any, node: NodeAgent) -> None:
    node.audit.fault = "No space left on device"
    offers = await (await client.get("/v1/slots", headers=sends(OBSERVER))).json()
    assert offers["audit_fault"] == "No space left on device"
