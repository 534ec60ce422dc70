"""The agent's routes as a scheduler sees them, and what they refuse."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from harvester.agent.http import application
from harvester.agent.node import NodeAgent
from harvester.cli.root import main
from harvester.config import AgentConfig
from harvester.contracts.audit import AuditEvent, read_audit
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import (
    Calibration,
    Guest,
    GuestMemory,
    Lending,
    PageDirectory,
    PageFault,
    Pulse,
)
from harvester.contracts.wire.leases import (
    EndReason,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    SlotOffers,
    SlotState,
)
from harvester.platform.bearer import TokenFile, read_token
from harvester.platform.http_kit import listen, serving
from harvester.platform.tls import Credentials
from tests.certificates import Authority, token_file

TAKE = {"request_id": "r1", "slot": "slot0", "tenant": "t", "job": "j", "duration_s": 5.0}
Answer = LeaseGranted | LeaseRefused | LeaseEnded


@pytest.fixture
def node(tmp_path: Path) -> Any:
    pages = PageDirectory.create(tmp_path / "pages" / "slot0")
    stamp_ns = monotonic_ns()
    pages.pulse_writer("prod", 0).write(Pulse(model_samples=1000), now_ns=stamp_ns, ttl_ns=10**11)
    pages.guest_writer().write(Guest(), now_ns=stamp_ns, ttl_ns=10**11)
    config = AgentConfig.model_validate(
        {
            "mode": "harvest",
            "page_root": tmp_path / "pages",
            "state_dir": tmp_path / "state",
            "slots": [{"name": "slot0", "engine_url": "http://127.0.0.1:1", "model": "m"}],
        }
    )
    node = NodeAgent(config, clock=MonotonicClock(), version="1")
    node.beat()
    yield node
    node.close()


@pytest.fixture
async def client(node: NodeAgent) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(application(node))) as client:
        yield client


def decisions(node: NodeAgent) -> int:
    """Beats so far, by the grants that they wrote."""
    node.refresh_metrics()
    families = node.metrics.registry.collect()
    samples = (sample for family in families for sample in family.samples)
    name = "harvester_admission_decisions_total"
    return int(sum(sample.value for sample in samples if sample.name == name))


async def answer(reply: Any) -> Answer:
    assert reply.status == 200, await reply.text()
    decoded: Answer = msgspec.json.decode(await reply.read(), type=Answer)
    return decoded


async def test_offers_its_slots(client: Any) -> None:
    reply = await client.get("/v1/slots")
    offers = msgspec.json.decode(await reply.read(), type=SlotOffers)
    (offer,) = offers.slots
    assert (offer.slot, offer.state, offer.engine_url) == (
        "slot0",
        SlotState.OFFERED,
        "http://127.0.0.1:1",
    )


@pytest.mark.parametrize(
    "poison",
    [
        Guest(lending=Lending(tokens=64, share_ratio=math.nan)),
        Guest(lending=Lending(tokens=64, share_ratio=1.5)),
        Guest(step_calibration=Calibration(steps=1, p99_ratio=math.inf)),
        Guest(memory=GuestMemory(weights_bytes=(1 << 64) - 1, kv_bytes=1, graphs_bytes=1)),
        Guest(kv_tokens=-1),
    ],
)
async def test_a_guest_whose_page_has_impossible_numbers_spoils_its_own_page_alone(
    client: Any, node: NodeAgent, tmp_path: Path, poison: Guest
) -> None:
    pages = PageDirectory(tmp_path / "pages" / "slot0")
    pages.guest_writer().write(poison, now_ns=monotonic_ns(), ttl_ns=10**11)
    assert pages.guest_reader().read().fault is PageFault.TORN
    node.beat()
    reply = await client.get("/v1/slots")
    offer = msgspec.json.decode(await reply.read(), type=SlotOffers).slots[0]
    assert (offer.lending, offer.floor_bytes) == (Lending(), 0)


async def test_a_lease_goes_from_taken_over_renewed_to_released(
    client: Any, node: NodeAgent
) -> None:
    taken = await answer(await client.post("/v1/leases", json=TAKE))
    assert isinstance(taken, LeaseGranted)
    renewal = {"epoch": taken.epoch, "duration_s": 10.0}
    renewed = await answer(await client.post(f"/v1/leases/{taken.lease}/renew", json=renewal))
    assert isinstance(renewed, LeaseGranted)
    assert renewed.duration_s > taken.duration_s
    ended = await answer(await client.delete(f"/v1/leases/{taken.lease}"))
    assert isinstance(ended, LeaseEnded)
    assert node.leases.view(taken.slot).lease is None


async def test_the_guest_knows_a_leases_epoch_when_its_holder_does(
    client: Any, tmp_path: Path
) -> None:
    grants = PageDirectory(tmp_path / "pages" / "slot0").grant_reader()

    def epoch_in_force() -> int:
        grant = grants.read().record
        assert grant is not None
        return grant.epoch

    taken = await answer(await client.post("/v1/leases", json=TAKE))
    assert isinstance(taken, LeaseGranted)
    assert epoch_in_force() == taken.epoch
    await client.delete(f"/v1/leases/{taken.lease}")
    assert epoch_in_force() > taken.epoch


async def test_a_lost_reply_costs_nothing_on_any_call(client: Any) -> None:
    first = await answer(await client.post("/v1/leases", json=TAKE))
    again = await answer(await client.post("/v1/leases", json=TAKE))
    assert isinstance(first, LeaseGranted)
    assert isinstance(again, LeaseGranted)
    assert (again.lease, again.epoch) == (first.lease, first.epoch)
    renewal = {"epoch": first.epoch, "duration_s": 5.0}
    for _ in range(2):
        renewed = await answer(await client.post(f"/v1/leases/{first.lease}/renew", json=renewal))
        assert isinstance(renewed, LeaseGranted)
    ended = [await answer(await client.delete(f"/v1/leases/{first.lease}")) for _ in range(2)]
    assert ended[0] == ended[1]


async def test_an_offer_names_the_holder_of_a_slot_and_not_the_lease_id(client: Any) -> None:
    taken = await answer(await client.post("/v1/leases", json=TAKE))
    assert isinstance(taken, LeaseGranted)
    for path in ("/v1/slots", "/metrics", "/readyz"):
        said = await (await client.get(path)).text()
        assert taken.lease.rpartition(".")[2] not in said
    reply = await client.get("/v1/slots")
    (offer,) = msgspec.json.decode(await reply.read(), type=SlotOffers).slots
    assert (offer.tenant, offer.job, offer.state) == ("t", "j", SlotState.LEASED)


@pytest.mark.parametrize("guess", ["slot0.1", "node-0.slot0.1", "slot0.1." + "0" * 32])
async def test_a_caller_without_the_lease_id_renews_and_ends_nothing(
    client: Any, node: NodeAgent, guess: str
) -> None:
    taken = await answer(await client.post("/v1/leases", json=TAKE))
    assert isinstance(taken, LeaseGranted)
    before = decisions(node)
    renewal = {"epoch": taken.epoch, "duration_s": 10.0}
    renewed = await answer(await client.post(f"/v1/leases/{guess}/renew", json=renewal))
    ended = await answer(await client.delete(f"/v1/leases/{guess}"))
    for said in (renewed, ended):
        assert isinstance(said, LeaseEnded)
        assert said.reason is EndReason.UNKNOWN
    live = node.leases.live(taken.slot)
    assert live is not None
    assert live.lease == taken.lease
    # Nor does such a caller write the journal.
    assert decisions(node) == before


async def test_a_taken_slot_is_refused_as_a_value(client: Any) -> None:
    await client.post("/v1/leases", json=TAKE)
    refused = await answer(await client.post("/v1/leases", json={**TAKE, "request_id": "r2"}))
    assert isinstance(refused, LeaseRefused)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"slot": "slot0"}',
        msgspec.json.encode({**TAKE, "extra": 1}),
        msgspec.json.encode({**TAKE, "duration_s": "long"}),
        msgspec.json.encode({**TAKE, "slot": "../../etc/passwd"}),
        msgspec.json.encode({**TAKE, "tenant": "x" * 65}),
        b"\xff\xfe",
    ],
)
async def test_a_malformed_request_gets_400_and_a_reason(client: Any, body: bytes) -> None:
    reply = await client.post("/v1/leases", data=body)
    assert reply.status == 400
    assert (await reply.json())["error"]


async def test_a_body_over_the_limit_is_refused(client: Any) -> None:
    reply = await client.post("/v1/leases", data=b"x" * (65 << 10))
    assert reply.status == 413


async def test_a_lease_name_that_is_no_name_is_refused(client: Any) -> None:
    reply = await client.delete("/v1/leases/..%2F..%2Fetc")
    assert reply.status in {400, 404}
    reply = await client.delete("/v1/leases/-x")
    assert reply.status == 400


async def test_health_is_about_the_loop_and_readiness_about_signals(
    client: Any, node: NodeAgent, tmp_path: Path
) -> None:
    assert (await client.get("/healthz")).status == 200
    assert (await client.get("/readyz")).status == 200
    (tmp_path / "pages" / "slot0" / "pulse.prod.0").unlink()
    PageDirectory(tmp_path / "pages" / "slot0").pulse_writer("prod", 0).close()
    node.slots[0].sensor.close()
    node.beat()
    reply = await client.get("/readyz")
    assert reply.status == 503
    assert "pulse.prod.0" in await reply.text()


async def test_a_slot_that_is_not_open_is_seen_by_status_lease_holders_and_probes(
    node: NodeAgent, client: Any
) -> None:
    root, slots = node.slots.config.page_root, node.slots.config.slots
    (root / "slot9").write_text("a file in place of its pages")
    more = (*slots, slots[0].model_copy(update={"name": "slot9", "pages": None}))
    node.reconfigure(node.slots.config.model_copy(update={"slots": more}))
    why = node.slots.unopened["slot9"]
    assert why
    reply = await client.get("/v1/slots")
    assert (await reply.json())["unopened"] == {"slot9": why}
    request = {"request_id": "r", "slot": "slot9", "tenant": "t", "job": "j", "duration_s": 5}
    reply = await client.post("/v1/leases", json=request)
    assert (await reply.json())["reason"] == why
    reply = await client.post("/v1/leases", json={**request, "slot": "slot10"})
    assert (await reply.json())["reason"] == "no such slot on this node"
    ready = await client.get("/readyz")
    text = await ready.text()
    assert ready.status == 503
    assert "slot9: not open" in text
    # It needs no token, and so names no path.
    assert str(root) not in text
    (root / "slot9").unlink()
    node.slots.open_more()
    reply = await client.get("/v1/slots")
    assert (await reply.json())["unopened"] == {}


async def test_a_refused_reload_is_named_until_one_succeeds(node: NodeAgent, client: Any) -> None:
    node.refuse_configuration("agent.yaml: moed is no field")
    reply = await client.get("/v1/slots")
    assert (await reply.json())["config_refused"] == "agent.yaml: moed is no field"
    node.reconfigure(node.slots.config)
    reply = await client.get("/v1/slots")
    assert (await reply.json())["config_refused"] == ""


async def test_a_token_guards_everything_but_health(node: NodeAgent, tmp_path: Path) -> None:
    tokens = TokenFile(token_file(tmp_path, "token", "s" * 32))
    async with TestClient(TestServer(application(node, tokens=tokens))) as client:
        assert (await client.get("/healthz")).status == 200
        for path in ("/v1/slots", "/metrics"):
            assert (await client.get(path)).status == 401
            wrong = {"Authorization": "Bearer " + "t" * 32}
            assert (await client.get(path, headers=wrong)).status == 401
            right = {"Authorization": "Bearer " + "s" * 32}
            assert (await client.get(path, headers=right)).status == 200


def callers(tmp_path: Path, kind: str) -> list[str]:
    """`who` of each event of a kind in the node's audit."""
    events = read_audit(tmp_path / "state" / "audit.jsonl")
    return [one.who for one in events if isinstance(one, AuditEvent) and one.event == kind]


async def test_the_audit_names_the_caller_by_the_line_of_its_token(
    node: NodeAgent, tmp_path: Path
) -> None:
    tokens = TokenFile(token_file(tmp_path, "tokens", "s" * 32, "t" * 32))
    headers = {"Authorization": "Bearer " + "t" * 32}
    async with TestClient(TestServer(application(node, tokens=tokens))) as client:
        taken = await answer(await client.post("/v1/leases", json=TAKE, headers=headers))
        assert isinstance(taken, LeaseGranted)
        await client.delete(f"/v1/leases/{taken.lease}", headers=headers)
    who = "token 2 of tokens, from 127.0.0.1"
    assert callers(tmp_path, "lease_granted") == callers(tmp_path, "lease_ended") == [who]
    assert "tttt" not in (tmp_path / "state" / "audit.jsonl").read_text()


async def test_the_audit_names_the_caller_by_its_certificate(
    node: NodeAgent, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    client = authority.signs("gateway-7")
    tls = authority.server("agent", client_ca=authority.file)
    mine = Credentials(
        ca_file=authority.file, cert_file=client.cert_file, key_file=client.key_file
    ).tls()
    async with serving(application(node)) as runner, aiohttp.ClientSession() as session:
        url = await listen(runner, "127.0.0.1", 0, remedy="", tls=tls)
        async with session.post(f"{url}/v1/leases", json=TAKE, ssl=mine) as reply:
            assert reply.status == 200
    assert callers(tmp_path, "lease_granted") == ["certificate of gateway-7, from 127.0.0.1"]


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [(b"short", 0o600, "at least 16"), (b"s" * 32, 0o644, "chmod 600"), (None, 0, "cannot read")],
)
def test_a_bad_token_file_stops_the_start(
    tmp_path: Path, content: bytes | None, mode: int, says: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        read_token(path)


@pytest.mark.parametrize("certificate", [(), ("rosemux-agent.rosemux",)])
async def test_status_is_shown_by_tls_and_a_token(
    node: NodeAgent,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    certificate: tuple[str, ...],
) -> None:
    authority, token = Authority(tmp_path), token_file(tmp_path, "token", "s" * 32)
    app = application(node, tokens=TokenFile(token))
    async with serving(app) as runner:
        tls = authority.server("agent", *certificate)
        url = await listen(runner, "127.0.0.1", 0, remedy="", tls=tls)

        command = ["status", "--pages", str(tmp_path / "pages"), "--agent", url]
        command += ["--ca-file", str(authority.file), "--token-file", str(token)]
        command += [word for name in certificate for word in ("--server-name", name)]
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, command)
    assert (ended.value.code, "slot0" in capsys.readouterr().out) == (0, True)


async def test_status_alone_asks_the_agent_of_this_machine_which_guard_binds(
    node: NodeAgent,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def shown() -> str:
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, ["status", "--pages", str(tmp_path / "pages")])
        assert ended.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    tokens = TokenFile(token_file(tmp_path, "token", "s" * 32))
    for secret, says in (
        (None, "Guards slot guard value limit slot0 slack_law 0 0"),
        (tokens, "guards and budgets are not shown: agent http://127.0.0.1:"),
    ):
        async with serving(application(node, tokens=secret)) as runner:
            url = await listen(runner, "127.0.0.1", 0, remedy="")
            monkeypatch.setattr("harvester.cli.status._LOCAL_AGENT", url)
            assert says in await shown()
    silent = await shown()
    assert "slot0 grant" in silent, "the pages are shown all the same"
    assert "gives no answer" in silent
    assert "name the agent by --agent" in silent


async def test_status_shows_a_certificate_to_an_agent_that_asks_for_one(
    node: NodeAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path)
    client = authority.signs("client")
    tls = authority.server("agent", client_ca=authority.file)
    pair = ["--cert-file", str(client.cert_file), "--key-file", str(client.key_file)]
    async with serving(application(node)) as runner:
        url = await listen(runner, "127.0.0.1", 0, remedy="", tls=tls)
        command = ["status", "--pages", str(tmp_path), "--agent", url]
        command += ["--ca-file", str(authority.file)]
        for options, status in ((pair, 0), (pair[:2], 2), ([], 1)):
            with pytest.raises(SystemExit) as ended:
                await asyncio.to_thread(main, [*command, *options])
            assert ended.value.code == status
    assert "slot0" in capsys.readouterr().out
