import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from rich.console import Console

from deploy.check_expressions import DEPLOY
from harvester.agent.guest_lock import GuestLock
from harvester.agent.state_lock import lock_state
from harvester.cli import main
from harvester.cli.agent_tables import agent_tables
from harvester.cli.root import COMMANDS, EXIT_NOT_YET, EXIT_SETTINGS, LazyCommand, load
from harvester.cli.status import _summary
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import Exhausted, Unsupported
from harvester.contracts.ids import Epoch, NodeId, SlotId
from harvester.contracts.page import (
    Calibration,
    Grant,
    GrantMode,
    Guest,
    GuestMemory,
    Lending,
    PageDirectory,
    Pulse,
    Reading,
)
from harvester.contracts.process import ProcessId, process_ids
from harvester.contracts.wire.leases import IdleForecast, SlotOffer, SlotOffers, SlotState
from tests.certificates import token_file

HOUR_NS = 3_600_000_000_000
HEAVY = ("aiohttp", "numba", "numpy", "prometheus_client", "torch", "vllm", "yaml")


def exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    code = left.value.code
    return code if isinstance(code, int) else 0


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_the_list_of_commands_and_a_command_s_own_help_say_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, command in COMMANDS.items():
        own = load(name, command).help
        assert own.partition("\n\n")[0].replace("\n", " ") == command.summary, name


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom harvester.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr.strip() == "[]"


def test_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"rosemux {version('rosemux')}\n"


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["dmeo"]) == 2
    assert "dmeo" in capsys.readouterr().err


def test_the_demo_is_the_checkouts_whatever_else_is_called_examples(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/__init__.py").touch()
    load_demo = "from harvester.cli.root import *; load('demo', COMMANDS['demo'])"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {load_demo}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)


def test_a_command_of_the_checkout_says_where_it_runs_when_there_is_none() -> None:
    gone = LazyCommand(target="examples.gone.command:gone", summary="", in_checkout=True)
    with pytest.raises(Unsupported, match="from a checkout of the repository"):
        load("gone", gone)


def test_a_users_error_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["agent", "--config", str(tmp_path / "absent.yaml")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("rosemux: cannot read configuration")
    assert len(shown.splitlines()) == 1


def test_the_check_says_which_variable_overrides_the_file_and_what_is_odd(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSEMUX_AGENT_JOURNAL_MAX_BYTES", "67108864")
    path = tmp_path / "agent.yaml"
    path.write_text(
        "journal_max_bytes: 536870912\nslots: [{name: slot0, policy: {ttft_slo_s: 250}}]\n"
    )
    assert exit_code(["agent", "--config", str(path), "--check-config"]) == 0
    shown = capsys.readouterr().out
    assert "ROSEMUX_AGENT_JOURNAL_MAX_BYTES gives 67108864 over 536870912" in shown
    assert "were 250 ms meant" in shown


def test_the_check_reads_the_slots_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, slots = tmp_path / "agent.yaml", tmp_path / "slots.yaml"
    path.write_text(f"slots_file: {slots}\n")
    arguments = ["agent", "--config", str(path), "--check-config"]
    assert exit_code(arguments) == 0
    shown = capsys.readouterr().out
    assert "slots none yet" in shown
    assert f"note: no slots file at {slots} yet" in shown
    slots.write_text("slots: [{name: found}]\n")
    assert exit_code(arguments) == 0
    assert "slots found" in capsys.readouterr().out
    slots.write_text("slots: [{name: found, models: m}]\n")
    assert exit_code(arguments) == 2
    assert "slots.yaml line 1: slots.0.models" in capsys.readouterr().err


def test_the_check_says_that_a_memory_group_has_no_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group, path = tmp_path / "serving.slice", tmp_path / "agent.yaml"
    group.mkdir()
    for name, text in (("current", "700"), ("max", "max"), ("high", "max"), ("stat", "")):
        (group / f"memory.{name}").write_text(text)
    path.write_text(f"slots: [{{name: slot0, memory_group: {group}}}]\n")
    arguments = ["agent", "--config", str(path), "--check-config"]
    assert exit_code(arguments) == 0
    assert f"note: memory_group {group} never counts as full" in capsys.readouterr().out
    (group / "memory.high").write_text("1000")
    assert exit_code(arguments) == 0
    assert "note" not in capsys.readouterr().out


def test_checks_a_configuration_without_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("slots: [{name: slot0}]\n")
    arguments = ["agent", "--config", str(path), "--check-config"]
    assert exit_code([*arguments, "--mode", "harvest"]) == 0
    assert "mode harvest, slots slot0" in capsys.readouterr().out
    assert exit_code([*arguments, "--set", "lease_ttl_s=-1"]) == 2
    assert "lease_ttl_s" in capsys.readouterr().err
    assert (
        exit_code([*arguments, "--set", "unsafe_experiments=true", "--set", "lease_ttl_s=999"]) == 0
    )
    shown = capsys.readouterr().out
    assert "note: unsafe_experiments: lease_ttl_s: 999 is not 1 to 300 s" in shown
    assert exit_code([*arguments, "--set", "lease_ttl_s=[1"]) == 2
    assert "--set lease_ttl_s=[1" in capsys.readouterr().err


def test_status_says_how_well_predictions_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    pages = PageDirectory.create(tmp_path)
    grants, pulses = pages.grant_writer(), pages.pulse_writer("production", 0)
    guests, now_ns = pages.guest_writer(), monotonic_ns()
    grants.write(Grant(epoch=1, mode=GrantMode.OPEN), now_ns=now_ns, ttl_ns=HOUR_NS)
    compared = Calibration(steps=512, over_ratio=0.12)
    pulses.write(Pulse(decode_calibration=compared), now_ns=now_ns, ttl_ns=HOUR_NS)
    guest = Guest(step_over_ratio=0.09, kv_tokens_retained=4096)
    guests.write(guest, now_ns=now_ns, ttl_ns=HOUR_NS)
    assert exit_code(["status", "--pages", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "longer than predicted: none of 0 prefills and 12% of 512 decodes" in shown
    assert "4096 retained, 9% of steps longer than predicted" in shown
    assert f"{guest.gate}, epoch 0" in shown


@pytest.mark.parametrize("reason", ["\x1b]0;owned\x07\x1b[2J all good", "[/x] all good"])
def test_status_shows_a_guest_s_words_as_text(
    reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages, now_ns = PageDirectory.create(tmp_path), monotonic_ns()
    grant = Grant(epoch=1, mode=GrantMode.CLOSED)
    pages.grant_writer().write(grant, now_ns=now_ns, ttl_ns=HOUR_NS)
    pages.guest_writer().write(Guest(reason=reason), now_ns=now_ns, ttl_ns=HOUR_NS)
    assert exit_code(["status", "--pages", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "all good" in shown
    assert "\x1b]0" not in shown
    assert "\x1b[2J" not in shown
    assert ("[/x]" in shown) == (reason[0] == "[")


def test_status_shows_a_closed_guest_s_memory_and_its_shared_fate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gib = 1 << 30
    memory = GuestMemory(weights_bytes=3 * gib, graphs_bytes=gib // 2, kv_bytes=8 * gib)
    says = _summary(Reading(Guest(isolation="mps", memory=memory), None, 0))
    assert "isolation mps (shared fate: a fault of the guest ends production)" in says
    assert "holds at least 3.50 GiB while closed (weights 3.00 GiB, graphs 0.50 GiB" in says
    assert says.endswith("and 8.00 GiB of KV")
    whole = msgspec.structs.replace(memory, other_bytes=gib, whole=True)
    says = _summary(Reading(Guest(isolation="time-slicing", memory=whole), None, 0))
    assert "takes turns with production on the GPU" in says
    assert "holds 4.50 GiB while closed" in says
    assert "isolation" not in _summary(Reading(Guest(), None, 0))
    away = GuestMemory(other_bytes=gib, whole=True, asleep_bytes_max=2 * gib)
    says = _summary(Reading(Guest(weights_away=True, memory=away), None, 0))
    assert says.endswith("; asleep, weights in host memory, where at most 2.00 GiB may stay")


def test_status_says_why_an_isolation_does_not_hold() -> None:
    fallen = Guest(isolation="idle-group", isolation_fault="production moved")
    says = _summary(Reading(fallen, None, 0))
    assert "isolation idle-group DOES NOT HOLD, its steps count whole: production moved" in says


def _offer(**facts: Any) -> SlotOffer:
    return SlotOffer(
        slot=SlotId("slot0"),
        node=NodeId("n"),
        state=SlotState.OFFERED,
        engine_url="",
        model="m",
        epoch=Epoch(1),
        concurrency=1,
        kv_tokens=0,
        idle_ratio=None,
        **facts,
    )


def test_status_shows_the_forecast_of_each_slot(capsys: pytest.CaptureFixture[str]) -> None:
    forecast = IdleForecast(horizon_s=30.0, low_ratio=0.25, median_ratio=0.5, high_ratio=0.75)
    offer = _offer(forecasts=(forecast,))
    Console(width=200).print(*agent_tables(SlotOffers(node=NodeId("n"), slots=(offer,))))
    rows = capsys.readouterr().out.splitlines()
    assert any(row.split() == ["slot0", "30", "s", "25%", "50%", "75%"] for row in rows)


@pytest.mark.parametrize(
    ("slot_state", "unready", "faults", "code"),
    [
        ("closed", "", {}, 0),
        ("off", "", {}, 1),
        ("closed", "", {"config_refused": "line 3: no such field"}, 1),
        ("closed", "", {"audit_fault": "No space left on device"}, 1),
        ("cooldown", "pulse.production.0 is expired", {}, 1),
    ],
)
def test_a_checked_status_fails_where_something_needs_a_look(
    monkeypatch: pytest.MonkeyPatch,
    slot_state: str,
    unready: str,
    faults: dict[str, str],
    code: int,
) -> None:
    offer = _offer(reason="quarantined", mode="harvest", slot_state=slot_state, unready=unready)
    offers = SlotOffers(node=NodeId("n"), slots=(offer,), **faults)
    monkeypatch.setattr("harvester.cli.status.call", lambda *_given, **_named: offers)
    asked = ["status", "--pages", "/nonexistent", "--agent", "http://127.0.0.1:1"]
    assert exit_code(asked) == 0
    assert exit_code([*asked, "--check"]) == code


def test_a_check_of_pages_alone_is_no_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = PageDirectory.create(tmp_path)
    pages.grant_writer().write(
        Grant(epoch=1, mode=GrantMode.CLOSED), now_ns=monotonic_ns(), ttl_ns=HOUR_NS
    )
    assert exit_code(["status", "--pages", str(tmp_path), "--check"]) == EXIT_SETTINGS
    assert "give --agent or --gateway" in capsys.readouterr().err


def test_status_says_what_is_seen_of_a_silent_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    pages = PageDirectory.create(tmp_path)
    pages.grant_writer().write(
        Grant(epoch=1, mode=GrantMode.CLOSED), now_ns=monotonic_ns(), ttl_ns=HOUR_NS
    )
    guests, written_ns = pages.guest_writer(), monotonic_ns() - 75 * 10**9

    def shown(processes: tuple[ProcessId, ...] = ()) -> str:
        if processes:
            guests.write(Guest(processes=processes), now_ns=written_ns, ttl_ns=1)
        assert exit_code(["status", "--pages", str(tmp_path)]) == 0
        row = next(row for row in capsys.readouterr().out.splitlines() if " guest " in row)
        return " ".join(row.split())

    (own,) = process_ids([os.getpid()])
    lives = f"75 s expired; process {own.pid} lives: it gets no core, or hangs"
    assert shown((own,)).endswith(lives)
    ended = ProcessId(pid=own.pid, start_ticks=own.start_ticks - 1)
    assert shown((ended,)).endswith("75 s expired; no process of it is seen here")
    guests.close(unlink=True)
    assert shown().endswith("missing")
    lock = GuestLock(pages)
    lock.take()
    assert shown().endswith(f"missing; process {own.pid} starts a guest, or gets no core")
    lock.close()


def test_status_says_where_it_looked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["status", "--pages", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err.replace("\n", "")


def test_status_names_an_agent_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["status", "--pages", "/nonexistent", "--agent", "ftp://x"]) == 2
    assert "http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("status", "--pages", "/x"), ("hold", "--reason", "r")])
def test_a_server_s_refusal_is_one_line_and_commands_no_terminal(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"error": "\\u001b[2Jno\\nrosemux: all is well"}')

        do_POST = do_GET  # noqa: N815 - named by the base class

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert exit_code([*command, "--agent", url]) == 1
        server.shutdown()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("HTTP 404:  [2Jno rosemux: all is well")


def test_a_token_goes_to_the_named_server_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        token = str(token_file(tmp_path, "token", "t" * 20))
        arguments = ["--pages", str(tmp_path), "--agent", url, "--token-file", token]
        assert exit_code(["status", *arguments]) != 0
        server.shutdown()
    assert asked == ["/v1/slots"]
    assert "HTTP 302" in capsys.readouterr().err


def test_a_configuration_that_this_machine_cannot_run_is_not_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, token = tmp_path / "agent.yaml", token_file(tmp_path, "token", "s" * 32)
    for lacking, said in (
        ("owners: {production: [no-such-user]}\npage_group: 5\n", "no-such-user"),
        ("http: {token_file: /nowhere/token}\n", "/nowhere/token"),
        (f"http: {{token_file: {token}, observer_token_file: /nowhere/o}}\n", "/nowhere/o"),
    ):
        path.write_text(lacking + "slots: [{name: slot0}]\n")
        assert exit_code(["agent", "--config", str(path), "--check-config"]) == EXIT_NOT_YET
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("http", "status"),
    [
        ("{host: 203.0.113.7, token_file: %, plain_http: true}", EXIT_NOT_YET),
        ("{port: 0, token_file: %-late}", EXIT_NOT_YET),
        ("{host: not-an-address, token_file: %, plain_http: true}", EXIT_SETTINGS),
    ],
)
def test_a_supervisor_tries_again_what_a_machine_that_starts_may_lack(
    tmp_path: Path, http: str, status: int
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("s" * 32)
    path = tmp_path / "agent.yaml"
    folders = f"page_root: {tmp_path / 'pages'}\nstate_dir: {tmp_path / 'state'}\n"
    path.write_text(f"{folders}http: {http.replace('%', str(token))}\nslots: [{{name: slot0}}]\n")
    assert exit_code(["agent", "--config", str(path)]) == status
    for unit in (DEPLOY / "systemd").glob("*.service"):
        held = re.findall(r"(?m)^RestartPreventExitStatus=(.*)$", unit.read_text())
        assert held == [str(EXIT_SETTINGS)]


@pytest.mark.parametrize("held", ["state", "pages"])
def test_a_supervisor_tries_again_while_the_agent_before_has_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], held: str
) -> None:
    file = tmp_path / "agent.yaml"
    folders = f"page_root: {tmp_path / 'pages'}\nstate_dir: {tmp_path / 'state'}\n"
    file.write_text(f"{folders}http: {{port: 0}}\nslots: [{{name: slot0}}]\n")
    if held == "state":
        with closing(lock_state(tmp_path / "state")):
            assert exit_code(["agent", "--config", str(file)]) == EXIT_NOT_YET
    else:
        with closing(PageDirectory.create(tmp_path / "pages" / "slot0").grant_writer()):
            assert exit_code(["agent", "--config", str(file)]) == EXIT_NOT_YET
    assert f"process {os.getpid()}" in capsys.readouterr().err


@pytest.fixture
def hidden(tmp_path: Path) -> Iterator[Path]:
    """A slot's pages in a directory into which this user may not look."""
    pages = tmp_path / "pages"
    PageDirectory.create(pages / "slot0").grant_writer().write(
        Grant(epoch=1, mode=GrantMode.CLOSED), now_ns=monotonic_ns(), ttl_ns=HOUR_NS
    )
    with socket.socket() as closed:  # Its imports are done before the user changes.
        closed.bind(("127.0.0.1", 0))
        asked = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert exit_code(["status", "--pages", str(pages), "--agent", asked]) == 1
    for command in COMMANDS.values():
        if command.reads_files:
            load("", command)
    (pages / "slot0").chmod(0)
    tmp_path.chmod(0o755)
    others = os.geteuid() == 0
    if others:
        for above in tmp_path.parents[:3]:
            above.chmod(above.stat().st_mode | 0o011)
        os.seteuid(65534)
    yield pages
    if others:
        os.seteuid(0)
    (pages / "slot0").chmod(0o755)


def test_a_file_that_its_reader_may_not_see_is_named_and_not_taken_for_absent(
    hidden: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    within = hidden / "slot0"
    for words in (
        ["status", "--pages", str(hidden)],
        ["audit", str(within / "audit.jsonl")],
        ["replay", str(within / "slot0.journal")],
    ):
        assert exit_code(words) == EXIT_SETTINGS
        shown = capsys.readouterr().err
        assert shown.startswith(f"rosemux: cannot read {within}/"), words
        assert "Permission denied; run it as root or as the agent's user" in shown


def test_a_status_has_one_figure_of_what_a_slot_can_lend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = PageDirectory.create(tmp_path / "a")
    grant, guest = Grant(epoch=1, mode=GrantMode.OPEN), Guest(lending=Lending(tokens=6))
    pages.grant_writer().write(grant, now_ns=monotonic_ns(), ttl_ns=HOUR_NS)
    pages.guest_writer().write(guest, now_ns=monotonic_ns(), ttl_ns=HOUR_NS)
    asked = ["status", "--pages", str(tmp_path), "--agent", "http://127.0.0.1:1"]
    slot = msgspec.structs.replace(_offer(), slot=SlotId("a"), lending=Lending(tokens=7))
    offers = SlotOffers(node=NodeId("n"), slots=(slot,))
    monkeypatch.setattr("harvester.cli.status.call", lambda *_given, **_named: offers)
    assert exit_code(asked) == 0
    shown = capsys.readouterr().out
    assert "steps of at most 7 tokens" in shown
    assert "steps of at most 6 tokens" not in shown

    def silent(*_given: object, **_named: object) -> None:
        raise Exhausted("no answer")

    monkeypatch.setattr("harvester.cli.status.call", silent)
    assert exit_code(asked) == 1
    assert "can be lent steps of at most 6 tokens" in capsys.readouterr().out


def test_an_agent_s_status_needs_no_right_to_its_pages(
    hidden: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offers = SlotOffers(node=NodeId("n"), slots=(_offer(),))
    monkeypatch.setattr("harvester.cli.status.call", lambda *_given, **_named: offers)
    assert exit_code(["status", "--pages", str(hidden), "--agent", "http://127.0.0.1:1"]) == 0
    shown = capsys.readouterr().out
    assert "Pages are not shown" in shown
    assert "Node n" in shown
