"""One run of the arms: engines, preparation, rounds, then stops of the guest."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import msgspec

from benchmarks.coserve.activation import Activations
from benchmarks.coserve.arms import IN_ROUNDS, NO_VERDICT, SETTINGS, Arm
from benchmarks.coserve.closed_gate import closed_gate
from benchmarks.coserve.failsafe import FailSafe, TrialLog
from benchmarks.coserve.figures import Facts, figures, proving_figures
from benchmarks.coserve.memory import Shrinks
from benchmarks.coserve.preparation import Preparation
from benchmarks.coserve.reclaim import closings
from benchmarks.coserve.restart import LeftPages, restart
from benchmarks.coserve.rollouts import Rollouts
from benchmarks.coserve.round_log import Plan, RoundLog
from benchmarks.coserve.rounds import ArmSlice, Runner
from benchmarks.coserve.run_length import (
    FULL,
    PROVING_SLICE_S,
    PROVING_SLICES_MAX,
    SHORT,
    RunLength,
)
from benchmarks.coserve.surge import surges
from benchmarks.coserve.unseen import full_kv, long_prompts
from benchmarks.testbed.excerpt import Excerpt, mean_rate
from benchmarks.testbed.hardware import Hardware
from benchmarks.testbed.held_lease import HeldLease
from benchmarks.testbed.interleaving import cycle_rounds, interleaved
from benchmarks.testbed.load import Load
from benchmarks.testbed.partial_result import PartialResult
from benchmarks.testbed.parts import run_with_watchdog
from benchmarks.testbed.processes import freeze
from benchmarks.testbed.production import ProductionClient, RandomPrompts, production_session
from benchmarks.testbed.production_model import PROMPT_IDS
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.slo import FIRST_LEVEL, ServiceLevel
from benchmarks.testbed.slot import AGENT, PRODUCTION, STOCK, ServingSlot, url
from benchmarks.testbed.trace import Trace
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Guest, Pulse, pulse_page
from harvester.contracts.wire.leases import SlotOffer
from scheduler.gateway.capacity.agent_client import AgentClient

_FIRST_RATE = 3.0


def length_of(given: argparse.Namespace) -> RunLength:
    length = SHORT if given.short else FULL
    return replace(
        length,
        slice_s=given.slice or length.slice_s,
        seconds=length.seconds if given.seconds is None else given.seconds,
        proves=length.proves and not given.new_slot,
        within_s=min(length.within_s, 60.0 * given.minutes),
    )


class Bench:
    def __init__(
        self, slot: ServingSlot, trace: Trace, given: argparse.Namespace, log: RoundLog
    ) -> None:
        self.slot, self.given, self.log = slot, given, log
        self.hardware: Hardware = slot.hardware
        self.length = length_of(given)
        self.clock = MonotonicClock()
        self.started_s = self.clock.now()
        self.trials = TrialLog(given.failsafe, given.failsafe_file)
        self.requests: list[ProductionRequest] = []
        self.load = Load(trace=trace, sizes=self.hardware.scales[0], rate=_FIRST_RATE)
        self.rounds = log.settings.rounds
        # Beside the logs.
        self.kept = PartialResult(slot.parts.paths.logs.parent / "parts.json")
        pages = slot.pages
        self._guest, self._grant = pages.guest_reader(), pages.grant_reader()
        self._last = Guest()
        self._pulse = pages.pulse_reader(pulse_page(PRODUCTION, 0))

    def on_progress(self, message: str) -> None:
        print(f"{self.clock.now() - self.started_s:6.0f} s  {message}", file=sys.stderr, flush=True)

    def guest(self) -> Guest:
        """The guest's last record: a burst that takes the whole core leaves it no time to write."""
        page = self._guest.read().record or self._guest.read_left().record
        self._last = page or self._last
        return self._last

    def pulse(self) -> Pulse:
        return self._pulse.read().record or Pulse()

    async def run(self) -> dict[str, Any]:
        """Raises RoseMuxError when a part fails."""
        self.slot.start_engines()
        if not self.hardware.starts_in_turn:
            self.slot.start_agent(self.slot.experiment(FIRST_LEVEL), shipped=False)
        async with production_session() as session:
            self.session = session
            self.client = ProductionClient(
                session=session,
                url=url(self.slot.ports.production),
                model=PRODUCTION,
                prompts=RandomPrompts(
                    seed=self.given.seed, first_id=PROMPT_IDS[0], last_id=PROMPT_IDS[1]
                ),
                clock=self.clock,
                record=self.requests.append,
            )
            self.lease = HeldLease(AgentClient(session, url(self.slot.ports.agent), timeout_s=5.0))
            self.rollouts = Rollouts(
                session,
                url(self.slot.ports.guest),
                self.lease,
                self.given.seed,
                self.hardware.rollouts,
            )
            result = await run_with_watchdog(self.slot.parts.one_dies(), self._run())
            return result | await self._failsafe()

    async def _run(self) -> dict[str, Any]:
        await self._started()
        self.slot.bind()
        runner = Runner(
            slot=self.slot,
            client=self.client,
            rollouts=self.rollouts,
            lease=self.lease,
            clock=self.clock,
            pulse=self.pulse,
            guest=self.guest,
            level=FIRST_LEVEL,
            requests=self.requests,
        )
        for name in self.slot.parts.running.keys() & {STOCK}:
            freeze(self.slot.parts.running[name])
        preparation = Preparation(runner, self.log, self.length, self.load)
        excerpts = await preparation.run()
        self.load = preparation.load
        parts: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "rounds": lambda: self._rounds(runner, excerpts),
            "reclaim": lambda: self._reclaim(runner, excerpts),
            "closed_gate": lambda: self._closed_gate(runner),
            "unseen": lambda: self._unseen(runner, excerpts[-1]),
        }
        result: dict[str, Any] = {"hardware": self.hardware.kind.value}
        self.kept.keep(result)
        for name, measure in parts.items():
            if name in self.given.only and self._fits(name, self.length.part_s):
                result |= await measure()
                self.kept.keep(result)
        return result

    def _left_s(self) -> float:
        """Remaining seconds of the run's own time."""
        return self.started_s + self.length.within_s - self.clock.now()

    def _fits(self, what: str, takes_s: float) -> bool:
        """Whether a part of `takes_s` seconds still fits into the run."""
        left_s = self._left_s()
        if takes_s <= left_s:
            return True
        self.on_progress(
            f"{what} is left out: {takes_s:.0f} s are more than the {left_s:.0f} s left"
        )
        return False

    async def _started(self) -> None:
        """Waits until engines and agent answer."""
        if not self.hardware.starts_in_turn:
            await self.slot.agent_answers(self.on_progress)
        started_s = self.clock.now()
        await self.slot.engines_answer(self.on_progress)
        self.cold_s = self.clock.now() - started_s
        if self.hardware.starts_in_turn:
            self.slot.start_agent(self.slot.experiment(FIRST_LEVEL), shipped=False)
            await self.slot.agent_answers(self.on_progress)

    async def _rounds(self, runner: Runner, excerpts: tuple[Excerpt, ...]) -> dict[str, Any]:
        self.on_progress(
            f"{self.rounds} rounds of {self.length.slice_s:.0f} s, {mean_rate(excerpts):.1f} "
            f"requests/s of {self.load.sizes.input_scale:g} times the trace's input and "
            f"{self.load.sizes.output_scale:g} times its output"
        )
        cycle = cycle_rounds(len(self.log.settings.arms))
        if self.rounds < cycle:
            self.on_progress(
                f"{cycle} rounds would be a cycle of balanced orders: verdicts stay open"
            )
        self.log.begin(Plan(sizes=self.load.sizes, rate=self.load.rate, level=runner.level))
        needs_proof = self.log.settings.proven and not self.log.is_complete
        ready = not needs_proof or await self._proves(runner)
        rounds_s: list[float] = []
        found = self._figures(runner.level, excerpts) if self.log.rounds else {}
        order = interleaved(self.log.settings.arms, self.rounds, first=len(self.log.rounds))
        for turn, arms in groupby(order if ready else (), key=lambda pair: pair[1]):
            if rounds_s and not self._fits(f"round {turn + 1}", max(rounds_s)):
                break
            began_s, slices = self.clock.now(), list[ArmSlice]()
            self.requests.clear()
            for arm, _ in arms:
                done = await runner.run(arm, turn, excerpts[turn])
                slices.append(done)
                self.on_progress(
                    f"round {turn + 1} {arm}: production on its core "
                    f"{done.production_core_s / done.seconds:.0%}, nothing in flight "
                    f"{done.idle_s / done.seconds:.0%}, guest "
                    f"{done.guest_tokens / done.seconds:,.0f} tokens/s"
                )
            rounds_s.append(self.clock.now() - began_s)
            self.log.add(slices, self.requests)
            found = self._figures(runner.level, excerpts)
            self.kept.keep(found)
        # Other parts are measured under rules of their own.
        await runner.instruct(SETTINGS[Arm.ROSEMUX])
        return found

    async def _proves(self, runner: Runner) -> bool:
        """Serve the guest as shipped until its slot has proven itself: a new one is withheld more
        often. False where the run's time is over before. Raises ConfigError if it does not."""
        excerpts = self.load.excerpts(PROVING_SLICE_S, count=PROVING_SLICES_MAX)
        await runner.instruct(IN_ROUNDS[Arm.ROSEMUX])
        while (left_s := (offer := await self._offer()).proving_left_s) > 0:
            number = len(self.log.proving)
            if number == PROVING_SLICES_MAX:
                raise ConfigError(f"the slot lacks {left_s:.0f} s of its proof: {offer.reason}")
            if not self._fits("the slot's proof", 2 * PROVING_SLICE_S):
                return False
            self.on_progress(f"{left_s:.0f} s until the slot has proven itself")
            self.requests.clear()
            done = await runner.run(Arm.ROSEMUX, number, excerpts[number])
            self.log.prove(done, self.requests)
        return True

    async def _offer(self) -> SlotOffer:
        (offer,) = (await self.lease.agent.offers()).slots
        return offer

    def _figures(self, level: ServiceLevel, excerpts: tuple[Excerpt, ...]) -> dict[str, Any]:
        facts = Facts(
            trace=self.load.trace.name,
            requests_per_s=mean_rate(excerpts[: len(self.log.rounds)]),
            level=level,
            arms=self.log.settings.arms,
        )
        pieces = [msgspec.to_builtins(piece) for piece in self.log.pieces]
        found = figures(self.log.requests, self.log.slices, facts) | {"pieces": pieces}
        return found | proving_figures(self.log.proving, self.log.slices, facts)

    async def _reclaim(self, runner: Runner, excerpts: tuple[Excerpt, ...]) -> dict[str, Any]:
        self.on_progress("the grant closed under load")
        reclaim = await closings(
            runner,
            excerpts[-1],
            self._grant,
            self._guest.read_left,
            seconds=self.length.closings_s,
        )
        self.on_progress("KV back, a sleeping guest to its first token, a surge")
        arrivals = tuple(a for excerpt in excerpts for a in excerpt.arrivals)
        shrinks = Shrinks(runner, self._grant, self._guest, self.session)
        reclaim |= await shrinks.run(self.length.shrinks, arrivals)
        activations = await Activations(runner, self.session).run(self.length.activations)
        return {
            "reclaim": reclaim,
            "activation": {"cold_s": self.cold_s} | activations,
            "surge": await surges(runner, self.length.surges, arrivals, rate=mean_rate(excerpts)),
        }

    async def _closed_gate(self, runner: Runner) -> dict[str, Any]:
        self.on_progress("the gate closed, with requests that wait")
        found = await closed_gate(runner, self._grant, self.length)
        self.on_progress(f"{found}")
        return found

    async def _unseen(self, runner: Runner, excerpt: Excerpt) -> dict[str, Any]:
        pages = LeftPages(self._pulse.read_left, self._guest.read_left)
        parts: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "long_prompt": lambda: long_prompts(runner, self.length.long_prompts, excerpt),
            "full_kv": lambda: full_kv(runner, self.length.full_kv, excerpt),
            "restart": lambda: restart(runner, excerpt, pages),
        }
        found: dict[str, Any] = {}
        for name, measure in parts.items():
            self.on_progress(f"a load that production has never shown: {name}")
            found[name] = await measure()
            self.on_progress(f"{found[name]}")
        return {"unseen": found}

    async def _failsafe(self) -> dict[str, Any]:
        """The agent killed, and stopped; production stays idle, so that the guest always steps.

        Empty where it is left out.
        """
        if "failsafe" not in self.given.only or not self._fits("failsafe", self.length.trial_s):
            return {}
        trials = FailSafe(
            slot=self.slot,
            guest=self.guest,
            lease=self.lease,
            rollouts=self.rollouts,
            clock=self.clock,
            new_agent=self._new_agent,
            on_progress=self.on_progress,
            kept=lambda found: self.kept.keep({"failsafe_ms": found}),
        )
        # The last trial begins so early that it ends in time.
        within_s = min(60.0 * self.given.failsafe_minutes, self._left_s() - self.length.trial_s)
        return {"failsafe_ms": await trials.run(self.trials, within_s=within_s)}

    async def _new_agent(self) -> None:
        self.slot.parts.running[AGENT].process.wait()
        policy = self.slot.experiment(FIRST_LEVEL)
        # It goes on with its predecessor's proof, for any rules and loads measured before.
        self.slot.start_agent(policy | {"proof": policy["proof"] | NO_VERDICT}, shipped=False)
        await self.slot.agent_answers(lambda _: None)
