"""Production and a guest on one device, whichever way they share it: what every backend measures.

calibration   the rate that keeps production busy for a set share of its time; forms alone
gate          how soon the guest obeys its grant, and falls silent for an arrival
blocking      what production waits for a running guest step, by the step's rest
arms          production alone twice, beside a guest without a law, and the arms that are given
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from benchmarks.gpu_slot.engines.children import EngineChild
from benchmarks.gpu_slot.engines.orders import EngineForms
from benchmarks.gpu_slot.engines.production import ENGINE
from benchmarks.gpu_slot.engines.request_load import Request, poisson_load
from benchmarks.gpu_slot.engines.step_log import GuestLog, ProductionLog
from benchmarks.gpu_slot.results import Put
from benchmarks.gpu_slot.sharing.agent_arm import AgentArm
from benchmarks.gpu_slot.sharing.blocking import Form, blocking_figures, overlaps, times_alone
from benchmarks.gpu_slot.sharing.gate_times import (
    arrival_to_silence_s,
    closing_to_silence_s,
    grant_to_step_s,
    launched_after_arrival,
    summary_ms,
)
from benchmarks.gpu_slot.sharing.grant_writer import GrantWriter
from benchmarks.gpu_slot.sharing.step_figures import arm_figures, busy_ratio, guest_figures, ratios
from benchmarks.rotation import rotated
from harvester.contracts.page import Grant, GrantMode, PageDirectory, ProductionModel, pulse_page

ALONE, ALONE_AGAIN, UNGATED = "alone", "alone_again", "ungated"
_CALIBRATIONS = 2
_EPSILON = 0.05
_WIDE_SLO_S = 1e3
_PHANTOM_TOKENS = 1 << 20
"""So many that a request of a real prompt has next to none of the phantom's slack."""
_ROOM = 4.0
_FIRST_PREDICTION_S = 0.1
"""A guest that has not stepped yet predicts steps of tens of milliseconds."""
_SETTLE_S = 0.6
"""A guest believes the page of a writer that is gone until it expires."""
_PAUSES = 4.0
_PAUSE_LEAST_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is served and stepped, and for how long."""

    production: EngineForms
    guest: EngineForms
    prompts: Mapping[int, float]
    """Of production's requests, with their weights."""
    output_tokens: int
    slice_s: float
    rounds: int
    busy_ratio: float = 0.4
    """Production's share of the time alone."""
    first_rate_per_s: float = 4.0
    openings: int = 25
    """0 leaves out how soon the gate obeys."""
    arrivals_s: float = 8.0
    arrivals_per_s: float = 15.0


FULL = Sizes(
    production=EngineForms(
        prefills=(128, 512, 1024, 2048, 4096), decodes=(1, 2, 4, 8, 16, 32), context_tokens=1024
    ),
    guest=EngineForms(prefills=(128, 512, 2048), decodes=(1, 4, 16, 64), context_tokens=1024),
    prompts={128: 0.3, 512: 0.35, 1024: 0.2, 2048: 0.12, 4096: 0.03},
    output_tokens=32,
    slice_s=3.0,
    rounds=3,
)
SHORT = replace(
    FULL,
    guest=EngineForms(prefills=(512,), decodes=(16, 64), context_tokens=1024),
    rounds=1,
    openings=0,
    arrivals_s=5.0,
)
"""For backends that are measured in several settings."""
REHEARSED = Sizes(
    production=EngineForms(prefills=(8, 16, 32), decodes=(1, 2, 4), context_tokens=16),
    guest=EngineForms(prefills=(8, 32), decodes=(1, 4), context_tokens=16),
    prompts={8: 0.5, 16: 0.3, 32: 0.2},
    output_tokens=4,
    slice_s=0.5,
    rounds=1,
    openings=3,
    arrivals_s=1.0,
    arrivals_per_s=20.0,
)


@dataclass(slots=True)
class Sharing:
    """One pair of engines on one slot."""

    production: EngineChild
    guest: EngineChild
    """The same process where both are in one."""
    pages: PageDirectory
    sizes: Sizes
    put: Put
    _guest_alone_s: dict[Form, float] = field(default_factory=dict)

    async def measure(self, arms: Mapping[str, AgentArm], rate_per_s: float) -> None:
        """All of it; `arms` are under the agent, beside those that need none."""
        with GrantWriter(self.pages) as grant:
            await self._guest_alone(grant)
            if self.sizes.openings:
                await self._gate(grant)
            await self._blocking(grant)
        await self._rounds(arms, rate_per_s)

    async def calibrated_rate(self) -> float:
        """Requests per second that keep production busy for its share of the time."""
        rate_per_s = self.sizes.first_rate_per_s
        for seed in range(_CALIBRATIONS):
            log = await self._served(self._load(rate_per_s, seed=seed))
            busy = busy_ratio([log], self.sizes.slice_s)
            if busy > 0.0:
                rate_per_s *= self.sizes.busy_ratio / busy
        self.put("requests_per_s", rate_per_s)
        return rate_per_s

    async def _guest_alone(self, grant: GrantWriter) -> None:
        grant.write(_grant(GrantMode.UNGATED))
        log = await self.guest.roll(seconds=self.sizes.slice_s, mixed=True)
        grant.write(_grant(GrantMode.CLOSED))
        self._guest_alone_s = times_alone(log.steps)
        named = {f"{k}_{n}": 1e3 * s for (k, n), s in sorted(self._guest_alone_s.items())}
        self.put("guest_step_ms", named)

    async def _gate(self, grant: GrantWriter) -> None:
        """Openings and closings while production is idle."""
        opened, closed, chance = list[int](), list[int](), Random(1)
        pause_s = _PAUSES * max(self._guest_alone_s.values(), default=0.0) + _PAUSE_LEAST_S
        seconds = 2.2 * self.sizes.openings * pause_s
        rolling = asyncio.ensure_future(self.guest.roll(seconds=seconds))
        await asyncio.sleep(pause_s)
        for _ in range(self.sizes.openings):
            opened.append(grant.write(self._open_grant()))
            await asyncio.sleep(pause_s * chance.uniform(0.5, 1.0))
            closed.append(grant.write(_grant(GrantMode.CLOSED)))
            await asyncio.sleep(pause_s * chance.uniform(0.5, 1.0))
        log = await rolling
        until = [*opened[1:], closed[-1] + int(pause_s * 5e8)]
        self.put(
            "gate_ms",
            {
                "grant_to_step": summary_ms(grant_to_step_s(opened, log.steps)),
                "closing_to_silence": summary_ms(closing_to_silence_s(closed, until, log.steps)),
            },
        )

    async def _blocking(self, grant: GrantWriter) -> None:
        """Short requests, each of which meets a guest that steps while production is idle."""
        sizes = self.sizes
        load = poisson_load(
            rate_per_s=sizes.arrivals_per_s,
            seconds=sizes.arrivals_s,
            prompts={min(sizes.production.prefills): 1.0},
            output_tokens=2,
            seed=1,
        )
        alone = await self.production.serve(load, seconds=sizes.arrivals_s)
        grant.write(self._open_grant())
        beside, guest = await asyncio.gather(
            self.production.serve(load, seconds=sizes.arrivals_s),
            self.guest.roll(seconds=sizes.arrivals_s, mixed=True),
        )
        grant.write(_grant(GrantMode.CLOSED))
        found = overlaps(
            beside.steps,
            guest.steps,
            production_alone_s=times_alone(alone.steps),
            guest_alone_s=self._guest_alone_s,
        )
        self.put("blocking", blocking_figures(found))
        silence = arrival_to_silence_s(beside.requests, guest.steps)
        self.put(
            "arrivals",
            {
                "requests": len(beside.requests),
                "to_silence_ms": summary_ms(silence),
                "steps_launched_after": launched_after_arrival(beside.requests, guest.steps),
            },
        )

    async def _rounds(self, arms: Mapping[str, AgentArm], rate_per_s: float) -> None:
        """The arms in turn, with the same requests in each of a round."""
        names = (ALONE, UNGATED, *arms, ALONE_AGAIN)
        production: dict[str, list[ProductionLog]] = {name: [] for name in names}
        guest: dict[str, list[GuestLog]] = {name: [] for name in names}
        for name, turn in rotated(names, self.sizes.rounds):
            load = self._load(rate_per_s, seed=100 + turn)
            if name in arms:
                async with arms[name].leased():
                    served, rolled = await self._beside(load)
            else:
                mode = GrantMode.UNGATED if name == UNGATED else GrantMode.CLOSED
                with GrantWriter(self.pages) as grant:
                    grant.write(_grant(mode))
                    await asyncio.sleep(_SETTLE_S)
                    served, rolled = await self._beside(load)
            production[name].append(served)
            guest[name].append(rolled)
            if len({len(logs) for logs in production.values()}) == 1:
                self._put_arms(production, guest)

    def _put_arms(
        self, production: dict[str, list[ProductionLog]], guest: dict[str, list[GuestLog]]
    ) -> None:
        alone = production[ALONE]
        seconds = len(alone) * self.sizes.slice_s
        self.put("rounds", len(alone))
        self.put(
            "arms",
            {
                name: {
                    "production_busy_ratio": busy_ratio(logs, seconds),
                    "production": arm_figures(logs),
                    "over_alone": ratios(logs, alone),
                    "guest": guest_figures(guest[name], seconds),
                }
                for name, logs in production.items()
            },
        )

    async def _beside(self, load: Sequence[Request]) -> tuple[ProductionLog, GuestLog]:
        seconds = self.sizes.slice_s
        return await asyncio.gather(self._served(load), self.guest.roll(seconds=seconds))

    async def _served(self, load: Sequence[Request]) -> ProductionLog:
        return await self.production.serve(load, seconds=self.sizes.slice_s)

    def _load(self, rate_per_s: float, *, seed: int) -> tuple[Request, ...]:
        return poisson_load(
            rate_per_s=rate_per_s,
            seconds=self.sizes.slice_s,
            prompts=self.sizes.prompts,
            output_tokens=self.sizes.output_tokens,
            seed=seed,
        )

    def _open_grant(self) -> Grant:
        """Idle production leaves slack for the longest step many times over; a request in flight,
        whose own share is epsilon of a step, leaves none."""
        longest_s = max(self._guest_alone_s.values(), default=0.0)
        phantom_s = (_ROOM * longest_s + _FIRST_PREDICTION_S) / _EPSILON
        model = ProductionModel(prefill_s_per_token=phantom_s / _PHANTOM_TOKENS)
        return _grant(GrantMode.OPEN, model)


def _grant(mode: GrantMode, model: ProductionModel | None = None) -> Grant:
    return Grant(
        epoch=1,
        mode=mode,
        pulses=(pulse_page(ENGINE, 0),),
        ttft_slo_s=_WIDE_SLO_S,
        itl_slo_s=_WIDE_SLO_S,
        epsilon=_EPSILON,
        phantom_prompt_tokens=_PHANTOM_TOKENS,
        production=model or ProductionModel(),
    )
