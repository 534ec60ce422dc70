"""The serving node: production, a guest beside it, the node's agent and production's clients.

All of it is on one core, with the trainers: see arms.py. Replays the same light excerpt of a trace
in every arm that has production.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import aiohttp

from benchmarks.multiplex.arms import SERVING_CORE, MultiplexArm, Run
from benchmarks.multiplex.rollout_node import CONCURRENCY
from benchmarks.testbed.calibration import MeasuredReplay, measured_ratio, rate_for
from benchmarks.testbed.excerpt import Excerpt, TokenScale, excerpts_of
from benchmarks.testbed.parts import Parts
from benchmarks.testbed.production import ProductionClient, RandomPrompts
from benchmarks.testbed.production_model import PROMPT_IDS
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import FIRST_LEVEL, choose_slo
from benchmarks.testbed.slot import PRODUCTION, ServingSlot, SlotPorts, url
from benchmarks.testbed.trace import Trace
from harvester.contracts.page import Guest, Pulse, pulse_page

BUSY_SHARE = 0.2
"""Share of its core for production's own steps: light, as on most serving nodes at most hours."""
_SIZES = TokenScale(
    input_scale=0.125, output_scale=0.125, input_max=1024, output_min=2, output_max=128
)
_EXCERPT_S = 60.0
_FIRST_RATE = 3.0
_REPLAY_S = 12.0
# The pulse renews its step times once a second.
_PULSE_S = 1.5
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFigures:
    """Measurements of the node during one arm."""

    run: Run
    seconds: float
    production_busy_s: float
    guest_tokens: int
    """Prefilled and generated."""


class ServingNode:
    """`start`, `answers`, `calibrate`; then `replaying` around each arm."""

    def __init__(self, parts: Parts, ports: Iterator[int], trace: Trace) -> None:
        self.slot = ServingSlot(
            parts,
            SlotPorts(production=next(ports), guest=next(ports), agent=next(ports)),
            core=SERVING_CORE,
            agent_core=SERVING_CORE,
            concurrency=CONCURRENCY,
            places=CONCURRENCY,
        )
        self.requests: list[ProductionRequest] = []
        self.served: list[ServingFigures] = []
        self.excerpt: Excerpt
        self._clock = parts.clock
        self._trace = trace
        self._guest = self.slot.pages.guest_reader()
        self._pulse = self.slot.pages.pulse_reader(pulse_page(PRODUCTION, 0))

    @property
    def agent_url(self) -> str:
        return url(self.slot.ports.agent)

    def start(self) -> None:
        self.slot.start_engines()
        self.slot.start_agent(self.slot.proven(FIRST_LEVEL))

    async def answers(
        self, session: aiohttp.ClientSession, on_progress: Callable[[str], None]
    ) -> None:
        """Waits until all answer; the engines are on their core then."""
        self._client = ProductionClient(
            session=session,
            url=url(self.slot.ports.production),
            model=PRODUCTION,
            prompts=RandomPrompts(seed=_SEED, first_id=PROMPT_IDS[0], last_id=PROMPT_IDS[1]),
            clock=self._clock,
            record=self.requests.append,
        )
        await self.slot.agent_answers(on_progress)
        await self.slot.engines_answer(on_progress)
        self.slot.bind()

    async def calibrate(self) -> None:
        """Finds the replay speed and a first SLO, with production alone."""
        seen: list[ProductionRequest] = []
        excerpt = self._excerpted(_FIRST_RATE, _REPLAY_S).evenly()
        start_s, busy_s = self._clock.now(), self._pulse_now().busy_s_total
        quiet = replace(self._client, record=seen.append)
        await quiet.replay(excerpt.arrivals, arm=MultiplexArm.SERVING, block=-1, start_s=start_s)
        await asyncio.sleep(_PULSE_S)
        pulse, seconds = self._pulse_now(), self._clock.now() - start_s
        replayed = MeasuredReplay(
            arrivals=excerpt.arrivals, seconds=seconds, busy_s=pulse.busy_s_total - busy_s
        )
        rate = rate_for(
            lambda rate: (self._excerpted(rate, _EXCERPT_S),),
            pulse.model,
            measured_ratio=measured_ratio((replayed,), pulse.model),
            target=BUSY_SHARE,
        )
        self.excerpt = self._excerpted(rate, _EXCERPT_S)
        self.slot.instruct(self.slot.proven(choose_slo(seen).level))

    @asynccontextmanager
    async def replaying(self, run: Run) -> AsyncIterator[None]:
        """Production's replay around one arm; requests that were sent are waited for."""
        assert run.arm is not None
        start_s, guest, pulse = self._clock.now(), self._guest_now(), self._pulse_now()
        stopped = asyncio.Event()
        replay = asyncio.ensure_future(
            self._client.replay(
                self.excerpt.endless(),
                arm=run.arm,
                block=run.round,
                start_s=start_s,
                stopped=stopped,
            )
        )
        try:
            yield
            seconds = self._clock.now() - start_s
            busy_s = self._pulse_now().busy_s_total - pulse.busy_s_total
            tokens = self._guest_now().tokens_total - guest.tokens_total
            stopped.set()
            await replay
        finally:
            replay.cancel()
            with suppress(asyncio.CancelledError):
                await replay
        self.served.append(
            ServingFigures(run=run, seconds=seconds, production_busy_s=busy_s, guest_tokens=tokens)
        )
        if run.arm is MultiplexArm.SERVING:
            self._promise_what_stands_without_lease()

    def _promise_what_stands_without_lease(self) -> None:
        """Sets the SLO that production attains without a lease: trainers on its core slow it, which
        is not the guest's fault, so the agent must not stop for it."""
        seen = [each for each in self.requests if each.arm == MultiplexArm.SERVING]
        if seen:
            self.slot.instruct(self.slot.proven(choose_slo(seen).level))

    def _excerpted(self, rate: float, seconds: float) -> Excerpt:
        (excerpt,) = excerpts_of(self._trace, count=1, duration_s=seconds, rate=rate)
        return excerpt.sized(_SIZES)

    def _guest_now(self) -> Guest:
        return self._guest.read().record or Guest()

    def _pulse_now(self) -> Pulse:
        return self._pulse.read().record or Pulse()
