"""Production and a guest on one device, whichever way they share it: what every backend measures.

gate       how soon the guest obeys its grant
blocking   what production waits for a running guest step, and when the guest falls silent
arms       production alone twice, beside a guest without a law, and the arms that are given
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import msgspec

from benchmarks.gpu_slot.engines.children import EngineChild
from benchmarks.gpu_slot.engines.orders import ENGINE, EngineForms
from benchmarks.gpu_slot.engines.request_load import Request, poisson_load
from benchmarks.gpu_slot.engines.step_log import GuestLog, ProductionLog
from benchmarks.gpu_slot.results import Put
from benchmarks.gpu_slot.sharing.agent_arm import AgentArm
from benchmarks.gpu_slot.sharing.arm_table import ALONE, ArmTable
from benchmarks.gpu_slot.sharing.blocking import (
    Form,
    blocking_figures,
    named_ms,
    overlaps,
    times_alone,
)
from benchmarks.gpu_slot.sharing.gate_times import (
    arrival_to_silence_s,
    closing_to_silence_s,
    grant_to_step_s,
    launched_after_arrival,
    summary_ms,
)
from benchmarks.gpu_slot.sharing.grant_writer import GrantWriter
from benchmarks.testbed.interleaving import interleaved
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Grant, GrantMode, PageDirectory, ProductionModel, pulse_page

ALONE_AGAIN, UNGATED = "alone_again", "ungated"
_GRANT_FIELDS = (
    *("mode", "reason", "step_tokens_cap", "phantom_prompt_tokens", "production", "epsilon"),
    *("blocking_ratio", "preemption_s", "ttft_slo_s", "itl_slo_s"),
)
_EPSILON = 0.05
_WIDE_SLO_S = 1e3
_PHANTOM_TOKENS = 1 << 20
"""Phantom prompt in tokens, so large that a real prompt has almost none of its slack."""
_ROOM = 4.0
_FIRST_PREDICTION_S = 0.1
"""A guest that has not stepped yet predicts steps of tens of milliseconds."""
_SETTLE_S = 0.6
"""A guest believes the page of a writer that is gone until it expires; a slot that has just got
its lease opens some beats later."""
_PAUSES = 4.0
_PAUSE_LEAST_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Requests, steps and their durations: the same under every backend."""

    production: EngineForms
    guest: EngineForms
    prompts: Mapping[int, float]
    """Lengths of production's prompts, with their weights."""
    output_tokens: int
    requests_per_s: float
    slice_s: float
    rounds: int
    openings: int
    """0 leaves out how soon the gate obeys."""
    arrivals_s: float
    arrivals_per_s: float


FULL = Sizes(
    production=EngineForms(
        prefills=(128, 512, 1024, 2048, 4096), decodes=(1, 2, 4, 8, 16, 32), context_tokens=1024
    ),
    guest=EngineForms(prefills=(128, 512, 2048), decodes=(1, 16, 64), context_tokens=1024),
    prompts={128: 0.3, 512: 0.35, 1024: 0.2, 2048: 0.12, 4096: 0.03},
    output_tokens=8,
    # Some two fifths of an H200's time; the result records the actual share.
    requests_per_s=5.5,
    slice_s=3.0,
    rounds=3,
    openings=20,
    arrivals_s=9.0,
    arrivals_per_s=9.0,
)
SHORT = replace(FULL, rounds=1, openings=0)
"""Sizes for backends that are measured in several settings."""
REHEARSED = Sizes(
    production=EngineForms(prefills=(8, 16, 32), decodes=(1, 2, 4), context_tokens=16),
    guest=EngineForms(prefills=(8, 32), decodes=(1, 4), context_tokens=16),
    prompts={8: 0.5, 16: 0.3, 32: 0.2},
    output_tokens=4,
    requests_per_s=40.0,
    slice_s=1.0,  # in half a second a guest on a full machine may make no step
    rounds=1,
    openings=12,
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

    async def measure(self, arms: Mapping[str, AgentArm]) -> None:
        """Measures all parts; `arms` run under the agent, beside those that need none."""
        with GrantWriter(self.pages) as grant:
            # Production's first slice teaches its pulse step times, and is not measured.
            await self._served(self._load(seed=0))
            await self._guest_alone(grant)
            if self.sizes.openings:
                await self._gate(grant)
            await self._blocking(grant)
        await self._rounds(arms)

    async def _guest_alone(self, grant: GrantWriter) -> None:
        grant.write(_grant(GrantMode.UNGATED))
        log = await self.guest.roll(seconds=self.sizes.slice_s, mixed=True)
        grant.write(_grant(GrantMode.CLOSED))
        self._guest_alone_s = times_alone(log.steps)
        self.put("guest_step_ms", named_ms(self._guest_alone_s))

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
        """Requests, short and long by turns of chance, that meet a guest which steps while
        production is idle."""
        sizes = self.sizes
        lengths = sizes.production.prefills
        load = poisson_load(
            rate_per_s=sizes.arrivals_per_s,
            seconds=sizes.arrivals_s,
            # The long ones are slower than any guest step, as most of the short ones are not.
            prompts={min(lengths): 0.5, max(lengths): 0.5},
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

    async def _rounds(self, arms: Mapping[str, AgentArm]) -> None:
        """The arms in turn, with the same requests in each of a round."""
        names = (ALONE, UNGATED, *arms, ALONE_AGAIN)
        table = ArmTable(self.sizes.slice_s)
        for number in range(self.sizes.rounds):
            for name, _ in interleaved(names, number + 1, first=number):
                load = self._load(seed=100 + number)
                try:
                    await self._arm(name, arms.get(name), load, table)
                except ConfigError as error:
                    table.failed(name, str(error))
                self.put("arms", table.figures())

    async def _arm(
        self, name: str, agent: AgentArm | None, load: Sequence[Request], table: "ArmTable"
    ) -> None:
        if agent is not None:
            async with agent.leased():
                await asyncio.sleep(_SETTLE_S)
                served, rolled = await self._beside(load)
                table.granted(name, self._granted())
        else:
            mode = GrantMode.UNGATED if name == UNGATED else GrantMode.CLOSED
            with GrantWriter(self.pages) as grant:
                grant.write(_grant(mode))
                await asyncio.sleep(_SETTLE_S)
                served, rolled = await self._beside(load)
        table.add(name, served, rolled)

    def _granted(self) -> dict[str, Any]:
        """The agent's grant at the end of a slice."""
        reader = self.pages.grant_reader()
        try:
            reading = reader.read()
        finally:
            reader.close()
        if reading.record is None:
            return {"fault": str(reading.fault)}
        fields: dict[str, Any] = msgspec.to_builtins(reading.record)
        return {name: fields[name] for name in _GRANT_FIELDS}

    async def _beside(self, load: Sequence[Request]) -> tuple[ProductionLog, GuestLog]:
        """Both logs up to the end of the slice: afterwards production drains without a guest."""
        seconds = self.sizes.slice_s
        until_ns = monotonic_ns() + int(seconds * 1e9)
        served, rolled = await asyncio.gather(self._served(load), self.guest.roll(seconds=seconds))
        return served.until(until_ns), rolled.until(until_ns)

    async def _served(self, load: Sequence[Request]) -> ProductionLog:
        return await self.production.serve(load, seconds=self.sizes.slice_s)

    def _load(self, *, seed: int) -> tuple[Request, ...]:
        return poisson_load(
            rate_per_s=self.sizes.requests_per_s,
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
