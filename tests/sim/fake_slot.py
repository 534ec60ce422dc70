"""One slot in virtual time: the real pulse state, agent policy and gate around a fake engine.

Production and guest share one device that runs one step at a time and never interrupts one, which
is the worst case of a gate without an isolation backend: every admitted step delays production by
all of it.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from math import ceil

from coserve.law.gate import GuestLoad, StepDecision, decide
from coserve.law.phantom import rest_s
from coserve.law.step_time import StepTimeModel
from coserve.pulse.engine_cores import EngineStep
from coserve.pulse.pulse_state import EngineShape, PulseState
from harvester.contracts.ids import Epoch, LeaseId
from harvester.contracts.page import Grant, GrantMode, Guest, PageFault, Pulse, Reading
from harvester.policy.effects import Effect, WriteGrant
from harvester.policy.sample import GuestReading, LeaseView, MemoryReading, PulseReading, SlotSample
from harvester.policy.settings import BudgetSettings, ProofSettings, SlotSettings
from harvester.policy.slot import SlotPolicy

PULSE = "pulse.prod.0"
STEP_TOKENS = 512
STEP_BASE_S, STEP_S_PER_TOKEN, STEP_S_PER_REQUEST = 0.004, 1e-4, 5e-4
GUEST_KV_TOKENS = 65_536
_BYTES_PER_TOKEN = 4
_GUEST_DECODES = 16


@dataclass(slots=True)
class Request:
    at_s: float
    prompt_tokens: int
    output_tokens: int
    key: int = 0
    prefilled: int = 0
    produced: int = 0
    ttft_s: float = 0.0
    last_token_s: float = 0.0
    leaves_after: int = 1 << 30
    """Tokens after which the client goes. The engine learns of it a step later."""
    unseen: bool = False
    """It reaches the engine past the middleware."""
    left: bool = False


@dataclass
class FakeProduction:
    """Decodes first, then prefills in order, cut where the step is full; KV from admission on."""

    kv_tokens: int = 1 << 20
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    served: list[Request] = field(default_factory=list)
    state: PulseState = field(
        default_factory=lambda: PulseState(EngineShape(step_tokens=STEP_TOKENS))
    )

    def arrive(self, request: Request) -> None:
        self.waiting.append(request)
        if request.unseen:
            return
        body_bytes = 100 + _BYTES_PER_TOKEN * request.prompt_tokens
        self.state.arrive(request.key, body_bytes=body_bytes, now_ns=_ns(request.at_s))

    @property
    def kv_usage_ratio(self) -> float:
        held = sum(one.prompt_tokens + one.output_tokens for one in self.running)
        return held / self.kv_tokens

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def step(self, now: float) -> float:
        """Takes one step from `now` on; returns when it ends."""
        self._admit()
        decodes = [one for one in self.running if one.prefilled == one.prompt_tokens]
        room, pieces = STEP_TOKENS - len(decodes), 0
        first: list[Request] = []
        for one in self.running:
            piece = min(room - pieces, one.prompt_tokens - one.prefilled)
            if piece > 0:
                one.prefilled += piece
                pieces += piece
                if one.prefilled == one.prompt_tokens:
                    first.append(one)
        end_s = now + STEP_BASE_S + STEP_S_PER_TOKEN * pieces + STEP_S_PER_REQUEST * len(decodes)
        self._leave(now)
        gaps = tuple(end_s - one.last_token_s for one in decodes if not one.left)
        for one in (*decodes, *first):
            one.produced += 1
            one.last_token_s = end_s
        for one in first:
            one.ttft_s = end_s - one.at_s
        self._report(first, gaps, end_s)
        return end_s

    def _leave(self, now: float) -> None:
        """Clients that go while the next step is on its way: it runs with their requests in it."""
        for one in self.running:
            if not one.left and one.produced >= one.leaves_after:
                one.left = True
                self.state.finish(one.key, now_ns=_ns(now))

    def _admit(self) -> None:
        while self.waiting:
            one = self.waiting[0]
            need = (one.prompt_tokens + one.output_tokens) / self.kv_tokens
            if self.running and self.kv_usage_ratio + need > 1.0:
                return
            self.running.append(self.waiting.popleft())

    def _report(self, first: list[Request], gaps: tuple[float, ...], end_s: float) -> None:
        done = [one for one in self.running if one.produced >= one.output_tokens and not one.left]
        gone = [one for one in self.running if one.left and one.produced > one.leaves_after + 1]
        step = EngineStep(
            running=len(self.running) - len(done) - len(gone),
            waiting=len(self.waiting),
            kv_usage_ratio=self.kv_usage_ratio,
            ttft_s=tuple(one.ttft_s for one in first),
            wall_s=end_s,
            prompt_tokens=sum(one.prompt_tokens for one in first),
            generation_tokens=len(first) + len(gaps),
            inter_token_s=gaps,
            finished_prompt_tokens=tuple(one.prompt_tokens for one in done),
            ours=bool(first or gaps),
        )
        self.state.step(step, now_ns=_ns(end_s))
        for one in done:
            self.running.remove(one)
            self.served.append(one)
            self.state.finish(one.key, now_ns=_ns(end_s))
        for one in gone:
            self.running.remove(one)


@dataclass
class Beat:
    at_s: float
    grant: Grant
    effects: tuple[Effect, ...]


class FakeSlot:
    def __init__(self, *, guest: bool, kv_tokens: int = 1 << 20, ttft_slo_s: float = 0.25) -> None:
        self.now = 100.0
        self.production = FakeProduction(kv_tokens=kv_tokens)
        self.settings = SlotSettings(
            ttft_slo_s=ttft_slo_s,
            proof=ProofSettings(share_ratio=0.0),
            # These loads miss their SLO alone; a budget that an hour of traffic has not earned yet
            # would stop the guest before the laws under test here do.
            budget=BudgetSettings(enforced=False),
            blocking_ratio=1.0,
        )
        self.policy = SlotPolicy(self.settings)
        self.beats: list[Beat] = []
        self.guest_steps: list[tuple[float, float]] = []
        """(start, end)"""
        self.down_until_s = 0.0
        self._owed_s, self._quiet_s, self._rested_s = 0.0, 0.0, 0.0
        self._rests_until_s = 0.0
        self._guest = guest
        self._guest_time = StepTimeModel(
            base_s=2e-4, decode_s=2e-5, prefill_s=5e-5, factor=1.0, samples=1000
        )
        self._next_beat_s = self.now
        self._next_refit_s = self.now + 1.0
        self._keys = 0
        self.grant = Grant(epoch=1, mode=GrantMode.CLOSED)

    def restart_production(self, *, down_s: float) -> None:
        """Its requests and counters are gone, and its page expires until it is back."""
        served = self.production.served
        self.production = FakeProduction(self.production.kv_tokens, served=served)
        self.down_until_s = self.now + down_s

    def run(self, until_s: float, arrivals: list[Request]) -> None:
        coming = deque(sorted(arrivals, key=lambda one: one.at_s))
        while self.now < until_s:
            while coming and coming[0].at_s <= self.now:
                self._keys += 1
                coming[0].key = self._keys
                self.production.arrive(coming.popleft())
            self._beat()
            if self.production.busy and self.now >= self.down_until_s:
                end_s = self.production.step(self.now)
                while coming and coming[0].at_s <= end_s:
                    self._keys += 1
                    coming[0].key = self._keys
                    self.production.arrive(coming.popleft())
                self.now = end_s
                self._guest_step()
            elif not self._guest_step():
                soonest = min(coming[0].at_s if coming else until_s, self._rests_until_s)
                self.now = min(max(soonest, self.now + 1e-6), self._next_beat_s)

    def guest_time_s(self, since_s: float, until_s: float) -> float:
        """Guest time of the steps that began between the two, in s."""
        return sum(end - start for start, end in self.guest_steps if since_s <= start < until_s)

    def pulse(self) -> Reading[Pulse]:
        if self.now < self.down_until_s:
            return Reading(None, PageFault.EXPIRED)
        return Reading(self.production.state.pulse(now_ns=_ns(self.now)), None)

    def _guest_step(self) -> bool:
        decision = self._decide()
        if decision.owed_s is not None:
            self._owed_s, self._rested_s = decision.owed_s, self.now
        self._rests_until_s = self.now + (decision.rest_s or math.inf)
        if not self._guest or not decision.open:
            return False
        decodes = min(_GUEST_DECODES, decision.tokens)
        taken_s = self._guest_time.predict_s(
            decodes=decodes, prefill_tokens=decision.tokens - decodes, context_tokens=0
        )
        self.guest_steps.append((self.now, self.now + taken_s))
        self.now += taken_s
        self._owed_s = 0.0
        if decision.mean_wait_s is not None:
            self._owed_s = self._quiet_s = rest_s(taken_s, decision.mean_wait_s, self.grant)
        self._rested_s = self.now
        return True

    def _decide(self) -> StepDecision:
        return decide(
            Reading(self.grant, None),
            [self.pulse()],
            GuestLoad(
                step_time=self._guest_time,
                decodes=_GUEST_DECODES,
                context_tokens=0,
                launched_s=0.0,
                cap=self.settings.step_tokens_max,
                rest_s=self._owed_s,
                quiet_s=self._quiet_s,
                rested_ns=_ns(self._rested_s),
                last_end_ns=_ns(self.guest_steps[-1][1]) if self.guest_steps else 0,
            ),
            may_probe=False,
            now_ns=_ns(self.now),
        )

    def _beat(self) -> None:
        if self.now < self._next_beat_s:
            return
        self._next_beat_s = self.now + self.settings.beat_s
        if self.now >= self._next_refit_s:
            self._next_refit_s = self.now + 1.0
            self.production.state.refit()
        reading = self.pulse()
        steps = len(self.guest_steps)
        guest = Guest(
            steps_launched=steps, steps_finished=steps, kv_tokens_total=GUEST_KV_TOKENS,
            kv_tokens_withheld=self._withheld(),
        )  # fmt: skip
        sample = SlotSample(
            pulses=(PulseReading(name=PULSE, record=reading.record, fault=reading.fault),),
            guest=GuestReading(record=guest),
            lease=LeaseView(epoch=Epoch(1), lease=LeaseId("l1")),
            memory=MemoryReading(used_bytes=50, limit_bytes=100),
        )
        effects = self.policy.observe(sample, now=self.now)
        (self.grant,) = [one.grant for one in effects if isinstance(one, WriteGrant)]
        self.beats.append(Beat(self.now, self.grant, effects))
        state = self.production.state
        if self.grant.mode.admits and self._guest:
            state.alone_since_ns = None
        elif state.alone_since_ns is None:
            state.alone_since_ns = _ns(self.now)

    def _withheld(self) -> int:
        """The guest obeys at once."""
        budget = self.grant.kv_budget_tokens
        return max(0, GUEST_KV_TOKENS - budget) if budget else 0


def chat(
    since_s: float,
    until_s: float,
    *,
    every_s: float,
    prompt_tokens: int = 120,
    output_tokens: int = 20,
) -> list[Request]:
    """Requests like one another, evenly."""
    count = ceil((until_s - since_s) / every_s)
    return [
        Request(since_s + n * every_s, prompt_tokens + 7 * (n % 5), output_tokens)
        for n in range(count)
    ]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
