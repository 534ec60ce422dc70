"""`python -m benchmarks.gateway --json PATH`: what does the gateway cost, beside two Rust routers?

Each router runs alone on one core, a stub engine and the load on the others. In interleaved rounds:
300 requests a second with Poisson arrivals; then as many as the core serves; then streams held
open with a token each second.
"""

import argparse
import asyncio
import gc
import http.client
import itertools
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import uvloop

from benchmarks.gateway.comparison import LoopWindow, Rounds, Streams, compared
from benchmarks.gateway.dialects import COMPLETIONS, GENERATE, SGLANG
from benchmarks.gateway.figures import Outside, Times
from benchmarks.gateway.load import (
    ConnectionPool,
    Exchange,
    Requests,
    closed_loop,
    held_streams,
    open_loop,
)
from benchmarks.gateway.routers import ARMS, VERSIONS, RouterArm, start
from benchmarks.testbed.core_time import Account, account, used
from benchmarks.testbed.interleaving import interleaved
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Child, Processes
from benchmarks.testbed.reporting import report
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError

ENGINES = 4
TOKENS = 16
STEP_S = 0.002
"""Time between a request's tokens under Poisson load."""
RATE_PER_S = 300.0
CLIENTS = 128
"""Clients of the closed loop."""
SATURATIONS = {
    "one_token": (1, False, 0.0),
    "reply": (TOKENS, False, 0.001),
    "stream": (TOKENS, True, 0.001),
}
"""Tokens, whether streamed, and seconds between tokens."""
_UP_S = 60.0
_CLOCK = MonotonicClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    latency_rounds: int = 7
    latency_s: float = 1.0
    served_rounds: int = 5
    served_s: float = 0.6
    streams: int = 5000
    opened_per_s: float = 600.0
    held_s: float = 6.0

    @property
    def stream_tokens(self) -> int:
        """One a second: the first stream lasts until the last has been held as long as asked."""
        return round(self.streams / self.opened_per_s + self.held_s) + 2


QUICK = Size(
    latency_rounds=3,
    latency_s=0.25,
    served_rounds=3,
    served_s=0.1,
    streams=500,
    held_s=2.0,
)
DIRECT = tuple(RouterArm("direct", route) for route in (GENERATE, SGLANG, COMPLETIONS))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gateway", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a minute or two; shows that it runs")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    size = QUICK if given.quick else Size()
    report("gateway", lambda: uvloop.run(measured(size, given.seed)), given.json, engines=False)


async def measured(size: Size, seed: int) -> dict[str, Any]:
    """Raises ConfigError where a process ends, a router is missing, or there is one core alone."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("the router needs a core of its own, and this process may use one alone")
    load_average = os.getloadavg()
    _allow_open_files()
    with tempfile.TemporaryDirectory(prefix="rosemux-gateway-") as folder:
        run = Path(folder)
        with Processes(run / "logs") as processes:
            bench = await _started(processes, cores, run, seed)
            with _pinned(cores[-1]):
                rounds = await bench.rounds(size)
                streams = [await bench.streams(router, size) for router in bench.children]
    return compared(rounds, streams) | {
        "rate_per_s": RATE_PER_S,
        "tokens": TOKENS,
        "rounds": size.latency_rounds,
        "versions": VERSIONS,
        "cores": len(cores),
        "load_average": {"before": load_average[0], "after": os.getloadavg()[0]},
    }


async def _started(processes: Processes, cores: list[int], run: Path, seed: int) -> "GatewayBench":
    ports = free_ports(ENGINES + 2 * len(VERSIONS))
    engines, others = ports[:ENGINES], ports[ENGINES:]
    stub = [sys.executable, "-m", "benchmarks.gateway.stub_engine", "--ports", *map(str, engines)]
    processes.start("stub", stub, core=cores[1])
    at = {"direct": engines[0]} | dict(zip(VERSIONS, others[::2], strict=True))
    bench = GatewayBench(processes, at, {}, seed)
    await bench.ready(DIRECT)
    for router, metrics in zip(VERSIONS, others[1::2], strict=True):
        bench.children[router] = start(
            processes, router, at[router], engines, core=cores[0], run=run, metrics=metrics
        )
    await bench.ready(ARMS)
    return bench


class GatewayBench:
    def __init__(
        self, processes: Processes, ports: dict[str, int], children: dict[str, Child], seed: int
    ) -> None:
        self._processes = processes
        self._ports = ports
        self.children = children
        self._seed = seed
        self._numbers = itertools.count(1)

    async def ready(self, arms: tuple[RouterArm, ...]) -> None:
        """Waits until each has served all of its requests. Raises ConfigError."""
        until_s = _CLOCK.now() + _UP_S
        for arm in arms:
            while True:
                self._processes.check()
                try:
                    for stream in (False, True):
                        requests = self._requests(arm, TOKENS, stream=stream)
                        async with ConnectionPool(requests.port, kept=1) as connections:
                            for one in await closed_loop(
                                requests, connections, clients=1, seconds=0.1
                            ):
                                requests.check(one)
                    break
                except (OSError, ValueError) as error:
                    if _CLOCK.now() > until_s:
                        raise ConfigError(f"{arm.name} serves nothing: {error}") from error
                    await asyncio.sleep(0.2)

    async def rounds(self, size: Size) -> Rounds:
        rounds = Rounds()
        for arm, number in interleaved((*DIRECT, *ARMS), size.latency_rounds):
            for stream in (False, True):
                random = Random(f"{self._seed} {number} {stream}")
                found = await self._latencies(arm, size, random, stream=stream)
                rounds.outside.setdefault((arm, stream), []).append(found)
        for arm, _ in interleaved((*DIRECT, *ARMS), size.served_rounds):
            for kind in SATURATIONS:
                found_served = await self._served(arm, kind, size)
                rounds.served.setdefault((arm, kind), []).append(found_served)
        return rounds

    async def _latencies(
        self, arm: RouterArm, size: Size, random: Random, *, stream: bool
    ) -> Outside:
        self._set_pace(STEP_S)
        requests = self._requests(arm, TOKENS, stream=stream)
        async with ConnectionPool(requests.port, kept=48) as connections:
            await closed_loop(requests, connections, clients=8, seconds=0.05)
            with _no_garbage_collection():
                exchanges = await open_loop(
                    requests, connections, rate=RATE_PER_S, seconds=size.latency_s, random=random
                )
        self._check(arm, requests, exchanges)
        return Outside.of(exchanges, self._times())

    async def _served(self, arm: RouterArm, kind: str, size: Size) -> LoopWindow:
        tokens, stream, step_s = SATURATIONS[kind]
        self._set_pace(step_s)
        requests = self._requests(arm, tokens, stream=stream)
        async with ConnectionPool(requests.port, kept=CLIENTS) as connections:
            await closed_loop(requests, connections, clients=CLIENTS, seconds=0.05)
            with _no_garbage_collection():
                before, began_s = self._account(arm.router), _CLOCK.now()
                exchanges = await closed_loop(
                    requests, connections, clients=CLIENTS, seconds=size.served_s
                )
                core_s = sum(used(before, self._account(arm.router)).values())
                wall_s = _CLOCK.now() - began_s
        self._check(arm, requests, exchanges)
        self._times()
        return LoopWindow(requests=len(exchanges), core_s=core_s, wall_s=wall_s)

    async def streams(self, router: str, size: Size) -> Streams:
        """Holds the streams on the router's route for token ids."""
        arm = next(arm for arm in ARMS if arm.router == router)
        self._set_pace(1.0)
        requests = self._requests(arm, size.stream_tokens, stream=True)
        process, found = self.children[router], Streams(router=router)
        idle_mb = _rss_mb(process)

        async def observe() -> None:
            await asyncio.sleep(size.held_s / 3)
            before, began_s = self._account(router), _CLOCK.now()
            await asyncio.sleep(size.held_s / 2)
            core_s = sum(used(before, self._account(router)).values())
            found.core_share = core_s / (_CLOCK.now() - began_s)
            found.at_s, found.rss_mb = _CLOCK.now(), _rss_mb(process)

        async with ConnectionPool(requests.port, kept=size.streams) as connections:
            with _no_garbage_collection():
                observing: list[asyncio.Task[None]] = []
                exchanges = await held_streams(
                    requests,
                    connections,
                    streams=size.streams,
                    opened_per_s=size.opened_per_s,
                    on_open=lambda: observing.append(asyncio.ensure_future(observe())),
                )
                await asyncio.gather(*observing)
        found.idle_rss_mb = idle_mb
        found.count(exchanges, requests.check, Outside.of(exchanges, self._times()))
        return found

    def _requests(self, arm: RouterArm, tokens: int, *, stream: bool) -> Requests:
        return Requests(arm.route, self._ports[arm.router], tokens, stream, self._numbers)

    def _check(self, arm: RouterArm, requests: Requests, exchanges: list[Exchange]) -> None:
        """Raises ConfigError for a wrong reply: figures of a router that loses tokens are none."""
        self._processes.check()
        for exchange in exchanges:
            try:
                requests.check(exchange)
            except ValueError as error:
                raise ConfigError(f"{arm.name}: {error}") from error

    def _account(self, router: str) -> Account:
        return account(self.children[router].tree()) if router in self.children else {}

    def _set_pace(self, step_s: float) -> None:
        self._ask_stub("/pace", msgspec.json.encode(step_s))

    def _times(self) -> Times:
        return msgspec.json.decode(self._ask_stub("/times", b""), type=dict[int, list[int]])

    def _ask_stub(self, path: str, body: bytes) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._ports["direct"])
        connection.request("POST", path, body)
        reply = connection.getresponse().read()
        connection.close()
        return reply


def _rss_mb(child: Child) -> float:
    return sum(process.memory_info().rss for process in child.tree()) / 1e6


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _allow_open_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
