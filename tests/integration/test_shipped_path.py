"""The shipped files with real engines: harvest on an idle production, and a loss of isolation.

Only a machine's own settings are replaced: paths, ports, users, model and size of its KV.
"""

import asyncio
import json
import os
import re
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import psutil
import pytest

from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Child, Processes
from coserve.guest import isolation
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineSpec
from deploy.check_expressions import DEPLOY
from examples.grpo.model import write_checkpoint
from harvester.config import AgentConfig
from harvester.config_file import load_agent_config
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.page import (
    Grant,
    Guest,
    PageDirectory,
    PageReader,
)
from harvester.contracts.page.records import Record
from harvester.contracts.process import family
from harvester.contracts.wire.leases import EPOCH_HEADER
from tests.integration.engine_slot import (
    CONTEXT_TOKENS,
    PRODUCTION,
    SHAPE,
    Turn,
    until,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WANTED_TOKENS = 10_000
WITHIN_S = 90.0
"""A machine of its own needs a quarter of it; the guest has the time that other tests leave."""
# On the small model a prefill of this length takes some tens of milliseconds, like a real one's.
PROMPT_TOKENS = 2000
R = TypeVar("R", bound=Record)
COMMAND = (sys.executable, "-m", "harvester.cli")


@dataclass
class Shipped:
    config: AgentConfig
    production_url: str
    guest: Child

    @property
    def agent_url(self) -> str:
        return f"http://{self.config.http.host}:{self.config.http.port}"

    @property
    def guest_url(self) -> str:
        return self.config.slots[0].engine_url

    def slot(self) -> Any:
        with urllib.request.urlopen(f"{self.agent_url}/v1/slots", timeout=5.0) as reply:
            return json.load(reply)["slots"][0]

    def metric(self, series: str) -> float:
        with urllib.request.urlopen(f"{self.agent_url}/metrics", timeout=5.0) as reply:
            found = re.search(rf"(?m)^{re.escape(series)} (\S+)$", reply.read().decode())
        assert found is not None, series
        return float(found[1])

    @property
    def pages(self) -> PageDirectory:
        return PageDirectory(self.config.pages_of(self.config.slots[0]))

    def page(self) -> Guest:
        return _left(self.pages.guest_reader()) or Guest()

    def grant(self) -> Grant:
        grant = _left(self.pages.grant_reader())
        assert grant is not None
        return grant


def _left(reader: PageReader[R]) -> R | None:
    try:
        return reader.read_left().record
    finally:
        reader.close()


def redirected(root: Path, ports: tuple[int, int]) -> Path:
    """The shipped file for this machine; every replacement must match."""
    text = (DEPLOY / "systemd/agent.yaml").read_text()
    for shipped, here in (
        ("/run/rosemux", f"{root}/run/rosemux"),
        ("/var/lib/rosemux", f"{root}/state"),
        ("/srv/models/policy", f"{root}/models/policy"),
        ("/srv/weights", f"{root}/weights"),
        ("port: 9711", f"port: {ports[0]}"),
        ("127.0.0.1:8001", f"127.0.0.1:{ports[1]}"),
        ("kv_cache_bytes: 8589934592", "kv_cache_bytes: 1073741824"),
        ("agent: [rosemux]", f"agent: [{os.geteuid()}]"),
        ("production: [vllm]", f"production: [{os.geteuid()}]"),
        ("guest: [rosemux-guest]", f"guest: [{os.geteuid()}]"),
        ("page_group: rosemux-pages", f"page_group: {os.getegid()}"),
    ):
        assert shipped in text, shipped
        text = text.replace(shipped, here)
    file = root / "agent.yaml"
    file.write_text(text)
    return file


def make_directories(root: Path) -> None:
    """Makes the directories of the shipped tmpfiles.conf, for this user."""
    for line in (DEPLOY / "systemd/tmpfiles.conf").read_text().splitlines():
        words = line.split()
        if words[:1] == ["d"]:
            folder = root / words[1].lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(int(words[2], 8))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipped]:
    root = tmp_path_factory.mktemp("shipped")
    production, agent, guest = free_ports(3)
    file = redirected(root, (agent, guest))
    make_directories(root)
    for name in ("policy", PRODUCTION):
        write_checkpoint(root / "models" / name, SHAPE)
    (root / "weights").mkdir()
    (root / "state").mkdir()
    config = load_agent_config(file, environment={})
    spec = EngineSpec(
        name=PRODUCTION,
        model=root / "models" / PRODUCTION,
        port=production,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=8,
        vllm=capabilities(installed_vllm_version()),
        extra_arguments=("--load-format", "dummy"),
    )
    engine = launch.production(spec, pages=config.pages_of(config.slots[0]))
    with Processes(root / "logs") as processes:
        started = processes.start(PRODUCTION, engine.arguments, environment=engine.environment)
        # The command that install.md gives for the time after observe-only.
        harvest = ("agent", "--config", str(file), "--mode", "harvest")
        processes.start("agent", (*COMMAND, *harvest))
        child = processes.start("guest", (*COMMAND, "guest", "--config", str(file)))
        slot = Shipped(config, f"http://127.0.0.1:{production}", child)
        wait_for(slot.production_url, started)
        # In its idle group it starts with what other tests leave.
        wait_for(slot.guest_url, child, within_s=600.0)
        yield slot


@pytest.fixture
async def learned(shipped: Shipped) -> None:
    await learn(shipped)


async def learn(shipped: Shipped) -> None:
    """Sends production requests of some lengths, until its step times are known."""
    lengths = cycle((PROMPT_TOKENS, PROMPT_TOKENS // 2, PROMPT_TOKENS // 4))
    async with asyncio.timeout(120.0):
        for number, tokens in enumerate(lengths):
            if shipped.slot()["state"] != "learning":
                break
            await serve(shipped.production_url, [5 + (number * 17 + i) % 50 for i in range(tokens)])


async def serve(url: str, prompt: list[int]) -> None:
    """One request of a production client."""
    body = {"model": PRODUCTION, "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()


@asynccontextmanager
async def leased(slot: Shipped) -> AsyncIterator[int]:
    """A lease that is renewed like a scheduler's; its epoch."""
    lease = {"slot": slot.config.slots[0].name, "tenant": "research", "job": "job"}
    async with aiohttp.ClientSession(slot.agent_url) as session:

        async def post(path: str, **body: Any) -> Any:
            async with session.post(path, json=body) as response:
                return await response.json()

        async def renew(name: str) -> None:
            while True:
                await asyncio.sleep(2.0)
                renewed = await post(f"/v1/leases/{name}/renew", epoch=epoch, duration_s=10.0)
                assert renewed["type"] == "granted", renewed

        await until(lambda: slot.slot()["state"] == "offered", "offered", seen=slot.slot)
        granted = await post(
            "/v1/leases", request_id=f"r{monotonic_ns()}", duration_s=10.0, **lease
        )
        assert granted["type"] == "granted", granted
        epoch = int(granted["epoch"])
        renewing = asyncio.create_task(renew(granted["lease"]))
        try:
            yield epoch
        finally:
            renewing.cancel()
            async with session.delete(f"/v1/leases/{granted['lease']}"):
                pass


@asynccontextmanager
async def loaded(slot: Shipped, epoch: int) -> AsyncIterator[list[Turn]]:
    """Keeps as many turns running as the slot has places, each followed by the next."""
    turns: list[Turn] = []

    async def place(number: int) -> None:
        for salt in range(1000):
            turn = Turn()
            turns.append(turn)
            sampling = {"max_tokens": 512, "ignore_eos": True, "detokenize": False}
            prompt = [5 + (number * 31 + salt * 7 + i) % 50 for i in range(24)]
            body = {"token_ids": prompt, "stream": True, "sampling_params": sampling}
            await turn.follow(slot.guest_url, body, {EPOCH_HEADER: str(epoch)})

    places = [asyncio.create_task(place(n)) for n in range(slot.config.slots[0].concurrency)]
    try:
        yield turns
    finally:
        for each in places:
            each.cancel()
        await asyncio.gather(*places, return_exceptions=True)


@pytest.mark.usefixtures("learned")
async def test_the_shipped_files_lend_an_idle_production(shipped: Shipped) -> None:
    clock, tokens = MonotonicClock(), 0
    until_s = clock.now() + WITHIN_S
    async with leased(shipped) as epoch, loaded(shipped, epoch) as turns:
        while tokens <= WANTED_TOKENS and clock.now() < until_s:
            await asyncio.sleep(0.2)
            tokens = sum(len(turn.tokens) for turn in turns)
        page, granted = shipped.page(), shipped.grant()
        holds = shipped.metric('harvester_guest_isolation_holds{slot="slot0"}')
    refused = [turn.said for turn in turns if turn.said][:3]
    assert tokens > WANTED_TOKENS, f"{tokens} tokens\n{page}\n{granted}\n{refused}"
    assert (page.isolation_fault, holds) == ("", 1.0)
    assert granted.blocking_ratio < 1.0


@pytest.mark.usefixtures("learned")
async def test_an_isolation_that_falls_makes_guest_steps_count_whole(shipped: Shipped) -> None:
    in_force = 'harvester_blocking_ratio{kind="in_force",slot="slot0"}'
    await until(lambda: shipped.page().blocking_ratio < 1.0, "isolated", seen=shipped.page)
    engine = [pid for pid in family(shipped.guest.process.pid) if pid != shipped.guest.process.pid]
    assert {process.pid for process in shipped.page().processes} <= set(engine)
    for pid in engine:
        isolation.lift_from_process(pid)
    await until(lambda: shipped.metric(in_force) == 1.0, "counted whole", seen=shipped.page)
    assert "no effect" in shipped.page().isolation_fault
    backend = isolation.choose(isolation.IsolationBackend(shipped.page().isolation))
    for pid in engine:
        if psutil.pid_exists(pid):
            isolation.apply_to_process(backend, pid, guest=shipped.guest.process.pid)
    await until(lambda: shipped.metric(in_force) < 1.0, "isolated again", seen=shipped.page)
