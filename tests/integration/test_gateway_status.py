"""`rosemux status --gateway`: one gateway as people see it, and the fields that it reads."""

import asyncio
import re
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from harvester.cli import main
from harvester.cli.gateway_tables import GatewayReport
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import gateway_on

PAGE = Path(__file__).parents[2] / "docs/protocol/gateway-api.md"


async def printed(url: str, pages: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        await asyncio.to_thread(main, ["status", "--pages", str(pages), "--gateway", url])
    shown = capsys.readouterr()
    assert left.value.code == 0, shown.err
    return " ".join(shown.out.split())


async def test_the_command_shows_engines_jobs_and_turns_of_a_gateway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [{"id": "job", "active": True}, {"id": "other", "harvesting": False}]
    engine = FakeEngine(step_s=0.001, epoch=None)
    agents = [{"id": "node", "url": "http://127.0.0.1:9"}]
    async with gateway_on(engine, "http://127.0.0.1:9", jobs=jobs, agents=agents) as gateway:
        await gateway.until(lambda: gateway.scheduler.offers.silent_agents)
        fleet = gateway.scheduler.fleet
        await gateway.until(lambda: fleet.policy.state("e0") and fleet.members["e1"].fault)
        await gateway.until(lambda: fleet.policy.settled)
        await gateway.post("/v1/jobs/other/versions", {"version": 4, "store": "shop"})
        shown = await printed(gateway.url, tmp_path, capsys)
    assert f"e0 dedicated serving 0 0 of 8 {gateway.sites[0].url}" in shown
    assert "e1 dedicated down 0 of 8 http://127.0.0.1:9 " in shown
    assert "Engine e1: /health: " in shown
    assert "job active 0 dedicated, leases" in shown
    assert "other not active 4 shop dedicated" in shown
    assert "Job job is active at version 0, served by all dedicated engines that are up" in shown
    assert "Turns: 0 on engines, 0 wait for a place" in shown
    assert (
        "Agent node is not used: agent http://127.0.0.1:9 does not answer: GET /v1/slots" in shown
    )
    assert "Error(" not in shown, "the words of an error, not its Python"


async def test_an_engine_s_last_switch_is_timed() -> None:
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine) as gateway:
        await gateway.until(lambda: gateway.scheduler.fleet.policy.settled)
        assert (await gateway.status())["engines"]["e0"]["switch_s"] is None
        before_s = gateway.scheduler._clock.now()
        assert (await gateway.publish(1))[0] == 200
        took_s = (await gateway.status())["engines"]["e0"]["switch_s"]
        assert 0.0 < took_s <= gateway.scheduler._clock.now() - before_s


async def test_a_job_without_an_engine_is_not_called_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with gateway_on("http://127.0.0.1:9") as gateway:
        shown = await printed(gateway.url, tmp_path, capsys)
    assert "Job job is active at version 0, no dedicated engine is up" in shown


def report(scale: int = 1, **changes: Any) -> GatewayReport:
    """Two engines, an agent with two slots, and a job; `scale` lengthens their names."""
    node, job, slots = "node-a" * scale, "job-a" * scale, ["slot0" * scale, "slot1" * scale]
    engine = {"kind": "dedicated", "url": "http://127.0.0.1:8001", "concurrency": 32, "fault": ""}
    engine |= {"up": True, "state": "quiescing", "version": 12, "open_turns": 32}
    turns = {"started": 53210, "completed": 53001, "migrated": 12, "lost": 1}
    named = {"version": 12, "store": job, "tokens": {"dedicated": 123456, "guest": 2345}}
    given: dict[str, Any] = {
        "active_job": job,
        "target_version": 12,
        "settled": True,
        "placed_turns": 37,
        "queued_turns": 5,
        "deferred_turns": 2,
        "engines": {"dedicated-0" * scale: engine, "slot0-guest": {**engine, "kind": "guest"}},
        "jobs": {job: {**named, "may_lease": True, "paused": True, "may_use_dedicated": True}},
        "leases": [
            {"lease": f"{slots[0]}.7", "slot": slots[0], "agent": node, "job": job, "left_s": 4.2}
        ],
        "slots": {slot: {"agent": node, "state": "leased", "idle_ratio": 0.5} for slot in slots},
        "stops": [],
        "silent_agents": {},
        "unrecorded": [],
    }
    given["jobs"][job]["turns"] = turns
    return msgspec.convert(given | changes, GatewayReport)


@pytest.mark.parametrize("scale", [1, 9])
def test_a_terminal_of_80_columns_has_each_row_on_one_line(scale: int) -> None:
    rows = 0
    for table in report(scale).tables():
        console = Console(width=80)
        with console.capture() as shown:
            console.print(table)
        lines = shown.get().splitlines()
        assert len(lines) == 1 + table.row_count
        assert all(len(line.rstrip()) <= 80 for line in lines)
        assert ("…" in shown.get()) == (scale > 1)
        rows += table.row_count
    assert rows == 7
    assert all(len(line) <= 80 for line in report().summary())


def test_faults_stops_and_silent_agents_are_lines_of_their_own() -> None:
    stops = [{"order": "hold", "source": "cluster", "tenant": "lab", "reason": "leak"}]
    silent = {"b": "no answer"}
    found = report(active_job=None, stops=stops, silent_agents=silent, unrecorded=["leases"])
    assert [line.split(":")[0] for line in (*found.summary(), *found.faults())] == [
        "No job is active",
        "Turns",
        "Turns of job job-a",
        "Stopped, lab",
        "Agent b is not used",
        "Not recorded, see the gateway's log",
    ]


def test_slots_that_take_no_turns_have_their_reason_in_a_line() -> None:
    reasons = {"a": "no lease", "b": "", "c": "no lease", "d": "kill switch: hold"}
    given = {
        slot: {"agent": "n", "state": "off", "idle_ratio": None, "reason": reason}
        for slot, reason in reasons.items()
    }
    found = list(report(slots=given).reasons())
    assert found == ["Slots a, c: no lease", "Slot d: kill switch: hold"]


async def test_the_page_names_every_field_of_the_status() -> None:
    async with gateway_on(FakeEngine(step_s=0.001, epoch=None)) as gateway:
        status = await gateway.status()
    inner = {"engines": status["engines"]["e0"], "jobs": status["jobs"]["job"]}
    names = [*status, *(f"{outer}.*.{name}" for outer, of in inner.items() for name in of)]
    section = PAGE.read_text().partition("## The status\n")[2].partition("\n##")[0]
    listed = re.findall(r"(?m)^\| `([^`]+)` \|", section)
    assert [name for name in listed if not re.match(r"(leases|slots|services)\..*", name)] == names


async def test_a_gateway_is_ready_from_its_start_to_its_end_with_no_engine_too() -> None:
    agents = [{"id": "node", "url": "http://127.0.0.1:9"}]
    async with gateway_on(agents=agents) as gateway:
        assert (await gateway.get("/readyz"))[0] == 503
        gateway.service.open()
        for path in ("/readyz", "/jobs/job/readyz"):
            assert await gateway.get(path) == (200, {"status": "ok"})
        gateway.service.close()
        assert await gateway.get("/readyz") == (503, {"error": "shutting down"})


async def test_the_process_reports_to_systemd_once_it_takes_turns(
    gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "400000")
        process = gateway(agents=[{"id": "node", "url": "http://127.0.0.1:9"}])
        assert systemd.recv(256) == b"READY=1"
        assert await process.get("/readyz") == {"status": "ok"}
        assert [systemd.recv(256) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        process.kill(signal.SIGTERM)
        while (report := systemd.recv(256)) == b"WATCHDOG=1":
            pass
        assert report == b"STOPPING=1"
