"""`rosemux top` over agents that answer, and over those that do not."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from harvester.cli import main
from harvester.cli.top import AgentsView
from harvester.contracts.ids import Epoch, NodeId, SlotId
from harvester.contracts.page import Lending
from harvester.contracts.wire.leases import (
    GuardReading,
    IdleForecast,
    SlotOffer,
    SlotOffers,
    SlotState,
)
from harvester.platform.tls import Credentials
from tests.certificates import token_file
from tests.virtual_clock import VirtualClock


def offer(**fields: Any) -> SlotOffer:
    given: dict[str, Any] = {
        "slot": SlotId("slot0"),
        "node": NodeId("n1"),
        "state": SlotState.LEASED,
        "engine_url": "",
        "model": "m",
        "epoch": Epoch(1),
        "concurrency": 1,
        "kv_tokens": 0,
        "idle_ratio": None,
    }
    return SlotOffer(**{**given, **fields})


FULL = offer(
    mode="harvest",
    slot_state="open",
    tenant="lab",
    job="grpo",
    reason="",
    ttft_s=0.1234,
    itl_s=0.02,
    lending=Lending(tokens=128, share_ratio=0.5),
    forecasts=tuple(
        IdleForecast(horizon_s=horizon_s, low_ratio=0.5, median_ratio=median, high_ratio=0.9)
        for horizon_s, median in ((10.0, 0.6), (30.0, 0.7))
    ),
    guards=(
        GuardReading(guard="burn_1h", value=0.5, limit=7.2),
        GuardReading(guard="level_ttft", value=0.3, limit=0.1, binds=True),
    ),
)


class FakeAgent:
    def __init__(self) -> None:
        self.slots: tuple[SlotOffer, ...] = (FULL,)
        self.unopened: dict[str, str] = {}
        self.sent: list[str | None] = []
        agent = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                agent.sent.append(self.headers.get("Authorization"))
                offers = SlotOffers(node=NodeId("n1"), slots=agent.slots, unopened=agent.unopened)
                body = msgspec.json.encode(offers)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    agent = FakeAgent()
    yield agent
    agent.close()


def shown(view: AgentsView, *, width: int = 400) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(view.table())
    return capture.get()


def view_of(*urls: str) -> tuple[AgentsView, VirtualClock]:
    clock = VirtualClock()
    return AgentsView(urls, Credentials(), clock=clock), clock


def test_a_row_has_all_of_a_slot(agent: FakeAgent) -> None:
    view, _ = view_of(agent.url)
    text = shown(view)
    for cell in (
        *("n1", "slot0", "harvest", "open/leased", "lab/grpo", "128 tokens, 50%"),
        *("70% (50% to 90%)", "123 ms"),
        *("20 ms", "burn_1h 0.5 of 7.2", "level_ttft 0.3 of 0.1!"),
    ):
        assert cell in text


@pytest.mark.parametrize("scale", [1, 9])
def test_a_narrow_terminal_has_a_line_for_each_slot_and_all_texts_below(
    agent: FakeAgent, scale: int
) -> None:
    names = {"node": NodeId("n1" * scale), "slot": SlotId("slot0" * scale), "job": "grpo" * scale}
    reason = "the level of TTFT is above its limit " * scale + "so that nothing is lent"
    narrow = msgspec.structs.replace(FULL, **names, reason=reason)
    agent.slots = (narrow, msgspec.structs.replace(narrow, slot=SlotId("slot1" * scale)))
    view, _ = view_of(agent.url, "http://127.0.0.1:1")
    lines = shown(view, width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    rows = [line for line in lines if "123 ms" in line]
    assert len(rows) == 2
    assert all(cell in row for row in rows for cell in ("20 ms", "70% (50% to 90%)"))
    below = " ".join(" ".join(lines).split())
    assert f"{names['node']}/{names['slot']}: 128 tokens, 50%; burn_1h 0.5 of 7.2" in below
    assert below.count(" ".join(reason.split())) == 2
    assert "gives no answer" in below
    wide = [line for line in shown(view, width=1000).splitlines() if reason in line]
    assert len(wide) == 2, "one line for each slot"


def test_tokens_per_second_are_the_difference_of_two_answers(agent: FakeAgent) -> None:
    view, clock = view_of(agent.url)
    for total, at_s, pace in ((1000, 0.0, None), (1500, 2.0, " 250 "), (40, 3.0, " 0 ")):
        agent.slots = (offer(guest_tokens_total=total),)
        clock.now_s = at_s
        text = shown(view)
        assert pace is None or pace in text


def test_an_agent_without_an_answer_is_a_row_beside_the_others(agent: FakeAgent) -> None:
    view, _ = view_of("http://127.0.0.1:1", agent.url)
    text = shown(view)
    assert "http://127.0.0.1:1/v1/slots gives no answer" in text
    assert "slot0" in text
    assert view.answered == 1


def test_faults_stand_above_the_slots_where_a_low_terminal_shows_them(agent: FakeAgent) -> None:
    agent.slots = (FULL,) * 40
    agent.unopened = {"slot1": "page belongs to another user"}
    view, _ = view_of("http://127.0.0.1:1", agent.url)
    seen = shown(view).splitlines()[:10]
    assert any("http://127.0.0.1:1/v1/slots gives no answer" in line for line in seen)
    assert any("n1: Slot slot1 is not open: page belongs" in line for line in seen)


def test_no_text_of_an_agent_commands_the_terminal(agent: FakeAgent) -> None:
    agent.slots = (offer(reason="\x1b[2J[bold]x"),)
    view, _ = view_of(agent.url)
    text = shown(view)
    assert "[2J[bold]x" in text
    assert "\x1b" not in text


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["top", *arguments])
    return int(left.value.code or 0)


def test_once_prints_into_a_pipe_with_the_address_and_token_of_the_file(
    agent: FakeAgent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token, config = tmp_path / "token", tmp_path / "agent.yaml"
    token.touch(mode=0o600)
    token.write_text("s" * 32)
    http = f"{{port: {agent.port}, token_file: {token}}}"
    config.write_text(f"http: {http}\nslots: [{{name: slot0}}]")
    assert exit_code("--once", "--interval", "0.2", "--config", str(config)) == 0
    out = capsys.readouterr().out
    assert "lab/grpo" in out
    assert "\x1b" not in out
    assert agent.sent == ["Bearer " + "s" * 32] * 2


def test_the_observer_s_token_of_the_file_is_sent_before_the_gateways(
    agent: FakeAgent, tmp_path: Path
) -> None:
    files = [token_file(tmp_path, letter, letter * 32) for letter in "so"]
    http = f"{{port: {agent.port}, token_file: {files[0]}, observer_token_file: {files[1]}}}"
    config = tmp_path / "agent.yaml"
    config.write_text(f"http: {http}\nslots: [{{name: slot0}}]")
    assert exit_code("--once", "--interval", "0.2", "--config", str(config)) == 0
    assert agent.sent == ["Bearer " + "o" * 32] * 2


def test_a_live_view_needs_a_terminal(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(agent.url) == 2
    assert "add --once" in capsys.readouterr().err


def test_once_fails_where_no_agent_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--once", "--interval", "0.2", "http://127.0.0.1:1") == 1
    assert "no agent answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name the URLs of agents"),
        (["ftp://x"], "use http://HOST:PORT"),
        (["http://127.0.0.1:1", "--cert-file", "x"], "both --cert-file and --key-file"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("--once", *arguments) == 2
    assert says in capsys.readouterr().err
