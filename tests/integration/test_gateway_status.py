"""`rosemux status --gateway`: one gateway as people see it, and the fields that it reads."""

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.cli import main
from harvester.cli.gateway_tables import GatewayReport
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import gateway_on

PAGE = Path(__file__).parents[2] / "docs/protocol.md"


async def printed(url: str, pages: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        await asyncio.to_thread(main, ["status", "--pages", str(pages), "--gateway", url])
    shown = capsys.readouterr()
    assert left.value.code == 0, shown.err
    return " ".join(re.sub("[│┃]", " ", shown.out).split())


async def test_the_command_shows_engines_jobs_and_turns_of_a_gateway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    jobs = [{"id": "job", "active": True}, {"id": "other", "harvesting": False}]
    engine = FakeEngine(step_s=0.001, epoch=None)
    async with gateway_on(engine, "http://127.0.0.1:9", jobs=jobs) as gateway:
        fleet = gateway.scheduler.fleet
        await gateway.until(lambda: fleet.policy.state("e0") and fleet.members["e1"].fault)
        await gateway.until(lambda: fleet.policy.settled)
        await gateway.post("/v1/jobs/other/versions", {"version": 4, "store": "shop"})
        shown = await printed(gateway.url, tmp_path, capsys)
    assert f"e0 dedicated serving 0 0 of 8 {gateway.sites[0].url}" in shown
    assert "e1 dedicated down 0 of 8 http://127.0.0.1:9 /health: " in shown
    assert "job active 0 dedicated engines, leases" in shown
    assert "other not active 4 shop dedicated engines" in shown
    assert "Job job is active at version 0, served by all dedicated engines that are up" in shown
    assert "Turns: 0 on engines, 0 wait for a place, 0 for a version" in shown


async def test_a_job_without_an_engine_is_not_called_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    async with gateway_on("http://127.0.0.1:9") as gateway:
        shown = await printed(gateway.url, tmp_path, capsys)
    assert "Job job is active at version 0, no dedicated engine is up" in shown


def test_leases_slots_and_what_is_wrong_are_lines_of_their_own() -> None:
    given: dict[str, Any] = {
        **dict.fromkeys(("active_job", "target_version")),
        "engines": {},
        "jobs": {},
        **dict.fromkeys(("open_turns", "queued_turns", "held_turns"), 0),
        "settled": True,
        "leases": [{"lease": "slot0.7", "agent": "a", "job": "job", "left_s": 4.2}],
        "slots": {"slot0": {"agent": "a", "state": "leased", "idle_ratio": 0.5}},
        "stops": [{"order": "hold", "source": "cluster", "tenant": "lab", "reason": "leak"}],
        "silent_agents": {"b": "no answer"},
        "unrecorded": ["leases"],
    }
    report = msgspec.convert(given, GatewayReport)
    cells = {
        str(table.title): [" ".join(map(str, column.cells)) for column in table.columns]
        for table in report.tables()
    }
    assert cells["Leases"] == ["slot0.7", "a", "job", "4 s"]
    assert cells["Slots"] == ["slot0", "a", "leased", "50%"]
    assert [line.split(":")[0] for line in report.lines()] == [
        "No job is active",
        "Turns",
        "Stopped, lab",
        "Agent b is not used",
        "Not recorded, see the gateway's log",
    ]


async def test_the_page_names_every_field_of_the_status() -> None:
    async with gateway_on(FakeEngine(step_s=0.001, epoch=None)) as gateway:
        status = await gateway.status()
    inner = {"engines": status["engines"]["e0"], "jobs": status["jobs"]["job"]}
    names = [*status, *(f"{outer}.*.{name}" for outer, of in inner.items() for name in of)]
    section = PAGE.read_text().partition("### The status\n")[2].partition("\n##")[0]
    listed = re.findall(r"(?m)^\| `([^`]+)` \|", section)
    assert [name for name in listed if not re.match(r"(leases|slots|services)\..*", name)] == names
