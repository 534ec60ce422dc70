"""`rosemux audit` over the files of an agent."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.cli import audit_command, main
from harvester.contracts.audit import SCHEMA, AuditEvent

YEAR = "2026-01-01T00:00:00.000+00:00"


def event(kind: str, **fields: Any) -> bytes:
    given = {"schema": SCHEMA, "time": YEAR, "t_s": 1.0, "node": "n", "event": kind, **fields}
    return msgspec.json.encode(AuditEvent(**given)) + b"\n"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with an older file and the current one."""
    state = tmp_path / "state"
    state.mkdir()
    ended = event("lease_ended", slot="s0", tenant="t", job="j", reason="released", who="agent")
    (state / "audit.000001.jsonl").write_bytes(ended)
    lines = event("lease_granted", slot="s1", tenant="u", job="k", time="2099-01-01T00:00:00+00:00")
    lines += event("slot_state", slot="s1", from_state="open", to_state="off", omitted=4)
    (state / "audit.jsonl").write_bytes(lines)
    (tmp_path / "agent.yaml").write_text(f"state_dir: {state}\nslots: [{{name: s0}}, {{name: s1}}]")
    return state


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["audit", *arguments])
    code = left.value.code
    shown = capsys.readouterr()
    return code if isinstance(code, int) else 0, shown.out, shown.err


def kinds(out: str) -> list[str]:
    return [msgspec.json.decode(line)["event"] for line in out.splitlines()]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], ["lease_ended", "lease_granted", "slot_state"]),
        (["--tenant", "t"], ["lease_ended"]),
        (["--slot", "s1"], ["lease_granted", "slot_state"]),
        (["--since", "2h"], ["lease_granted"]),
        (["--since", "2026-06-01T00:00:00Z"], ["lease_granted"]),
    ],
)
def test_the_configuration_finds_all_files_and_options_choose_events(
    state: Path, capsys: pytest.CaptureFixture[str], options: list[str], shown: list[str]
) -> None:
    code, out, _ = ran(capsys, str(state.parent / "agent.yaml"), "--json", *options)
    assert (code, kinds(out)) == (0, shown)


def test_the_events_of_a_slot_have_those_of_the_node_beside_them(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = event("kill_switch", to_state="drain") + event("stop_placed", slot="s0")
    lines += event("stop_placed", tenant="t") + event("refusals_omitted", omitted=3)
    (state / "audit.jsonl").write_bytes(lines + event("slot_state", slot="s1"))
    _, out, _ = ran(capsys, str(state / "audit.jsonl"), "--json", "--slot", "s1")
    assert kinds(out) == ["kill_switch", "stop_placed", "slot_state"]


def test_a_file_stands_for_itself(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, str(state / "audit.000001.jsonl"), "--json")
    assert (code, kinds(out)) == (0, ["lease_ended"])


def test_the_table_says_each_event_on_one_line(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = ran(capsys, str(state.parent / "agent.yaml"))
    line = next(line for line in out.splitlines() if "slot_state" in line)
    assert "open -> off; 4 events are missing before it" in line
    assert len([line for line in out.splitlines() if line.strip()]) == 4


def test_no_text_of_an_event_commands_the_terminal(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (state / "audit.jsonl").write_bytes(event("quarantine_released", reason="\x1b[2J[red]x"))
    _, out, _ = ran(capsys, str(state / "audit.jsonl"))
    assert "[2J[red]x" in out
    assert "\x1b" not in out


def test_a_table_has_the_latest_events_and_says_how_many_are_before_them(
    state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_command, "ROWS_MAX", 2)
    _, out, err = ran(capsys, str(state.parent / "agent.yaml"))
    assert "lease_ended" not in out
    assert "lease_granted" in out
    assert "slot_state" in out
    assert "the latest 2 of 3 events: choose with --since" in err
    _, out, err = ran(capsys, str(state.parent / "agent.yaml"), "--json")
    assert len(kinds(out)) == 3
    assert err == ""


def test_a_torn_line_is_skipped_with_a_message(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = state / "audit.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    code, out, err = ran(capsys, str(path), "--json")
    assert (code, kinds(out)) == (0, ["lease_granted"])
    assert "audit.jsonl line 2 is skipped" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.jsonl"], "no file none.jsonl"),
        (["{state}/audit.jsonl", "--since", "soon"], "--since soon: write 30m"),
        (["{state}/audit.jsonl", "--since", "2026-01-01"], "--since 2026-01-01: write 30m"),
        (["{state}/audit.jsonl", "--since", "999999w"], "--since 999999w: write 30m"),
    ],
)
def test_mistakes_are_named(
    state: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, _, err = ran(capsys, *(argument.format(state=state) for argument in arguments))
    assert (code, says in err) == (2, True)
