"""Two real engines on one slot, production and guest, with the node agent acted by the tests.

One slot serves the whole session, because two engines take half a minute to start. A thread renews
the agent's grant each beat: a test sets a grant and goes on. Waits are long and end early, so that
a busy machine makes the tests slow and not red.
"""

import asyncio
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.migration.model import write_model
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Child, Processes
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import NO_COMPILER, EngineSpec, GpuShare
from examples.grpo.model import write_checkpoint
from examples.grpo.policy_shape import PolicyShape
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.page import (
    Grant,
    GrantMode,
    Guest,
    PageDirectory,
    PageWriter,
    Pulse,
    pulse_page,
)
from harvester.contracts.page.seal import SEQUENCE_OFFSET
from harvester.contracts.wire.leases import EPOCH_HEADER
from harvester.contracts.wire.rollouts import TRAJECTORY_ARGUMENT
from scheduler.gateway.engines.stream import EventStream
from tests.integration.forked_program import begin_forked

PRODUCTION = "production"
PRODUCTION_PULSE = pulse_page(PRODUCTION, 0)
FAKE_PULSE = pulse_page("fake", 0)
CONTEXT_TOKENS = 4096
SHAPE = PolicyShape(
    hidden=128, intermediate=256, layers=2, heads=2, kv_heads=2, context_tokens=CONTEXT_TOKENS
)
GPU_SHARE = GpuShare(kv_cache_bytes=256 << 20, eager=True)
"""Each of the two on a GPU."""
# Shorter than a KV block, so that no prefix is cached and equal requests take equal steps.
PROMPT = tuple(range(5, 21))
WITHIN_S = 60.0
_START_S = 200.0
_BEAT_S = 0.05
_TTL_S = 2.0


class FakeAgent:
    """Writes the grant, and the pulse of an absent engine, until a test silences it."""

    def __init__(self, pages: PageDirectory) -> None:
        self._pages = pages
        self._grants: PageWriter[Grant] | None = pages.grant_writer()
        self._pulses = pages.pulse_writer("fake", 0)
        self._lock = threading.Lock()
        self._grant: Grant | None = None
        self._ttl_ns = 0
        self._pulse = True
        self._stopped = threading.Event()
        self.epoch = 0
        self.expires_ns = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, mode: GrantMode, *, ttl_s: float = _TTL_S, **fields: Any) -> None:
        """Grant this from now on, at once and then with every beat."""
        with self._lock:
            self._grant = Grant(epoch=self.epoch, mode=mode, **fields)
            self._ttl_ns = int(ttl_s * 1e9)
            self._beat()

    def raise_epoch(self) -> None:
        self.epoch += 1

    def fall_silent(self, *, unlink: bool = False) -> int:
        """Die, as far as the guest can tell. Returns when the last grant expires."""
        with self._lock:
            self._grant = None
            if unlink and self._grants is not None:
                self._grants.close(unlink=True)
                self._grants = None
        return self.expires_ns

    def come_back(self) -> None:
        """A successor takes the grant page over."""
        with self._lock:
            if self._grants is not None:
                self._grants.close()
            self._grants = self._pages.grant_writer()

    def stop_pulse(self) -> None:
        with self._lock:
            self._pulse = False

    def tear_pulse(self) -> None:
        """The writer dies in the middle of a record: an odd sequence number stays."""
        with self._lock:
            self._pulse = False
            with (self._pages.path / FAKE_PULSE).open("r+b") as page:
                page.seek(SEQUENCE_OFFSET)
                lowest = page.read(1)[0] | 1
                page.seek(SEQUENCE_OFFSET)
                page.write(bytes([lowest]))

    def remove_pulse(self) -> None:
        with self._lock:
            self._pulse = False
            (self._pages.path / FAKE_PULSE).unlink()

    def restart_pulse(self) -> None:
        with self._lock:
            self._pulses.close()
            self._pulses = self._pages.pulse_writer("fake", 0)
            self._pulse = True

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            with self._lock:
                self._beat()

    def _beat(self) -> None:
        now_ns = monotonic_ns()
        if self._pulse:
            self._pulses.write(Pulse(), now_ns=now_ns, ttl_ns=int(_TTL_S * 1e9))
        if self._grant is not None and self._grants is not None:
            self._grants.write(self._grant, now_ns=now_ns, ttl_ns=self._ttl_ns)
            self.expires_ns = now_ns + self._ttl_ns


@dataclass
class Turn:
    """One streamed request to an engine's token route, running beside the test."""

    status: int = 0
    said: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    whole: bool = False
    """The stream came to its end marker."""
    task: "asyncio.Task[None] | None" = None

    @property
    def aborted(self) -> bool:
        """Up to 0.30 vLLM does not say so where no token is left to send with it."""
        return self.whole and self.finish_reason in {"abort", None}

    async def ended(self) -> "Turn":
        assert self.task is not None
        async with asyncio.timeout(2 * WITHIN_S):
            await self.task
        return self

    async def follow(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/inference/v1/generate", json=body, headers=headers) as response,
        ):
            self.status = response.status
            if response.status != 200:
                self.said = await response.text()
                return
            stream = EventStream()
            async for data in response.content.iter_any():
                for chunk in stream.feed(data):
                    assert not chunk.fault
                    for choice in chunk.choices:
                        self.tokens += choice.token_ids or []
                        if choice.logprobs is not None:
                            self.logprobs += [one.logprob for one in choice.logprobs.content or []]
                        self.finish_reason = choice.finish_reason or self.finish_reason
            self.whole = stream.done


@dataclass
class EngineSlot:
    production_url: str
    guest_url: str
    pages: PageDirectory
    weights: Path
    agent: FakeAgent
    guest_child: Child

    def begin(
        self,
        max_tokens: int,
        *,
        epoch: int | None = None,
        stream: bool = True,
        prompt: tuple[int, ...] = PROMPT,
        trajectory: str | None = None,
        salt: str | None = None,
    ) -> Turn:
        """A greedy request to the guest that runs to its last token."""
        turn = Turn()
        sampling: dict[str, Any] = {
            "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True,
            "extra_args": None if trajectory is None else {TRAJECTORY_ARGUMENT: trajectory},
        }  # fmt: skip
        body = {
            "token_ids": prompt,
            "cache_salt": salt,
            "stream": stream,
            "sampling_params": {**sampling, "logprobs": 1, "detokenize": False},
        }
        headers = {EPOCH_HEADER: str(self.agent.epoch if epoch is None else epoch)}
        turn.task = asyncio.create_task(turn.follow(self.guest_url, body, headers))
        return turn

    async def drop_prefixes(self) -> None:
        url = f"{self.guest_url}/reset_prefix_cache"
        async with aiohttp.ClientSession() as session, session.post(url) as response:
            assert response.status == 200

    async def guest_becomes(self, holds: Callable[[Guest], object], what: str) -> None:
        await until(lambda: holds(self.guest()), what, seen=self.guest)

    async def idle_guest(self) -> Guest:
        """A page that the guest has written after this call and without a running turn: a turn that
        has ended before is accounted for. Turns may be shorter than the interval of pages."""
        since_ns = monotonic_ns()

        def written() -> bool:
            page = self._left(self.pages.guest_reader())
            return page.stamp_ns > since_ns and page.record.running == 0

        await until(written, "the guest is idle", seen=self.guest)
        return self.guest()

    def guest(self) -> Guest:
        """The guest's page however old it is: a waker that waits for a core is no silent guest."""
        return self._left(self.pages.guest_reader()).record or Guest()

    def pulse(self) -> Pulse:
        return self._left(self.pages.pulse_reader(PRODUCTION_PULSE)).record or Pulse()

    @staticmethod
    def _left(reader: Any) -> Any:
        try:
            return reader.read_left()
        finally:
            reader.close()


async def completed(url: str, model: str, max_tokens: int) -> int:
    """A plain request of a production client, on a connection of its own; its number of tokens."""
    body = {
        "model": model,
        "prompt": [5, 6, 7, 8],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        return int((await response.json())["usage"]["completion_tokens"])


async def until(
    holds: Callable[[], object], what: str, *, seen: Callable[[], object] = lambda: ""
) -> None:
    """Waits for `holds`; after a minute fails with `what` and the result of `seen`."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while not holds():  # noqa: ASYNC110 - pages of another process
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"never so: {what}; {seen()}")


@contextmanager
def started_slot(
    root: Path,
    *,
    production_model: Callable[[Path], None] = partial(write_checkpoint, shape=SHAPE),
    guest_arguments: tuple[str, ...] = (),
    start_s: float = _START_S,
    gpu: GpuShare | None = None,
) -> Iterator[EngineSlot]:
    """Both engines up, the guest ungated. `production_model` writes what production serves, `gpu`
    is what each takes of a GPU."""
    vllm = capabilities(installed_vllm_version())
    weights = root / "weights"
    pages = PageDirectory.create(root / "pages")
    production_model(root / PRODUCTION)
    write_checkpoint(root / "guest", SHAPE)
    weights.mkdir()
    ports = free_ports(2)

    def spec(name: str, port: int, *extra: str) -> EngineSpec:
        return EngineSpec(
            name=name,
            model=root / name,
            port=port,
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=8,
            vllm=vllm,
            gpu=gpu,
            extra_arguments=extra,
        )

    # The contract suite speaks to production, as the stock engine of the two: by its token route.
    routes = () if vllm.token_routes_flag is None else (vllm.token_routes_flag,)
    commands = {
        PRODUCTION: launch.production(
            spec(PRODUCTION, ports[0], "--load-format", "dummy", *routes), pages=pages.path
        ),
        "guest": launch.guest(
            spec("guest", ports[1], *guest_arguments), pages=pages.path, weights=weights
        ),
    }
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    children: dict[str, Child] = {}
    begin = begin_forked if gpu is None else subprocess.Popen
    with Processes(root / "logs", begin=begin) as processes:
        agent = FakeAgent(pages)
        if gpu is not None:
            # A start's passes wait long for slack without grants.
            agent.say(GrantMode.UNGATED)
        try:
            for url, (name, command) in zip(urls, commands.items(), strict=True):
                # The contract suite asks production for log-probabilities too.
                children[name] = processes.start(
                    name,
                    command.arguments,
                    environment=command.environment | (NO_COMPILER if gpu is None else {}),
                )
                if gpu is not None:
                    # An engine sizes itself by the free memory at its start.
                    wait_for(url, children[name], within_s=start_s)
            for url, child in zip(urls, children.values(), strict=True):
                wait_for(url, child, within_s=start_s)
            yield EngineSlot(*urls, pages, weights, agent, children["guest"])
        finally:
            agent.stop()


@contextmanager
def served_model(
    root: Path, *, name: str, context_tokens: int, arguments: Sequence[str]
) -> Iterator[str]:
    """URL of a dedicated engine with random weights; its model is `root`/hf, its weight root
    `root`/weights."""
    (root / "weights").mkdir()
    texts = [Path("README.md").read_text()]
    write_model(root / "hf", texts=texts, context_tokens=context_tokens, seed=3)
    spec = EngineSpec(
        name=name,
        model=root / "hf",
        port=free_ports(1)[0],
        max_model_len=context_tokens,
        max_num_seqs=4,
        vllm=capabilities(installed_vllm_version()),
        extra_arguments=tuple(arguments),
    )
    command = launch.dedicated(spec, weights=root / "weights")
    with Processes(root / "logs", begin=begin_forked) as processes:
        started = processes.start(name, command.arguments, environment=command.environment)
        url = f"http://127.0.0.1:{spec.port}"
        wait_for(url, started)
        yield url


def wait_for(url: str, child: Child, *, within_s: float = _START_S) -> None:
    clock = MonotonicClock()
    until_s = clock.now() + within_s
    while not answers(url):
        child.check()
        assert clock.now() < until_s, f"{child.name} does not start: {child.last_words()}"
        time.sleep(0.25)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False
