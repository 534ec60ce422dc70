"""A recorded journal, replayed: identical, or the first difference named by its line."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from harvester.contracts.errors import Corrupt, Unsupported
from harvester.contracts.ids import Epoch, JobId, LeaseId, SlotId
from harvester.contracts.journal import JournalWriter, Opened, config_hash
from harvester.distribution import rosemux_version
from scheduler.decision_log import DecisionLog
from scheduler.gateway.policy.capacity import CapacityPolicy, CapacitySample, Demand, LeasableSlot
from scheduler.model import Lease
from scheduler.sim.replay import replay_journal
from scheduler.sim.simulate_commands import replay

CONFIG: dict[str, Any] = {"instance": "test", "duration_s": 9.0, "idle_release_s": 3.0}


def _record(directory: Path, *, max_bytes: int = 1 << 20) -> Path:
    """A job comes, leases, renews, falls idle and lets go; its slot refuses nothing."""
    policy = CapacityPolicy.from_config(CONFIG)
    log = DecisionLog(directory, policy, CONFIG, max_bytes=max_bytes, now=0.0)
    lease: Lease | None = None
    for tick in range(60):
        now = tick * 0.5
        turns = 20 if tick < 30 else 0
        demand = Demand(
            job=JobId("j"),
            active=True,
            harvesting=True,
            queued=turns,
            running=0,
            dedicated_places=4,
        )
        slot = LeasableSlot(slot=SlotId("s"), agent="a", free=lease is None)
        leases = (lease,) if lease else ()
        sample = CapacitySample(demands=(demand,), slots=(slot,), leases=leases)
        effects = policy.observe(sample, now=now)
        log.decided(now=now, sample=sample, effects=effects)
        for effect in effects:
            match effect.__struct_config__.tag:
                case "take_lease" | "renew_lease":
                    lease = Lease(
                        lease=LeaseId("l"),
                        slot=SlotId("s"),
                        agent="a",
                        job=JobId("j"),
                        epoch=Epoch(1),
                        expires_s=now + 9.0,
                    )
                case "release_lease":
                    lease = None
    log.close()
    return directory / "scheduler.policy.capacity.jsonl"


def _rewrite(path: Path, line: int, change: Any) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    body = msgspec.json.decode(lines[line - 1])
    change(body)
    lines[line - 1] = msgspec.json.encode(body) + b"\n"
    path.write_bytes(b"".join(lines))


def test_a_recorded_journal_replays_identically(tmp_path: Path) -> None:
    replayed = replay_journal(_record(tmp_path))
    assert replayed.difference is None
    assert replayed.decisions == 60
    assert replayed.effects >= 5


def test_a_changed_effect_is_named_by_its_line(tmp_path: Path) -> None:
    path = _record(tmp_path)
    decided = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    at = next(n for n, line in enumerate(decided, 1) if line.get("effects") and n > 3)
    _rewrite(path, at, lambda body: body["effects"][0].update(duration_s=99.0))
    difference = replay_journal(path).difference
    assert difference is not None
    assert difference.line == at
    assert difference.recorded[0]["duration_s"] == 99.0
    assert difference.replayed[0]["duration_s"] == 9.0


def test_each_file_of_a_rotated_journal_replays_by_itself(tmp_path: Path) -> None:
    path = _record(tmp_path, max_bytes=1 << 14)
    older = path.with_name(path.name + ".1")
    for file in (older, path):
        replayed = replay_journal(file)
        assert replayed.difference is None
        assert replayed.decisions > 0


def test_a_crash_while_writing_costs_only_the_torn_line(tmp_path: Path) -> None:
    path = _record(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    assert replay_journal(path).decisions == 59


@pytest.mark.parametrize(
    ("line", "change", "said"),
    [
        (
            1,
            lambda body: body["config"].update(duration_s=1.0),
            "line 1: the hash is not that of the configuration",
        ),
        (3, lambda body: body["sample"].update(leases=7), "line 3: sample"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line, change, said) -> None:
    path = _record(tmp_path)
    _rewrite(path, line, change)
    with pytest.raises(Corrupt, match=said):
        replay_journal(path)


def test_an_unknown_policy_is_unsupported(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j")
    writer.opened(Opened(actor="x", policy="os:system", config={}, config_hash=config_hash({})))
    writer.close()
    with pytest.raises(Unsupported, match="no policy"):
        replay_journal(tmp_path / "j")


def test_the_command_says_identical_or_shows_both_sides_and_fails(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(replay)
    path = _record(tmp_path)
    result = CliRunner().invoke(app, [str(path)])
    assert (result.exit_code, result.output.startswith("identical: 60")) == (0, True)
    _rewrite(path, 2, lambda body: body.update(effects=[]))
    result = CliRunner().invoke(app, [str(path)])
    assert result.exit_code == 1
    assert "line 2" in result.output
    assert "the journal is of" not in result.output
    for version, said in (("0.0.9", "the journal is of 0.0.9"), ("", "of an earlier version")):
        _rewrite(path, 1, lambda body, version=version: body.update(version=version))
        result = CliRunner().invoke(app, [str(path)])
        assert said in result.output
        assert f"this is {rosemux_version()}" in result.output


@pytest.mark.parametrize("size_bytes", [0, 30])
def test_a_journal_without_a_whole_line_is_no_identical_one(
    tmp_path: Path, size_bytes: int
) -> None:
    path = tmp_path / "slot0.journal"
    path.write_bytes(b'{"type":"opened","actor":"agent:slot0"'[:size_bytes])
    app = typer.Typer()
    app.command()(replay)
    result = CliRunner().invoke(app, [str(path)])
    assert "identical" not in result.output
    assert isinstance(result.exception, Corrupt)
