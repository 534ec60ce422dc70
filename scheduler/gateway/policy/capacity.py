"""How much harvested capacity to lease: which slots, for how long, and when to give them back.

A job that harvests and has more turns than its dedicated engines take at once leases every slot
that is offered; a job without turns gives them back after a quiet time. A slot serves one job at a
time. Leases are renewed at a third of their duration, and dropped one margin before their end if no
renewal was heard. Sends nothing itself.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from harvester.contracts.ids import EngineId, Epoch, JobId, LeaseId, SlotId
from scheduler.model import Lease


class CapacityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    instance: str = "scheduler"
    """Part of request ids: unique per instance and not guessable."""
    duration_s: float = 10.0
    renew_ratio: float = 1 / 3
    """Share of the duration after which a lease is renewed."""
    margin_s: float = 1.0
    """Use of a lease stops this long before it ends."""
    spill_ratio: float = 1.0
    """Turns per dedicated place above which a job leases."""
    idle_release_s: float = 30.0
    """Longer than a training phase, so that each rollout phase finds its leases in place."""
    refused_s: float = 1.0
    """Least time to the next try of a slot that refused."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """One job's turns. `dispatched` and `s_per_token` only record routing, on one line of
    the journal."""

    job: JobId
    active: bool
    harvesting: bool
    queued: int
    running: int
    dedicated_places: int
    dispatched: dict[str, int] = {}
    """Number of dispatched turns by reason."""
    s_per_token: dict[EngineId, float] = {}


class LeasableSlot(msgspec.Struct, frozen=True, kw_only=True):
    slot: SlotId
    agent: str
    free: bool
    """Offered and not leased, by the agent's last report."""
    idle_ratio: float | None = None
    forecast_ratio: float | None = None
    """Idle share that the slot's forecast expects to be exceeded nine times of ten."""
    emptied: bool = False
    """The slot is held by an order to stop and runs no turn of this gateway."""


class SlotRefusal(msgspec.Struct, frozen=True, kw_only=True):
    slot: SlotId
    retry_after_s: float


class CapacitySample(msgspec.Struct, frozen=True, kw_only=True, tag="capacity"):
    demands: tuple[Demand, ...] = ()
    slots: tuple[LeasableSlot, ...] = ()
    leases: tuple[Lease, ...] = ()
    refusals: tuple[SlotRefusal, ...] = ()
    """Refused requests since the previous sample."""


class TakeLease(msgspec.Struct, frozen=True, kw_only=True, tag="take_lease"):
    request_id: str
    slot: SlotId
    agent: str
    job: JobId
    duration_s: float
    reason: str


class RenewLease(msgspec.Struct, frozen=True, kw_only=True, tag="renew_lease"):
    lease: LeaseId
    agent: str
    epoch: Epoch
    duration_s: float
    reason: str


class ReleaseLease(msgspec.Struct, frozen=True, kw_only=True, tag="release_lease"):
    lease: LeaseId
    agent: str
    reason: str


class DropLease(msgspec.Struct, frozen=True, kw_only=True, tag="drop_lease"):
    """Stop using a lease that was not renewed in time; its grantor frees it by itself."""

    lease: LeaseId
    agent: str
    reason: str


CapacityEffect = TakeLease | RenewLease | ReleaseLease | DropLease


@dataclass(slots=True)
class _LeaseCall:
    """A request that is repeated under its id until it is answered."""

    request_id: str
    job: JobId
    at_s: float


class CapacityPolicy:
    NAME: ClassVar[str] = "scheduler.policy.capacity"
    SAMPLE: ClassVar[Any] = CapacitySample

    def __init__(self, config: CapacityConfig) -> None:
        self._config = config
        self._requests = 0
        self._calls: dict[SlotId, _LeaseCall] = {}
        self._not_before_s: dict[SlotId, float] = {}
        self._busy_at_s: dict[JobId, float] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CapacityPolicy":
        return cls(msgspec.convert(config, CapacityConfig))

    def snapshot(self) -> dict[str, Any]:
        return {
            "requests": self._requests,
            "asked": msgspec.to_builtins(self._calls),
            "not_before_s": dict(self._not_before_s),
            "busy_at_s": dict(self._busy_at_s),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._requests = snapshot["requests"]
        self._calls = msgspec.convert(snapshot["asked"], dict[SlotId, _LeaseCall])
        self._not_before_s = dict(snapshot["not_before_s"])
        self._busy_at_s = dict(snapshot["busy_at_s"])

    @property
    def duration_s(self) -> float:
        return self._config.duration_s

    @property
    def margin_s(self) -> float:
        return self._config.margin_s

    def observe(self, sample: CapacitySample, *, now: float) -> tuple[CapacityEffect, ...]:
        for refusal in sample.refusals:
            self._calls.pop(refusal.slot, None)
            wait_s = max(self._config.refused_s, refusal.retry_after_s)
            self._not_before_s[refusal.slot] = now + wait_s
        for demand in sample.demands:
            if demand.queued or demand.running:
                self._busy_at_s[demand.job] = now
        kept: dict[SlotId, Lease] = {}
        effects: list[CapacityEffect] = []
        for lease in sorted(sample.leases, key=lambda lease: lease.lease):
            self._calls.pop(lease.slot, None)
            effects += self._keep_or_drop(lease, sample, kept, now)
        return (*effects, *self._take(sample, kept, now))

    def _keep_or_drop(
        self, lease: Lease, sample: CapacitySample, kept: dict[SlotId, Lease], now: float
    ) -> list[CapacityEffect]:
        config = self._config
        if not lease.usable(now=now, margin_s=config.margin_s):
            reason = "not renewed in time"
            return [DropLease(lease=lease.lease, agent=lease.agent, reason=reason)]
        needless = self._needless(lease.job, sample, now)
        if lease.slot in kept:
            needless = "the slot is held by another lease"
        elif any(slot.emptied and slot.slot == lease.slot for slot in sample.slots):
            needless = "the slot is held and no turn runs on it"
        if needless:
            return [ReleaseLease(lease=lease.lease, agent=lease.agent, reason=needless)]
        kept[lease.slot] = lease
        left_s = lease.expires_s - now
        if left_s > config.duration_s * (1 - config.renew_ratio):
            return []
        return [
            RenewLease(
                lease=lease.lease,
                agent=lease.agent,
                epoch=lease.epoch,
                duration_s=config.duration_s,
                reason=f"{left_s:.1f} s left",
            )
        ]

    def _needless(self, job: JobId, sample: CapacitySample, now: float) -> str:
        demand = next((demand for demand in sample.demands if demand.job == job), None)
        if demand is None:
            return "the job is gone"
        if not demand.harvesting:
            return "harvesting is switched off"
        if not demand.active:
            return "the job is not active"
        idle_s = now - self._busy_at_s.setdefault(job, now)
        if idle_s > self._config.idle_release_s:
            return f"no turns for {idle_s:.0f} s"
        return ""

    def _take(
        self, sample: CapacitySample, kept: dict[SlotId, Lease], now: float
    ) -> list[CapacityEffect]:
        demand = next((demand for demand in sample.demands if demand.active), None)
        if demand is None or not demand.harvesting:
            self._calls.clear()
            return []
        requested = demand.queued + demand.running
        if requested <= self._config.spill_ratio * demand.dedicated_places:
            return []
        # Slots that will surely be idle first: only the order matters where every lease is worth
        # taking, and a slot without a forecast is judged by what it was.
        offered = sorted(sample.slots, key=lambda slot: (-_idle_ratio(slot), slot.slot))
        reason = f"{requested} turns on {demand.dedicated_places} dedicated places"
        return [
            self._call(slot, demand.job, now, reason)
            for slot in offered
            if self._may_call(slot, now) and slot.slot not in kept
        ]

    def _may_call(self, slot: LeasableSlot, now: float) -> bool:
        # A slot that was free until we asked may be ours: the reply was lost.
        return (slot.free or slot.slot in self._calls) and now >= self._not_before_s.get(
            slot.slot, now
        )

    def _call(self, slot: LeasableSlot, job: JobId, now: float, reason: str) -> TakeLease:
        call = self._calls.get(slot.slot)
        # The grantor remembers a request for one duration at least; after it the id may be new.
        if call is None or call.job != job or now > call.at_s + self._config.duration_s:
            self._requests += 1
            call = _LeaseCall(f"{self._config.instance}-{self._requests}", job, now)
            self._calls[slot.slot] = call
        return TakeLease(
            request_id=call.request_id,
            slot=slot.slot,
            agent=slot.agent,
            job=job,
            duration_s=self._config.duration_s,
            reason=reason,
        )


def _idle_ratio(slot: LeasableSlot) -> float:
    known = slot.idle_ratio if slot.forecast_ratio is None else slot.forecast_ratio
    return known or 0.0
