"""Probes of interlocks against servers that hang, break off, answer too much, or nonsense."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from harvester.agent.interlock_probes import Probe, alerts_probe, dcgm_probe, nvml_probe
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.config_file import load_agent_config
from harvester.contracts.clock import MonotonicClock, monotonic_ns, wall_seconds
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.wire.leases import LeaseGranted, LeaseRefused, LeaseRequest
from harvester.interlock_config import AcceleratorsConfig, AlertsConfig
from harvester.policy.interlocks import AcceleratorsReading, AlertsReading
from tests.virtual_clock import VirtualClock

TIMEOUT_S = 0.3
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


def rules(*alerts: dict[str, Any], health: str = "ok") -> dict[str, Any]:
    rule = {
        "type": "alerting",
        "name": "Slow",
        "health": health,
        "query": "x > 1",
        "duration": 60,
        "labels": {"severity": "page"},
        "annotations": {},
        "alerts": list(alerts),
        "state": "firing",
    }
    other = {"type": "recording", "name": "x:y", "health": "ok", "query": "y"}
    group = {"name": "g", "file": "f", "interval": 60, "rules": [rule, other]}
    return {"status": "success", "data": {"groups": [group]}}


FIRING = {
    "labels": {"alertname": "Slow", "service": "chat"},
    "annotations": {},
    "state": "firing",
    "activeAt": "2026-01-01T00:00:00Z",
    "value": "1e+00",
}
PAGE = """\
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100",Hostname="h"} 41
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100"} 301.5
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-2",device="nvidia1",modelName="NVIDIA H100"} NaN
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-1",err_code="79",err_msg="GPU {has} fallen"} 79
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-1"} 1980
"""


@asynccontextmanager
async def raw_server(handle: Handler) -> AsyncIterator[str]:
    """A server of bytes: what a handler writes is all that it says."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await handle(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)


def alerts_at(url: str, server: str = "prometheus") -> Probe[AlertsReading]:
    fields = {"url": url, "server": server, "alerts": ["Slow"], "watchdog": "Watchdog"}
    config = AlertsConfig.model_validate(fields | {"timeout_s": TIMEOUT_S})
    return alerts_probe(config, clock=MonotonicClock())


def dcgm_at(url: str) -> Probe[AcceleratorsReading]:
    config = AcceleratorsConfig(source="dcgm-exporter", url=url, timeout_s=TIMEOUT_S)
    return dcgm_probe(config, clock=MonotonicClock())


async def head(writer: asyncio.StreamWriter, rest: bytes, length: int | None = None) -> None:
    size = b"" if length is None else b"Content-Length: %d\r\n" % length
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + size + b"\r\n" + rest)
    await writer.drain()


async def hangs(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def half_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    await head(writer, b'{"status": "succ', 1000)
    await asyncio.sleep(30)


async def trickles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    await head(writer, b"", 1000)
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    await head(writer, b'{"status": "success"', 1000)


async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """100 MB, counted in what the client took."""
    await reader.readline()
    await head(writer, b"", 100 << 20)
    for _ in range(1600):
        writer.write(b" " * (64 << 10))
        await writer.drain()


async def resets(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def speaks_no_http(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    await writer.drain()


@pytest.mark.parametrize(
    "handle", [hangs, half_open, trickles, breaks_off, floods, resets, speaks_no_http]
)
@pytest.mark.parametrize("kind", ["prometheus", "alertmanager", "dcgm"])
async def test_any_answer_but_a_whole_one_in_time_is_a_fault(handle: Handler, kind: Any) -> None:
    async with raw_server(handle) as url, aiohttp.ClientSession() as session:
        probe = dcgm_at(url + "/metrics") if kind == "dcgm" else alerts_at(url, kind)
        async with asyncio.timeout(TIMEOUT_S + 2.0):
            await probe.ask(session)
        assert probe.reading.fault
        assert url in probe.reading.fault
        assert probe.reading.taken_at_s > 0


async def test_a_server_that_is_not_there_is_a_fault() -> None:
    async with aiohttp.ClientSession() as session:
        probe = alerts_at("http://127.0.0.1:1")
        await probe.ask(session)
        assert probe.reading.fault


@asynccontextmanager
async def serving_body(body: str | bytes, status: int = 200) -> AsyncIterator[str]:
    async def answer(_request: web.Request) -> web.Response:
        raw = body.encode() if isinstance(body, str) else body
        return web.Response(status=status, body=raw, headers={"Location": "http://127.0.0.1:1/"})

    app = web.Application()
    app.router.add_route("GET", "/{any:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def asked(body: str | bytes, kind: Any, status: int = 200) -> Any:
    async with serving_body(body, status) as url, aiohttp.ClientSession() as session:
        probe = dcgm_at(url + "/metrics") if kind == "dcgm" else alerts_at(url, kind)
        await probe.ask(session)
        return probe.reading


async def test_a_page_on_which_the_parser_fails_is_a_fault() -> None:
    reading = await asked('DCGM_FI_DEV_GPU_TEMP{,\u2028=""}\n', "dcgm")
    assert "index out of range" in reading.fault


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (json.dumps(rules()), 500),
        (json.dumps(rules()), 302),
        ('{"status": "error", "errorType": "x", "error": "y"}', 200),
        ('{"status": "success"}', 200),
        ('{"status": "success", "data": {"groups": NaN}}', 200),
        ("NaN", 200),
        ("", 200),
        ("<html>", 200),
        (b"\xff\xfe", 200),
        ("[" * 100_000, 200),
        (json.dumps(rules({**FIRING, "state": "burning"})), 200),
    ],
)
async def test_an_answer_that_is_no_list_of_rules_is_a_fault(
    body: str | bytes, status: int
) -> None:
    assert (await asked(body, "prometheus", status)).fault


async def test_prometheus_says_what_fires_and_which_rules_are_evaluated() -> None:
    quiet = await asked(json.dumps(rules()), "prometheus")
    assert (quiet.fault, quiet.firing, quiet.rules) == ("", (), frozenset({"Slow"}))
    fires = await asked(json.dumps(rules(FIRING, {**FIRING, "state": "pending"})), "prometheus")
    assert fires.firing == ({"alertname": "Slow", "service": "chat"},)
    for health in ("err", "unknown"):
        sick = await asked(json.dumps(rules(health=health)), "prometheus")
        assert sick.rules == frozenset()


async def test_a_rule_whose_evaluation_stands_still_says_nothing() -> None:
    page = rules()
    rule = page["data"]["groups"][0]["rules"][0]
    for age_s, known in ((100, {"Slow"}), (190, set())):
        at = datetime.fromtimestamp(wall_seconds() - age_s, UTC)
        rule["lastEvaluation"] = f"{at:%Y-%m-%dT%H:%M:%S}.123456789Z"
        reading = await asked(json.dumps(page), "prometheus")
        assert (reading.fault, reading.rules) == ("", known)


async def test_a_storm_of_alerts_leaves_the_beat_one_of_each_that_is_asked_for() -> None:
    storm = [{"labels": {"x": str(number)}, "state": "firing"} for number in range(9000)]
    reading = await asked(json.dumps(rules(*storm)), "prometheus")
    assert reading.firing == ({"x": "0", "alertname": "Slow"},)


async def test_alertmanager_says_what_is_active() -> None:
    raised = [
        {"labels": {"alertname": "Slow"}, "status": {"state": "active", "silencedBy": []}},
        {"labels": {"alertname": "Fast"}, "status": {"state": "suppressed"}},
    ]
    reading = await asked(json.dumps(raised), "alertmanager")
    assert (reading.fault, reading.firing, reading.rules) == ("", ({"alertname": "Slow"},), None)
    assert (await asked('{"data": []}', "alertmanager")).fault


async def test_dcgm_exporter_s_page_is_read_by_gpu() -> None:
    import math

    reading = await asked(PAGE, "dcgm")
    assert reading.fault == ""
    one, two = reading.accelerators
    assert (one.uuid, one.power_watts, one.temperature_celsius, one.xid) == (
        *("GPU-1", 301.5, 41.0),
        79.0,
    )
    assert two.uuid == "GPU-2"
    assert math.isnan(two.power_watts)
    assert two.temperature_celsius is None
    assert (await asked("", "dcgm")).accelerators == ()
    assert (await asked('DCGM_FI_DEV_GPU_TEMP{UUID="GPU-1"} warm\n', "dcgm")).fault
    assert (await asked(PAGE, "dcgm", 503)).fault
    assert (await asked(PAGE * 2000, "dcgm")).fault


async def test_a_driver_that_hangs_leaves_an_old_reading_and_no_second_call() -> None:
    hanging, calls = threading.Event(), []
    loop, second = asyncio.get_running_loop(), asyncio.Event()

    def read() -> tuple[()]:
        calls.append(1)
        if len(calls) > 1:
            loop.call_soon_threadsafe(second.set)
            hanging.wait(10.0)
        return ()

    clock = VirtualClock(now_s=1.0)
    probe = nvml_probe(read, period_s=0.001, clock=clock)
    running = asyncio.create_task(probe.run())
    try:
        async with asyncio.timeout(30):
            await second.wait()
        clock.advance_to(100.0)
        await asyncio.sleep(0.05)
        assert (probe.reading.taken_at_s, len(calls)) == (1.0, 2)
    finally:
        running.cancel()
        hanging.set()


def node_with(root: Path, interlocks: dict[str, Any], **policy: Any) -> tuple[NodeAgent, Any]:
    pages = PageDirectory.create(root / "pages" / "slot0")
    stamp_ns = monotonic_ns()
    pages.pulse_writer("prod", 0).write(Pulse(model_samples=1000), now_ns=stamp_ns, ttl_ns=10**11)
    guest = pages.guest_page()
    guest.make()
    guest.write(Guest(running=1), now_ns=stamp_ns, ttl_ns=10**11)
    slot = {"name": "slot0", "policy": {"proof": {"share_ratio": 0.0}, **policy}}
    config = AgentConfig.model_validate(
        {
            "mode": "harvest",
            "page_root": root / "pages",
            "state_dir": root / "state",
            "slots": [slot],
            "interlocks": interlocks,
        }
    )
    clock = VirtualClock(now_s=100.0)
    return NodeAgent(config, clock=clock, version="1"), guest


def beats(node: NodeAgent, seconds: float = 0.5) -> None:
    for _ in range(round(seconds * 10)):
        node.clock.advance_to(node.clock.now() + 0.1)  # type: ignore[attr-defined]
        node.beat()


def take(node: NodeAgent, name: str) -> LeaseGranted | LeaseRefused:
    return node.take(
        LeaseRequest(
            request_id=name,
            slot=SlotId("slot0"),
            tenant=TenantId("t"),
            job=JobId("j"),
            duration_s=10.0,
        )
    )


async def test_no_lease_while_a_chosen_alert_fires_or_the_server_is_away(tmp_path: Path) -> None:
    body = [json.dumps(rules())]

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body[0].encode(), status=200 if body[0] else 500)

    app = web.Application()
    app.router.add_get("/api/v1/rules", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    alerts = {"url": url, "alerts": [{"name": "Slow", "labels": {"service": "chat"}}]}
    node, _ = node_with(tmp_path, {"alerts": alerts})
    try:
        beats(node)
        refused = take(node, "r1")
        assert isinstance(refused, LeaseRefused)
        assert "not asked yet" in refused.reason
        async with aiohttp.ClientSession() as session:
            probe = node.interlocks._alerts_probe
            assert probe is not None

            async def asked_now() -> None:
                await probe.ask(session)
                beats(node)

            await asked_now()
            taken = take(node, "r2")
            assert isinstance(taken, LeaseGranted)
            node.leases.release(taken.lease, now=node.clock.now())
            body[0] = json.dumps(rules(FIRING))
            await asked_now()
            refused = take(node, "r3")
            assert isinstance(refused, LeaseRefused)
            assert "hold (interlock) by alerts" in refused.reason
            assert "alert Slow fires" in refused.reason
            body[0] = json.dumps(rules())
            await asked_now()
            assert isinstance(take(node, "early"), LeaseRefused)
            beats(node, 61.0)
            await asked_now()
            taken = take(node, "r4")
            assert isinstance(taken, LeaseGranted)
            node.leases.release(taken.lease, now=node.clock.now())
            body[0] = ""
            await asked_now()
            assert isinstance(take(node, "r5"), LeaseRefused)
    finally:
        node.close()
        await runner.cleanup()


def test_each_fault_of_a_source_is_logged_once_and_its_end_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "http://127.0.0.1:1"
    node, _ = node_with(tmp_path, {"alerts": {"url": url, "alerts": ["Slow"]}})
    probe = node.interlocks._alerts_probe
    assert probe is not None

    def logged(**reading: Any) -> list[str]:
        """Lines of three beats with this reading, or with the last one."""
        caplog.clear()
        if reading:
            probe.reading = AlertsReading(**reading, taken_at_s=node.clock.now())
        beats(node, 0.3)
        return [line for line in caplog.messages if line.startswith("interlock:")]

    try:
        assert logged() == [], "it is not asked yet"
        assert logged(fault=f"{url}: HTTP 500") == [f"interlock: alerts: {url}: HTTP 500"]
        assert logged(fault=f"{url}: HTTP 500") == []
        (lacks,) = logged(rules=frozenset())
        assert "alert Slow has no rule that is evaluated" in lacks
        assert logged(rules=frozenset({"Slow"})) == ["interlock: alerts: answers again"]
        beats(node, 21.0)
        assert caplog.messages.count("interlock: alerts: no reading in time") == 1
        flapping = [line for code in range(200) for line in logged(fault=f"HTTP {code}")]
        assert 10 < len(flapping) < 80
    finally:
        node.close()


def test_a_source_that_hangs_from_the_start_on_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alerts = {"url": "http://127.0.0.1:1", "alerts": ["Slow"]}
    node, _ = node_with(tmp_path, {"alerts": alerts})
    try:
        beats(node, 22.0)
        assert caplog.messages.count("interlock: alerts: no reading in time") == 1
    finally:
        node.close()


async def test_too_many_evictions_hold_the_slot_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node, guest = node_with(tmp_path, {}, evictions_per_hour_max=5)
    try:
        beats(node)
        guest.write(Guest(running=1, aborted_total=6), now_ns=monotonic_ns(), ttl_ns=10**11)
        beats(node)
        refused = take(node, "r1")
        assert isinstance(refused, LeaseRefused)
        assert "more than 5 evictions in the last hour" in refused.reason
        lines = [line for line in caplog.messages if "evictions in the last hour" in line]
        assert len(lines) == 1
        (offer,) = [slot.offer() for slot in node.slots]
        assert offer.stop is not None
        assert offer.stop.source == "interlock"
        node.clock.advance_to(node.clock.now() + 3601.0)  # type: ignore[attr-defined]
        beats(node)
        assert isinstance(take(node, "r2"), LeaseGranted)
    finally:
        node.close()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("alerts: {url: 'ftp://h', alerts: [A]}", "http://HOST:PORT"),
        ("alerts: {url: 'http://h:9090', alerts: []}", "alerts"),
        ("alerts: {url: 'http://h:9090', alerts: [A], order: none}", "use hold or drain"),
        ("alerts: {url: 'http://h:9090', alerts: [A], token_file: /t}", "plain HTTP"),
        ("alerts: {url: 'http://me:secret@h:9090', alerts: [A]}", "no user or password"),
        ("accelerators: {source: dcgm-exporter, url: 'http://me@h:1/m'}", "no user or password"),
        ("alerts: {url: 'http://h:9093', server: alertmanager, alerts: [A]}", "watchdog"),
        ("accelerators: {source: dcgm-exporter}", "url"),
        ("accelerators: {source: nvidia-smi}", "source"),
        ("accelerators: {source: none, url: 'http://h:1/m'}", "url"),
    ],
)
def test_a_configuration_that_cannot_be_asked_is_refused_with_its_line(
    tmp_path: Path, text: str, fault: str
) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(f"slots: [{{name: s}}]\ninterlocks:\n  {text}\n")
    with pytest.raises(ConfigError, match=rf"line 3.*{fault}|{fault}.*line 3"):
        load_agent_config(path)
