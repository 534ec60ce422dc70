"""One run of the demo from cold engines to its result: what comes after what.

engines start, the warm policy is made    ->  services  ->  trainers publish version 1
two short replays teach the agent production's step times and calibrate the replay's speed
both jobs take one unmeasured step        ->  measured blocks  ->  result
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from harvester.contracts.clock import Clock
from scheduler.demo.blocks import WARM_UP_BLOCK, BlockPlan, BlockRunner
from scheduler.demo.calibration import busy_share, rate_for
from scheduler.demo.gateway_admin import GatewayAdmin
from scheduler.demo.production import ProductionClient, Prompts, production_session
from scheduler.demo.production_model import PROMPT_IDS
from scheduler.demo.records import Arm, ProductionRequest, Record
from scheduler.demo.slo import choose_slo
from scheduler.demo.stack import JOBS, PRODUCTION, ServiceLevel, Stack
from scheduler.demo.trace import Trace
from scheduler.demo.trainer_link import TrainerLink
from scheduler.demo.watch import SlotWatch
from scheduler.demo.weights_audit import WeightsAudit
from scheduler.demo.window import TokenScale, Window, window_of

TOKEN_SCALE = TokenScale(
    input_scale=0.25, output_scale=0.25, input_max=1024, output_min=2, output_max=128
)
# Slow enough for any machine that can run the demo at all; the calibration raises it.
FIRST_RATE = 3.0
FIRST_LEVEL = ServiceLevel(ttft_s=0.25, itl_s=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    blocks: BlockPlan
    calibration_s: float


class Recorder:
    """Keeps every record and writes it down at once, so that an interrupted run leaves them."""

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        self._file = path.open("wb")
        self._encoder = msgspec.json.Encoder()

    def __call__(self, record: Record) -> None:
        self.records.append(record)
        self._file.write(self._encoder.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run leaves for the result besides its records."""

    window: Window
    level: ServiceLevel
    gateway: dict[str, Any]
    hash_mismatches: int | None
    first_harvested_token_s: float | None
    """CLOCK_MONOTONIC."""


@dataclass(slots=True, kw_only=True)
class Session:
    stack: Stack
    trace: Trace
    plan: SessionPlan
    recorder: Recorder
    clock: Clock
    told: Callable[[str], None]
    progress: Callable[[Record], None]
    seed: int
    watch: SlotWatch = field(init=False)

    async def run(self) -> Outcome:
        """Raises RoseMuxError when a part fails; cancelled, it leaves its records."""
        self.stack.start_engines()
        self.stack.start_services(FIRST_LEVEL)
        await asyncio.gather(
            self.stack.engines_ready(self.told), self.stack.services_ready(self.told)
        )
        self.watch = SlotWatch(self.stack.pages, PRODUCTION, clock=self.clock, record=self.recorder)
        watching = asyncio.ensure_future(self.watch.run())
        try:
            async with production_session() as session:
                return await self._measure(session)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _measure(self, session: aiohttp.ClientSession) -> Outcome:
        gateway = GatewayAdmin(session, self.stack.url(self.stack.ports.gateway))
        client = ProductionClient(
            session=session,
            url=self.stack.url(self.stack.ports.production),
            model=PRODUCTION,
            prompts=Prompts(seed=self.seed, first_id=PROMPT_IDS[0], last_id=PROMPT_IDS[1]),
            clock=self.clock,
            record=self._record,
        )
        trainers = await self._trainers()
        window, level = await self._calibrate(client)
        self.stack.promise(level)
        runner = BlockRunner(
            stack=self.stack,
            gateway=gateway,
            client=client,
            trainers=trainers,
            watch=self.watch,
            clock=self.clock,
            record=self._record,
            told=self.told,
        )
        await self._warm(runner, window)
        audit = WeightsAudit(session, self.stack.rollout_urls(), self.stack.paths.weights)
        slices = rounds_of(window, self.plan.blocks.rounds)
        for arm, index in self.plan.blocks.blocks():
            self.told(f"round {index + 1}: {arm}")
            await runner.run(arm, index, slices[index], self.plan.blocks)
            await audit.run()
            if arm is Arm.SERVING_ONLY:
                level = service_level(self.recorder.records)
                self.stack.promise(level)
        return Outcome(
            window=window,
            level=level,
            gateway=await gateway.status(),
            hash_mismatches=audit.hash_mismatches,
            first_harvested_token_s=self.watch.first_guest_token_s,
        )

    def _record(self, record: Record) -> None:
        self.recorder(record)
        self.progress(record)

    async def _trainers(self) -> dict[Arm, TrainerLink]:
        """Start both; each is ready once its first version serves on the dedicated engine."""
        links = {arm: TrainerLink(self.stack.start_trainer(arm)) for arm in JOBS}
        for arm, link in links.items():
            ready = await link.ready()
            self.told(f"job {JOBS[arm]}: {ready.parameters / 1e6:.1f} M parameters published")
        return links

    async def _warm(self, runner: BlockRunner, window: Window) -> None:
        """One step of each job, with production running: caches fill, the guest's model learns."""
        for arm in (Arm.HARVEST, Arm.FIXED):
            async with runner.replaying(arm, WARM_UP_BLOCK, window):
                await runner.step(arm, WARM_UP_BLOCK)

    async def _calibrate(self, client: ProductionClient) -> tuple[Window, ServiceLevel]:
        """Short replays with nothing beside them; the speed and the SLO that follow from them.

        The first is slow, because the engine makes its kernels as it meets new sizes; what it says
        of the speed only sets the second's.
        """
        rate = FIRST_RATE
        for seconds in (self.plan.calibration_s / 2, self.plan.calibration_s):
            short = window_of(self.trace, duration_s=seconds, rate=rate).sized(TOKEN_SCALE)
            seen, busy = await self._replayed(client, short)
            model = self.watch.pulse().model
            computed = busy_share(short.arrivals, model, window_s=short.duration_s)
            rate = rate_for(
                lambda rate: (self._window(rate).arrivals, self._window(rate).duration_s),
                model,
                measured_ratio=busy / computed if computed > 0 else 1.0,
            )
            self.told(
                f"production alone was busy {busy:.0%} at {short.rate:.1f} requests/s; "
                f"replaying at {rate:.1f}"
            )
        slo = choose_slo(seen)
        return self._window(rate), ServiceLevel(ttft_s=slo.ttft_s, itl_s=slo.itl_s)

    async def _replayed(
        self, client: ProductionClient, window: Window
    ) -> tuple[list[ProductionRequest], float]:
        """Its requests, left out of the records, and the share of its time with one in flight."""
        seen: list[ProductionRequest] = []
        quiet = replace(client, record=seen.append)
        start_s, busy_s = self.clock.now(), self.watch.pulse().busy_s_total
        await quiet.replay(
            window.arrivals, arm=Arm.SERVING_ONLY, block=WARM_UP_BLOCK, start_s=start_s
        )
        await asyncio.sleep(max(0.0, start_s + window.duration_s - self.clock.now()))
        elapsed_s = self.clock.now() - start_s
        # The pulse renews its step times once a second.
        await asyncio.sleep(1.5)
        return seen, (self.watch.pulse().busy_s_total - busy_s) / elapsed_s

    def _window(self, rate: float) -> Window:
        blocks = self.plan.blocks
        duration_s = blocks.rounds * blocks.serving_s
        return window_of(self.trace, duration_s=duration_s, rate=rate).sized(TOKEN_SCALE)


def service_level(records: Iterable[Record]) -> ServiceLevel:
    """The SLO that production alone attains in its measured blocks. Needs one request of them."""
    slo = choose_slo(
        [
            record
            for record in records
            if isinstance(record, ProductionRequest)
            and record.arm is Arm.SERVING_ONLY
            and record.block >= 0
        ]
    )
    return ServiceLevel(ttft_s=slo.ttft_s, itl_s=slo.itl_s)


def rounds_of(window: Window, rounds: int) -> tuple[Window, ...]:
    """The window cut into equal parts, one for each round, each counting from its own start."""
    length_s = window.duration_s / rounds
    return tuple(_part(window, index, length_s) for index in range(rounds))


def _part(window: Window, index: int, length_s: float) -> Window:
    start_s = index * length_s
    arrivals = tuple(
        replace(arrival, t_s=arrival.t_s - start_s)
        for arrival in window.arrivals
        if start_s <= arrival.t_s < start_s + length_s
    )
    return replace(window, arrivals=arrivals, duration_s=length_s, start_s=window.start_s + start_s)
