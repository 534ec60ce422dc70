"""Cost of the pulse for production: `python -m benchmarks.pulse --json PATH`.

Three stock vLLM servers of one model on one core, or one GPU, one with the pulse and two without
anything of ours, take turns: the same requests in each, then a closed loop of eight clients
(32 on a GPU). In one arm the agent scrapes one of the latter once a second. See README.md beside
this file.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.pulse.figures import ARMS, Figures, PulseArm
from benchmarks.pulse.observer import SLOT, observed
from benchmarks.pulse.probe import scraped
from benchmarks.testbed.bursts import trace_of
from benchmarks.testbed.core_time import account, used
from benchmarks.testbed.excerpt import Excerpt, excerpts_of
from benchmarks.testbed.gpu_hardware import find_hardware
from benchmarks.testbed.hardware import CpuHardware, Hardware, add_hardware_option
from benchmarks.testbed.interleaving import interleaved
from benchmarks.testbed.partial_result import PartialResult
from benchmarks.testbed.parts import Parts, run_with_watchdog
from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Processes, pin
from benchmarks.testbed.production import ProductionClient, RandomPrompts, production_session
from benchmarks.testbed.production_model import PROMPT_IDS, write_production_checkpoint
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.reporting import report
from benchmarks.testbed.run_directory import run_directory
from benchmarks.testbed.slot import PRODUCTION_MAX_LEN, ROLLOUT_CORE, SERVING_CORE, url
from benchmarks.testbed.trace import Trace
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineSpec
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.page import PageDirectory

SLICE_S = 10.0
_CLOSED_S = 5.0
_SETTLE_S = 1.5
"""vLLM's workers spin for a second after their last step, on the other's core."""
_BUSY = 0.5
_ENGINE = {
    PulseArm.STOCK: "stock",
    PulseArm.TWIN: "twin",
    PulseArm.METRICS: "stock",
    PulseArm.PULSE: "pulse",
}
_SCRAPES_S = 2.0
"""Time before the first scrape, in s: the process that makes it has to start."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.pulse", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trace", type=Path, help="else bursts of the project's own generator")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--observed", action="store_true", help="an agent observes the server with the pulse"
    )
    add_hardware_option(parser)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # The machine that is asked for is found, and checked, in the run.
    report("pulse", lambda: measured(given), given.json, engines=False)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    hardware = find_hardware(given.hardware)
    hardware.check()
    trace = trace_of(given.trace, seed=given.seed)
    out = given.json.parent / f"{given.json.stem}.run"
    with (
        run_directory(out, cache=given.json.parent / "engine-cache") as paths,
        Processes(paths.logs) as processes,
    ):
        parts = Parts(processes=processes, paths=paths, clock=MonotonicClock())
        bench = PulseBench(parts, trace, given.rounds, given.seed, hardware, given.observed)
        return asyncio.run(bench.run())


@dataclass(slots=True)
class PulseBench:
    parts: Parts
    trace: Trace
    rounds: int
    seed: int
    hardware: Hardware = field(default_factory=CpuHardware)
    observed: bool = False
    """Whether an agent observes the server with the pulse, and none is scraped."""
    clock: MonotonicClock = field(default_factory=MonotonicClock)
    clients: dict[str, ProductionClient] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    _prompts: Iterator[int] = field(default_factory=count)
    """A number for each prompt of the closed loop: two arms share an engine and its cache."""

    async def run(self) -> dict[str, Any]:
        """Raises RoseMuxError when a part fails."""
        ports = dict(zip(("stock", "pulse", "twin"), free_ports(3), strict=True))
        await self._start(ports)
        client_core = self.hardware.core(ROLLOUT_CORE)
        if client_core is not None:
            os.sched_setaffinity(0, {client_core})
        async with production_session() as session:
            for name, port in ports.items():
                self.clients[name] = ProductionClient(
                    session=session,
                    url=url(port),
                    model=name,
                    prompts=RandomPrompts(
                        seed=self.seed, first_id=PROMPT_IDS[0], last_id=PROMPT_IDS[1]
                    ),
                    clock=self.clock,
                    record=self.figures.requests.append,
                )
            await run_with_watchdog(self.parts.one_dies(), self._rounds())
        return self._result()

    def _result(self) -> dict[str, Any]:
        settings = {
            "trace": self.trace.name,
            "hardware": self.hardware.kind.value,
            "observed": self.observed,
        }
        return settings | self.figures.result()

    async def _start(self, ports: dict[str, int]) -> None:
        """Waits until all answer, pinned to their core if they have one."""
        in_turn = self.hardware.starts_in_turn
        model = self.parts.paths.run / "models" / "production"
        sizes = self.hardware.pulse_sizes
        context_tokens = max(PRODUCTION_MAX_LEN, sizes.input_max + sizes.output_max)
        write_production_checkpoint(model, shape=self.hardware.shape, context_tokens=context_tokens)
        pages = PageDirectory.create(self.parts.paths.pages / SLOT)
        PageDirectory.create(self._scraped)
        for name, port in ports.items():
            spec = EngineSpec(
                name=name,
                model=model,
                port=port,
                max_model_len=context_tokens,
                max_num_seqs=self.hardware.production_requests,
                vllm=capabilities(installed_vllm_version()),
                gpu=self.hardware.stock(len(ports)),
                extra_arguments=(
                    *("--load-format", "dummy"),
                    *("--max-num-batched-tokens", str(self.hardware.step_tokens)),
                    *self.hardware.engine_arguments(),
                ),
            )
            beside = launch.production(spec, pages=pages.path)
            self.parts.engine(
                name,
                beside if name == "pulse" else launch.stock(spec),
                self.hardware.engine_environment(self.parts.paths.cache),
            )
            if in_turn:
                await self.parts.answers(name, url(port), self._on_progress)
        for name, port in ports.items():
            if not in_turn:
                await self.parts.answers(name, url(port), self._on_progress)
            pin(self.parts.running[name], self.hardware.core(SERVING_CORE))

    @property
    def _scraped(self) -> Path:
        """Pages of the process that scrapes."""
        return self.parts.paths.pages / "scraped"

    async def _rounds(self) -> None:
        sizes = self.hardware.pulse_sizes
        guess = excerpts_of(self.trace, count=1, duration_s=SLICE_S, rate=3.0)[0].sized(sizes)
        for name in self.clients:
            await self._closed(name, guess)
        rate = _BUSY * await self._closed("stock", guess) / _CLOSED_S
        # Beside the logs.
        kept = PartialResult(self.parts.paths.logs.parent / "parts.json")
        kept.keep({"rounds": 0})
        excerpts = [
            excerpt.sized(sizes)
            for excerpt in excerpts_of(self.trace, count=self.rounds, duration_s=SLICE_S, rate=rate)
        ]
        arms = (PulseArm.STOCK, PulseArm.PULSE, PulseArm.TWIN) if self.observed else ARMS
        for number, excerpt in enumerate(excerpts):
            for arm, _ in interleaved(arms, number + 1, first=number):
                client = self.clients[_ENGINE[arm]]
                await asyncio.sleep(_SETTLE_S)
                engine = self.parts.running[_ENGINE[arm]].tree()
                async with self._level(arm, client.url):
                    before = account(engine)
                    await client.replay(
                        excerpt.arrivals, arm=arm, block=number, start_s=self.clock.now()
                    )
                    self.figures.core_s[arm].append(used(before, account(engine)))
                    done = await self._closed(_ENGINE[arm], excerpt)
                self.figures.closed[arm].append(done / _CLOSED_S)
            kept.keep({"rounds": number + 1} | self._result())
            self._on_progress(
                f"round {number + 1} of {self.rounds}, {len(excerpt.arrivals)} requests"
            )

    @asynccontextmanager
    async def _level(self, arm: PulseArm, url: str) -> AsyncIterator[None]:
        if arm is PulseArm.PULSE and self.observed:
            # On production's own core, where its time is production's.
            async with observed(self.parts, core=self.hardware.core(SERVING_CORE)):
                yield
            return
        if arm is not PulseArm.METRICS:
            yield
            return
        async with scraped(url, self._scraped):
            await asyncio.sleep(_SCRAPES_S)
            yield

    async def _closed(self, name: str, excerpt: Excerpt) -> int:
        """Requests that the clients get through in the time, one after another each."""
        client = replace(self.clients[name], record=_nothing)
        arrivals, done = excerpt.endless(), 0
        until_s = self.clock.now() + _CLOSED_S

        async def lane() -> None:
            nonlocal done
            while self.clock.now() < until_s:
                arrival = replace(next(arrivals), t_s=0.0)
                await client.replay(
                    [arrival], arm="closed", block=next(self._prompts), start_s=self.clock.now()
                )
                done += 1

        await asyncio.gather(*(lane() for _ in range(self.hardware.clients)))
        return done

    def _on_progress(self, message: str) -> None:
        print(f"{self.clock.now():8.0f} s  {message}", file=sys.stderr, flush=True)


def _nothing(_: ProductionRequest) -> None:
    """Ignores a record: only the closed loop's count matters, not its latencies."""


if __name__ == "__main__":
    main()
