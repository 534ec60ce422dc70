"""The real agent process beside a production and a guest that only write their pages."""

import asyncio
import itertools
import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.testbed.page_beats import PageBeats
from coserve.pulse.engine_cores import EngineStep
from coserve.vllm.environment import Role, SlotEnvironment
from coserve.vllm.pulse_reporter import PulseReporter
from harvester.cli import main
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.page import Grant, Guest, PageDirectory, PageFault, Pulse, Reading
from harvester.contracts.wire.leases import SlotOffers
from harvester.platform.bearer import authorization
from scheduler.gateway.capacity.agent_client import AgentClient
from tests.certificates import Authority, token_file
from tests.integration.conftest import Served

ROSEMUX = str(Path(sys.executable).parent / "rosemux")
GRANT_TTL_S = 0.5
CONFIG = """\
node: node-1
mode: harvest
unsafe_experiments: true
page_root: {root}/pages
state_dir: {root}/state
http: {{port: {port}}}
slots:
  - name: slot0
    engine_url: {engine_url}
    policy:
      cooldown_s: 0.3
      proof: {{share_ratio: 0}}
"""
_clock = MonotonicClock()


def wait_for(holds: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """First true result of `holds`."""
    end_s = _clock.now() + seconds
    tick = threading.Event()
    while _clock.now() < end_s:
        if value := holds():
            return value
        tick.wait(0.01)
    raise AssertionError(f"not within {seconds} s")


def serving(step: int) -> Pulse:
    return Pulse(
        model_samples=1000,
        steps_total=step,
        busy_s_total=step * 0.01,
        ttft_s_recent=(0.03,) * 32,
        itl_s_recent=(0.008,) * 32,
    )


class Beats(PageBeats):
    """A production engine and a guest that are alive and idle, however late their next beat is on
    a busy machine."""

    def __init__(self, pages: PageDirectory) -> None:
        super().__init__([pages], beat_s=0.05, ttl_ns=60 * 10**9, pulse=serving)

    def fall_silent(self) -> None:
        """Production says nothing more, and its last beat is over; the guest goes on."""
        with self._writing:
            for production in self._pulses:
                production.write(serving(self.step), now_ns=monotonic_ns(), ttl_ns=1)
            self._pulses.clear()


class Agent:
    def __init__(
        self,
        root: Path,
        *,
        engine_url: str = "http://127.0.0.1:8001",
        config: str = CONFIG,
        before: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        self._command = (*before, ROSEMUX, "agent", "--config")
        self.root = root
        self.pages = PageDirectory.create(root / "pages" / "slot0")
        self.switch = root / "pages" / "kill"
        self.config = root / "agent.yaml"
        self.config.write_text(config.format(root=root, port=0, engine_url=engine_url))
        self._reader = self.pages.grant_reader()
        self._environment = {**os.environ, **environment}
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self._command, str(self.config)],
            stderr=subprocess.PIPE,
            bufsize=0,
            env=self._environment,
        )
        try:
            self.url = "http://" + self.line(r"listens on (\S+:\d+)").group(1)
        except AssertionError:
            self.kill()
            raise

    def line(self, pattern: str, *, seconds: float = 60.0) -> re.Match[str]:
        """The next line on stderr that matches; bounded in time."""
        assert self.process.stderr is not None
        end_s, said = _clock.now() + seconds, ""
        while (left_s := end_s - _clock.now()) > 0:
            if select.select([self.process.stderr], [], [], left_s)[0]:
                text = self.process.stderr.readline().decode()
                if match := re.search(pattern, text):
                    return match
                said += text
                assert text, f"the agent left with {self.process.wait()}: {said}"
        raise AssertionError(f"no line like {pattern} within {seconds} s: {said}")

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    def take(self, request_id: str) -> Any:
        body = {
            "request_id": request_id,
            "slot": "slot0",
            "tenant": "t",
            "job": "j",
            "duration_s": 60,
        }

        def granted() -> Any:
            answer = self.call("POST", "/v1/leases", body)
            return answer if answer["type"] == "granted" else None

        return wait_for(granted)

    def reading(self, *, now_ns: int | None = None) -> Reading[Grant]:
        return self._reader.read(now_ns=now_ns)

    def mode(self) -> str:
        record = self.reading().record
        return "none" if record is None else record.mode.value

    def granted(self) -> str:
        """The mode of the last grant, which may have expired."""
        record = self._reader.read_left().record
        return "none" if record is None else record.mode.value

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def end(self) -> None:
        self.kill()
        self._reader.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.end()


@pytest.fixture
def beats(agent: Agent) -> Iterator[Beats]:
    beats = Beats(agent.pages)
    yield beats
    beats.stop()


@pytest.fixture
def harvesting(agent: Agent, beats: Beats) -> Any:
    """The lease of an agent with an open grant."""
    lease = agent.take("r1")
    wait_for(lambda: agent.mode() == "open")
    return lease


def test_silent_connections_stop_neither_a_lease_nor_its_holder(tmp_path: Path) -> None:
    agent = Agent(tmp_path, before=("prlimit", "--nofile=128"))
    beats, silent = Beats(agent.pages), list[socket.socket]()
    try:
        lease = agent.take("r1")
        wait_for(lambda: agent.mode() == "open")
        host, _, port = agent.url.removeprefix("http://").partition(":")
        for _ in range(400):
            silent.append(socket.create_connection((host, int(port)), timeout=30))
        for _ in range(20):
            assert agent.granted() == "open"
            threading.Event().wait(0.05)
        wait_for(lambda: agent.mode() == "open")
        renewal = {"epoch": lease["epoch"], "duration_s": 60}
        renewed = agent.call("POST", f"/v1/leases/{lease['lease']}/renew", renewal)
        assert (renewed["type"], renewed["epoch"]) == ("granted", lease["epoch"])
        audit = (tmp_path / "state/audit.jsonl").read_text()
        assert "kill_switch" not in audit
        assert "lease_ended" not in audit
    finally:
        for each in silent:
            each.close()
        beats.stop()
        agent.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_agents_grant_expires_within_its_ttl(
    agent: Agent, harvesting: Any, number: signal.Signals
) -> None:
    agent.process.send_signal(number)
    os.waitid(os.P_PID, agent.process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
    no_more_ns = monotonic_ns()
    wait_for(lambda: agent.reading().fault is PageFault.EXPIRED)
    # The page's own time counts: this process may wait for a core.
    after_ttl_ns = no_more_ns + int(GRANT_TTL_S * 1e9)
    assert agent.reading(now_ns=after_ttl_ns).fault is PageFault.EXPIRED


def test_a_stopped_agent_that_goes_on_grants_again(agent: Agent, harvesting: Any) -> None:
    agent.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: agent.reading().fault is PageFault.EXPIRED)
    agent.process.send_signal(signal.SIGCONT)
    wait_for(lambda: agent.mode() == "open")


def test_a_killed_agents_successor_keeps_its_lease_and_raises_the_epoch_for_the_next(
    agent: Agent, harvesting: Any
) -> None:
    agent.kill()
    agent.start()
    renewal = {"epoch": harvesting["epoch"], "duration_s": 60}
    renewed = agent.call("POST", f"/v1/leases/{harvesting['lease']}/renew", renewal)
    assert (renewed["type"], renewed["epoch"]) == ("granted", harvesting["epoch"])
    wait_for(lambda: agent.mode() == "open")
    agent.call("DELETE", f"/v1/leases/{harvesting['lease']}")
    assert agent.take("r2")["epoch"] > harvesting["epoch"]


@pytest.mark.parametrize("text", ["hold", "drain"])
def test_the_kill_switch_closes_and_its_removal_opens_the_slot_again(
    agent: Agent, harvesting: Any, text: str
) -> None:
    agent.switch.write_text(text)
    wait_for(lambda: agent.mode() == "closed", seconds=20)  # Long before the lease ends.
    agent.switch.unlink()
    if text == "drain":
        assert agent.take("r2")["epoch"] > harvesting["epoch"]
    wait_for(lambda: agent.mode() == "open")


def test_closes_when_production_falls_silent(agent: Agent, beats: Beats, harvesting: Any) -> None:
    beats.fall_silent()
    wait_for(lambda: agent.mode() == "closed", seconds=20)  # Long before the lease ends.
    with pytest.raises(urllib.error.HTTPError, match="503"):
        agent.call("GET", "/readyz")


def test_sigterm_leaves_a_closed_expired_page_under_a_raised_epoch(
    agent: Agent, harvesting: Any
) -> None:
    agent.process.terminate()
    assert agent.process.wait(timeout=60) == 0
    assert agent.reading().fault is PageFault.EXPIRED
    left = agent.pages.grant_reader().read_left().record
    assert left is not None
    assert (left.mode, left.reason) == ("closed", "agent stopped")
    assert left.epoch > harvesting["epoch"]


def test_sighup_takes_a_good_configuration_and_keeps_the_old_one_for_a_bad_one(
    agent: Agent, harvesting: Any
) -> None:
    text = agent.config.read_text()
    agent.config.write_text(text.replace("cooldown_s: 0.3", "step_tokens_max: 77"))
    agent.process.send_signal(signal.SIGHUP)
    agent.line("configuration reloaded")
    wait_for(lambda: (r := agent.reading().record) and r.step_tokens_cap == 77)
    agent.config.write_text(text.replace("cooldown_s", "cooldwon_s"))
    agent.process.send_signal(signal.SIGHUP)
    assert "cooldwon_s" in agent.line("previous one stays in force: (.*)").group(1)
    record = agent.reading().record
    assert record is not None
    assert record.step_tokens_cap == 77


def test_a_reload_says_what_waits_for_a_restart_and_takes_over_the_rest(
    agent: Agent, harvesting: Any
) -> None:
    text = agent.config.read_text()
    text = text.replace("port: 0", "port: 1").replace("cooldown_s: 0.3", "step_tokens_max: 78")
    agent.config.write_text(text.replace("mode: harvest", "mode: harvest\nlease_ttl_s: 9"))
    agent.process.send_signal(signal.SIGHUP)
    waiting = agent.line("fields that need a restart of the agent: (.*)").group(1)
    assert waiting.strip() == "http.port, lease_ttl_s"
    wait_for(lambda: (r := agent.reading().record) and r.step_tokens_cap == 78)
    said = agent.call("GET", "/v1/slots")["restart_needed"]
    assert said == ["http.port", "lease_ttl_s"]


def test_status_shows_pages_and_offers(agent: Agent, harvesting: Any) -> None:
    command = [ROSEMUX, "status", "--pages", str(agent.root / "pages"), "--agent", agent.url]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert re.search(r"grant.*open", done.stdout)
    assert re.search(r"slot0 +leased +harvest +open +t/j ", done.stdout)
    assert "pulse.prod.0" in done.stdout
    assert re.search(r"slot0.*leased", done.stdout)


def test_a_taken_port_is_one_clear_line(agent: Agent) -> None:
    port = agent.url.rsplit(":", 1)[1]
    second = agent.root / "second.yaml"
    text = CONFIG.format(root=agent.root / "other", port=port, engine_url="http://127.0.0.1:8001")
    second.write_text(text)
    done = subprocess.run(
        [ROSEMUX, "agent", "--config", str(second)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == os.EX_TEMPFAIL
    assert done.stderr.splitlines()[-1] == (
        f"rosemux: cannot listen on 127.0.0.1:{port}: the port is taken; choose another with --port"
    )


def test_tells_systemd_that_it_is_ready_alive_and_stopping(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(60)
        agent = Agent(tmp_path, NOTIFY_SOCKET=str(address), WATCHDOG_USEC="400000")
        try:
            assert systemd.recv(256) == b"READY=1"
            assert [systemd.recv(256) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            agent.process.terminate()
            assert wait_for(lambda: systemd.recv(256) == b"STOPPING=1")
        finally:
            agent.end()


def test_the_agent_offers_a_proxied_guest_by_tls_to_gateways_and_observers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, token = Authority(tmp_path), token_file(tmp_path, "token", "t" * 20)
    observer = token_file(tmp_path, "observer", "o" * 20)
    made = authority.signs("agent")
    tls = f"tls: {{cert_file: {made.cert_file}, key_file: {made.key_file}}}"
    config = tmp_path / "agent.yaml"
    config.write_text(
        CONFIG.format(root=tmp_path, port=0, engine_url="http://127.0.0.1:8001")
        .replace("{port", f"{{token_file: {token}, observer_token_file: {observer}, {tls}, port")
        .replace("    policy:", "    offered_url: https://192.0.2.21:8443\n    policy:")
    )

    async def offered(url: str, sent: Path) -> SlotOffers:
        async with aiohttp.ClientSession() as session:
            credentials = authority.trusted(token_file=sent)
            return await AgentClient(session, url, timeout_s=30, credentials=credentials).offers()

    def command(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main([*words, "--token-file", str(observer), "--ca-file", str(authority.file)])
        return int(left.value.code or 0), " ".join("".join(capsys.readouterr()).split())

    with subprocess.Popen(
        [ROSEMUX, "agent", "--config", str(config)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            listens = (re.search(r"listens on (\S+:\d+)", line) for line in process.stderr)
            url = f"https://{next(filter(None, listens)).group(1)}"
            (offer,) = asyncio.run(offered(url, token)).slots
            assert offer.engine_url == "https://192.0.2.21:8443"
            (offer,) = asyncio.run(offered(url, observer)).slots
            for words in (
                ("status", "--agent", url, "--pages", str(tmp_path)),
                ("top", "--once", url),
            ):
                status, said = command(*words)
                assert (status, "slot0" in said) == (0, True), said
            status, said = command("drain", "--agent", url, "--reason", "r")
            assert (status, "HTTP 403" in said) == (1, True), said
            metrics = urllib.request.Request(f"{url}/metrics", headers=authorization("n" * 20))
            trusted = ssl.create_default_context(cafile=str(authority.file))
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(metrics, timeout=30, context=trusted)
            observer.write_text("n" * 20)  # Read again without a restart.
            with urllib.request.urlopen(metrics, timeout=30, context=trusted) as reply:
                assert b"harvester_mode" in reply.read()
        finally:
            process.terminate()


async def test_a_gateway_leases_slots_of_one_name_from_two_agents(
    tmp_path: Path, gateway: Callable[..., Served], fake_engine: Callable[..., Served]
) -> None:
    """Each serves its share; the slot of an agent that is killed is lost, the other's goes on."""
    agents, beats = {}, []
    try:
        for name in ("east", "west"):
            (tmp_path / name).mkdir()
            guest = fake_engine(epoch=1, step_s=0.02)
            agents[name] = Agent(tmp_path / name, engine_url=guest.url)
            beats.append(Beats(agents[name].pages))
        service = gateway(
            engines=[], agents=[{"id": name, "url": each.url} for name, each in agents.items()]
        )
        await service.until("/v1/status", lambda found: _offered(found) == {"east", "west"})
        served: set[str] = set()
        async with asyncio.timeout(60):
            for wave in itertools.count():
                turns = (_turn(service, f"t{wave}.{number}") for number in range(12))
                served = served.union(*await asyncio.gather(*turns))
                if served == {"guest.east.slot0", "guest.west.slot0"}:
                    break
        agents["east"].kill()
        await service.until("/v1/status", lambda found: _up(found) == {"guest.west.slot0"})
        assert await _turn(service, "after") == {"guest.west.slot0"}
    finally:
        for each in beats:
            each.stop()
        for agent in agents.values():
            agent.end()


def _offered(status: Any) -> set[str]:
    """Agents whose slot is on offer, by the slots' names at the gateway."""
    return {
        name.removesuffix(".slot0")
        for name, slot in status["slots"].items()
        if slot["state"] == "offered"
    }


def _up(status: Any) -> set[str]:
    return {name for name, engine in status["engines"].items() if engine["up"]}


async def _turn(service: Served, name: str) -> set[str]:
    """The engines of a turn's tokens."""
    body = {"request_id": name, "token_ids": [4, 5, 6], "sampling_params": {"max_tokens": 30}}
    status, reply = await service.post("/inference/v1/generate", body)
    assert status == 200, reply
    choice = reply["choices"][0]
    assert len(choice["token_ids"]) == 30
    return {span["engine"] for span in choice["spans"]}


def test_harm_of_real_pulses_is_counted_by_requests(agent: Agent) -> None:
    """A guest steps while a batch of 64 stalls for one step, and while a client gives up."""
    guest = agent.pages.guest_writer()
    production = PulseReporter(SlotEnvironment(Role.PRODUCTION, "prod", agent.pages.path))
    production.attach_middleware()
    reader = agent.pages.pulse_reader("pulse.prod.0")
    steps = itertools.count(1)

    def guest_steps() -> None:
        record = Guest(steps_finished=next(steps))
        guest.write(record, now_ns=monotonic_ns(), ttl_ns=60 * 10**9)

    def counted(name: str) -> float:
        guest_steps()
        with urllib.request.urlopen(f"{agent.url}/metrics", timeout=30) as reply:
            found = re.search(rf'^harvester_{name}_total{{slot="slot0"}} (\S+)$',
                              reply.read().decode(), re.M)  # fmt: skip
        assert found is not None
        return float(found.group(1))

    def pulse() -> Pulse | None:
        return reader.read().record

    def step(*inter_token_s: float, ttft_s: tuple[float, ...] = ()) -> None:
        wall_s = monotonic_ns() * 1e-9
        told = EngineStep(running=64, kv_usage_ratio=0.1, wall_s=wall_s, ttft_s=ttft_s,
                          inter_token_s=inter_token_s)  # fmt: skip
        production.step(lambda: told)

    guest_steps()
    wait_for(lambda: (record := pulse()) is not None and record.itl_slo_s == 0.05)
    wait_for(lambda: (record := agent.reading().record) and "model rests on 0" in record.reason)
    keys = [production.arrive(body_bytes=500) for _ in range(64)]
    step(ttft_s=tuple(0.001 + number * 1e-5 for number in range(64)))
    wait_for(lambda: counted("requests") == 64)
    step(*(0.8,) * 64)
    for _ in range(10):
        step(*(0.01,) * 64)
    for key in keys:
        production.finish(key)
    wait_for(lambda: counted("slo_misses") == 64)

    impatient = production.arrive(body_bytes=500)
    begun_s = _clock.now()
    wait_for(lambda: counted("requests") == 64 and _clock.now() - begun_s > 0.3)
    production.finish(impatient)
    production.finish(production.arrive(body_bytes=500))
    wait_for(lambda: counted("unanswered_requests") == 1)
    assert (counted("requests"), counted("slo_misses")) == (65, 65)
