"""The node's control law for one slot: how much the guest may do in the next half second.

    open level = configured maximum * step level;  a breach writes a closed grant in the same beat
    step level: halved by a breach of the miss limit, grown slowly after quiet time

States, conditions and what they lead to are data in `harvester.policy.states`. This module decides
nothing about single steps (the guest's gate does) and touches no page, socket, clock or log.
"""

import math
from functools import partial
from typing import Any, ClassVar

import msgspec

from harvester.contracts.page.records import Grant, GrantMode
from harvester.contracts.wire.error_budget import BudgetReport
from harvester.contracts.wire.leases import KILL_SWITCH, GuardReading, SlotState
from harvester.contracts.wire.stops import StopOrder
from harvester.policy.durable import DurableState, SlotMemory
from harvester.policy.effects import Effect, Quarantine, WriteGrant
from harvester.policy.evictions import EvictionWindow
from harvester.policy.guards import Guards
from harvester.policy.guest_watch import GuestWatch, lacks_consent
from harvester.policy.lease_end import LeaseEnd
from harvester.policy.level import Level
from harvester.policy.production import ProductionView, ProductionWatch
from harvester.policy.reclaim import Reclaim
from harvester.policy.sample import GuestReading, KillSwitch, SlotSample
from harvester.policy.settings import Mode, SlotSettings
from harvester.policy.states import OUTCOMES, TRANSITIONS, Condition, State


class SlotPolicy:
    NAME: ClassVar[str] = "harvester.policy.slot"
    SAMPLE = SlotSample

    def __init__(self, settings: SlotSettings) -> None:
        self.settings = settings
        self._busy_s: float | None = None
        self._install(SlotMemory())

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SlotPolicy":
        return cls(msgspec.convert(config, SlotSettings))

    def snapshot(self) -> dict[str, Any]:
        snapshot: dict[str, Any] = msgspec.to_builtins(self._memory)
        return snapshot

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._install(msgspec.convert(snapshot, SlotMemory))

    def durable(self) -> DurableState:
        return self._memory.durable()

    def resume(self, left: DurableState, *, now: float) -> None:
        """Begin with an earlier process's durable state; its times are in this process's clock.
        Starts in cooldown, so that an agent that crashes in a loop saves its charges before it
        lends."""
        self._install(SlotMemory.resumed(left, now=now))

    def begin(self, life: str) -> None:
        """Begin a run of the agent; `life` is a random name for a history that begins with it."""
        self._memory.life = self._memory.life or life
        self._memory.run += 1

    def quarantine(self, reason: str) -> None:
        self._memory.quarantine = reason

    @property
    def quarantined(self) -> str:
        """Why the slot is quarantined; "" if it is not."""
        return self._memory.quarantine

    @property
    def durable_verdicts(self) -> tuple[object, ...]:
        return self._memory.verdicts

    def guard_readings(self) -> tuple[GuardReading, ...]:
        """Every guard of production, from the fastest to the slowest."""
        guest = self.guest.state
        law = GuardReading(
            guard="slack_law", value=guest.law_ratio, limit=0.0, binds=guest.law_binds
        )
        return law, *self.guards.readings()

    @property
    def state(self) -> State:
        return self._memory.state

    @property
    def condition(self) -> Condition:
        return self._memory.condition

    @property
    def reason(self) -> str:
        return self._memory.reason

    @property
    def idle_ratio(self) -> float | None:
        """Share of recent time in which production had nothing to step; None: unknown."""
        return self._watch.state.idle_ratio

    @property
    def busy_s(self) -> float | None:
        """Time that production spent on steps in the last beat; None: unknown."""
        return self._busy_s

    @property
    def accounted(self) -> tuple[float, float, float]:
        """Numbers of production's requests, of those that missed the SLO beside a guest step, and
        of others that ended before their SLO without a first token."""
        memory = self._memory
        return memory.served.requests, memory.served.misses, memory.unanswered

    def budget_report(self, service: str, *, number: int, leased: bool) -> BudgetReport:
        """`number`: highest of an allotment that the slot has received."""
        memory, budget = self._memory, self.guards.budget
        return BudgetReport(
            service=service,
            life=memory.life,
            run=memory.run,
            served=budget.evidence(memory.served),
            charged=budget.spent,
            number=number,
            limit=budget.limit if leased else None,
            allowed_ratio=budget.allowed_ratio,
            minimum_misses=self.settings.budget.minimum_misses,
            allotment=budget.state.allotment,
        )

    def slot_state(self) -> SlotState:
        """The slot's state as a scheduler sees it."""
        memory = self._memory
        if memory.quarantine:
            return SlotState.QUARANTINED
        if self.settings.mode is not Mode.HARVEST or memory.state in (State.OFF, State.COOLDOWN):
            return SlotState.OFF
        if memory.state is State.LEARNING:
            return SlotState.LEARNING
        if memory.condition in (Condition.STOPPED, Condition.GUESTLESS):
            return SlotState.OFF
        return SlotState.OFFERED

    def observe(self, sample: SlotSample, *, now: float) -> tuple[Effect, ...]:
        if sample.release:
            self._release()
        production = self._watch.observe(sample.pulses, now=now)
        self._busy_s = production.busy_s
        guest = sample.guest.record
        self.guest.observe(sample.guest, leased=sample.lease.lease is not None, now=now)
        self.evictions.observe(guest.aborted_total if guest else None, now=now)
        overspent = self._account(production, sample, now)
        before = self._memory.condition
        condition, reason = self._condition(sample, production, overspent, now)
        if condition is not before or self._memory.since_s is None:
            self._memory.since_s = now
        outcome = OUTCOMES[condition]
        if outcome.breach or sample.kill_switch is not KillSwitch.NONE:
            self._memory.breached_at_s = now
        self._memory.state = TRANSITIONS[self._memory.state, condition]
        self._memory.condition, self._memory.reason = condition, reason
        self.guards.prove(
            production,
            eligible=self.settings.mode is Mode.HARVEST and outcome.proven,
            leased=sample.lease.lease is not None,
            now=now,
        )
        ending = self._lease_end.observe(sample, now=now)
        # A sleeping guest gives up KV that production does not need yet, so it has no deadline.
        acts = self.settings.mode is Mode.HARVEST or self.reclaim.state.since_s is not None
        budget = self._kv_budget_tokens() or None if acts else None
        due = self.reclaim.observe(
            sample.guest,
            budget_tokens=budget,
            now=now,
            shared=sample.guest_kv,
            outcomes=sample.outcomes,
        )
        grant = self._grant(sample, production, now)
        if grant.mode.admits and (due or self.reclaim.state.since_s is not None):
            # Lifted, it has no isolation; what gives memory back needs no grant.
            grant = msgspec.structs.replace(grant, mode=GrantMode.CLOSED, reason="memory is due")
        if grant.mode.admits:
            self.guest.granted(now=now)
        write = WriteGrant(grant=grant, ttl_s=self.settings.grant_ttl_s, reason=grant.reason)
        return (write, *ending, *due, *self._quarantine(sample.guest, now))

    def _release(self) -> None:
        self._memory.quarantine = ""
        self.guards.budget.state.allotment = None
        self.guest.state.losses_s, self.guest.state.crashes_s = [], []
        self.reclaim.state.unreached = ""

    def _quarantine(self, reading: GuestReading, now: float) -> tuple[Effect, ...]:
        """Quarantine a guest that cannot be ended, as it still holds production's memory, and one
        beside which production crashes again and again."""
        memory = self._memory
        fault = self.reclaim.out_of_reach(reading, now=now)
        reason = f"guest owes memory and could not be ended: {fault}" if fault else ""
        began_s = now if memory.since_s is None else memory.since_s
        reason = self.guest.crash(memory.condition, since_s=began_s, now=now) or reason
        if not reason or memory.quarantine:
            return ()
        memory.quarantine = reason
        return (Quarantine(reason=reason),)

    def _install(self, memory: SlotMemory) -> None:
        settings = self.settings
        self._memory = memory
        self._watch = ProductionWatch(settings, memory.watch)
        self.guest = GuestWatch(settings, memory.guest)
        self._kv_level = Level(settings.kv_level, memory.kv_level)
        self.blocking = memory.blocking
        self.evictions = EvictionWindow(settings.evictions_per_hour_max, memory.evictions)
        self.reclaim = Reclaim(settings.kv_deadline_s, memory.reclaim)
        self.guards = Guards(settings, memory)
        self._lease_end = LeaseEnd(settings, memory, self.guest)

    def _account(self, production: ProductionView, sample: SlotSample, now: float) -> bool:
        """Fold the beat's latencies into levels and guards; True if the budget is overspent."""
        guest, settings = sample.guest.record, self.settings
        beside_step = partial(self.guest.stepped_during, now=now)
        if guest is not None:
            self.blocking.observe(
                [x for x in production.itl.seen_s if beside_step(x)],
                alone_s=production.model.decode_s(production.decoding),
                guest_step_s=guest.last_step_s,
            )
        # Production's KV grows into what the guest gives back only where memory is shared.
        shared = sample.memory
        full = shared is not None and (
            shared.used_ratio >= settings.memory_high_ratio
            or production.kv_usage_ratio >= settings.kv_high_ratio
        )
        self._kv_level.observe(breached=full, now=now)
        return self.guards.account(production, beside_step=beside_step, lease=sample.lease, now=now)

    def _condition(
        self, sample: SlotSample, production: ProductionView, overspent: bool, now: float
    ) -> tuple[Condition, str]:
        """The most severe condition, in the order of `Condition`."""
        memory, settings = self._memory, self.settings
        if settings.mode is Mode.OFF:
            return Condition.KILLED, "mode off"
        if sample.kill_switch is not KillSwitch.NONE:
            return Condition.KILLED, f"{KILL_SWITCH}{sample.kill_switch}"
        if (stop := sample.stop) is not None:
            if stop.order is StopOrder.DRAIN:
                return Condition.DRAINED, stop.text
            if sample.lease.lease is None:
                return Condition.HELD, stop.text
        if not memory.quarantine and sample.mps is not None and sample.mps.server_fault:
            memory.quarantine = "MPS: the server that production and guest share has a fault"
        if memory.quarantine:
            return Condition.QUARANTINED, memory.quarantine
        if sample.record_fault:
            return Condition.UNRECORDED, sample.record_fault
        if production.condition is not None:
            return production.condition, production.reason
        if overspent:
            return Condition.OVERSPENT, self.guards.budget.reason
        if self.guards.proof.harmful:
            return Condition.HARMFUL, "latency beside the guest exceeds the limit"
        cooling_s = settings.cooldown_s
        if memory.breached_at_s is not None and now - memory.breached_at_s < cooling_s:
            return Condition.COOLING, f"quiet for less than {cooling_s} s"
        return self._harvestable(sample, production, now)

    def _harvestable(
        self, sample: SlotSample, production: ProductionView, now: float
    ) -> tuple[Condition, str]:
        idle, reason = Condition.CLEAR, ""
        if self.settings.mode is Mode.HARVEST:
            if self.guest.state.stopped:
                return Condition.STOPPED, "guest stopped on purpose"
            if self.guest.away(now=now):
                if self.guest.starved(sample.guest, idle_at_s=production.idle_at_s):
                    return Condition.STARVED, "guest alive and without a core"
                idle, reason = Condition.GUESTLESS, self.guest.silence(sample.guest)
            elif lacks_consent(sample.mps, sample.guest.record):
                idle, reason = Condition.GUESTLESS, "guest under MPS without the slot's consent"
            elif sample.lease.lease is None:
                idle, reason = Condition.UNLEASED, "no lease"
        if idle is Condition.CLEAR and self.guards.proof.withheld(now=now):
            length_s = math.ceil(self.guards.proof.slice_s)
            return Condition.WITHHELD, f"proof slice of at most {length_s} s"
        return idle, reason

    def _asleep(self, sample: SlotSample, now: float) -> bool:
        """Whether the slot has had no lease for `sleep_after_s`."""
        memory, after_s = self._memory, self.settings.sleep_after_s
        if sample.lease.lease is not None or after_s == 0.0:
            memory.unleased_since_s = None
            return False
        if memory.unleased_since_s is None:
            memory.unleased_since_s = now
        return now - memory.unleased_since_s >= after_s

    def _kv_budget_tokens(self) -> int:
        """The guest's KV budget; 0 is the whole capacity of its engine."""
        most, has = self.settings.kv_budget_tokens, self.guest.state.kv_tokens
        if self._kv_level.ratio >= 1.0:
            return most
        # At least 1: 0 would leave the guest its whole capacity.
        return max(1, int((min(most, has) if most and has else most or has) * self._kv_level.ratio))

    def _blocking_ratio(self, sample: SlotSample, now: float) -> float:
        if sample.mps is not None and not sample.mps.shared_by(self.reclaim.state.processes):
            # CUDA silently starts a client without a daemon; then the two take turns on the GPU.
            return 1.0
        return self.guest.blocking_ratio(self.settings.blocking_ratio, sample.guest, now=now)

    def _grant(self, sample: SlotSample, production: ProductionView, now: float) -> Grant:
        settings, memory = self.settings, self._memory
        asleep = self._asleep(sample, now)
        outcome = OUTCOMES[memory.condition]
        may_run = memory.state is State.OPEN and memory.condition is Condition.CLEAR
        reason = memory.reason or memory.state.value
        if settings.mode is Mode.OBSERVE:
            reason, may_run = f"observe only, else {reason}", False
        mode = GrantMode.UNGATED if settings.ungated else GrantMode.OPEN
        return Grant(
            epoch=sample.lease.epoch,
            mode=mode if may_run else GrantMode.CLOSED,
            reason=reason[:200],
            step_tokens_cap=max(1, int(settings.step_tokens_max * self.guards.step_level.ratio)),
            kv_budget_tokens=self._kv_budget_tokens(),
            pulses=tuple(reading.name for reading in sample.pulses),
            ttft_slo_s=settings.ttft_slo_s,
            itl_slo_s=settings.itl_slo_s,
            epsilon=settings.epsilon,
            phantom_prompt_tokens=settings.phantom_prompt_tokens,
            production=production.model,
            own_models=production.own_models,
            blocking_ratio=self._blocking_ratio(sample, now),
            abort_grace_s=settings.abort_grace_s,
            law=settings.law,
            asleep=asleep,
            withheld=outcome.stops_work or (outcome.proven and self.guards.proof.withheld(now=now)),
            kv_retained_ratio=settings.kv_retained_ratio,
            kv_deadline_s=settings.kv_deadline_s,
            preemption_s=self.guest.preemption_s(settings.preemption_s),
            held=sample.stop is not None,
        )
