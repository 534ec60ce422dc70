"""The lease table of one node: holder, end and epoch of each slot's lease.

A slot's epoch rises when a lease is taken and when it ends, so it tells the guest whose requests
are alive. Every call may be repeated: a request id gives the same lease, an ended lease the same
reason. Refusals are values. A lease's id is its holder's secret and alone renews and ends it. A
restarted agent goes on with exactly the recorded leases.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from harvester.contracts.event_limit import EventLimit
from harvester.contracts.ids import Epoch, JobId, LeaseId, NodeId, SlotId, TenantId
from harvester.contracts.wire.error_budget import Allotment
from harvester.contracts.wire.leases import (
    EndReason,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotState,
)
from harvester.policy.sample import LeaseView

MAX_REMEMBERED = 1024
"""Ended leases and answered requests that a late repetition may still ask about."""

HOLD_S = 120.0
"""A lease under an order to hold is renewed for so long. Nearly all turns end where they run in
this time; after it even a holder that ignores the order, as older gateways do, has to move them."""
_RETRY_S = 1.0
_PACE_S = 10.0
_PACED_TENANTS = 64
_MOST_STEP = 1 << 32
"""A scheduler counts its allotments one by one, from the number that the slot reports, or from its
own after a restart of the agent. A caller who skips more would leave no numbers for later ones."""


class LeaseRecord(Struct, frozen=True, kw_only=True):
    """Part of a lease that is kept on disk. Times are not: a restarted agent's clock may differ."""

    lease: LeaseId
    slot: SlotId
    epoch: Epoch
    tenant: TenantId
    job: JobId
    request_id: str


class SlotLease(LeaseRecord, frozen=True, kw_only=True):
    ends_s: float
    ending: EndReason | None = None
    """Set while a revoked lease runs out its deadline; it is not renewed any more."""
    allotment: Allotment | None = None
    """A restarted agent's slot spends nothing more until a renewal."""

    @property
    def name(self) -> str:
        """Public name for journals, logs and status: with the id any reader could end the lease."""
        return f"{self.slot}.{self.epoch}"


@dataclass(slots=True)
class LeasePace:
    """New leases of a slot: of each tenant, so that a flood shuts out no other, and of all, since
    names cost a caller nothing. Each lease is a few lines of the audit and the journal, two beats
    and a file: one that is taken and released all day would drive the events of weeks out of the
    audit. A gateway keeps a lease for half a minute after its last turn, and so needs no more."""

    every: EventLimit = field(default_factory=partial(EventLimit, burst=240.0, per_s=1.0))
    tenants: OrderedDict[TenantId, EventLimit] = field(default_factory=OrderedDict)
    """The latest `_PACED_TENANTS`."""

    def admits(self, tenant: TenantId, *, now: float) -> bool:
        own = self.tenants.setdefault(tenant, EventLimit(burst=60.0, per_s=1 / _PACE_S))
        self.tenants.move_to_end(tenant)
        if len(self.tenants) > _PACED_TENANTS:
            self.tenants.popitem(last=False)
        if not own.admits(now=now):
            return False
        if not self.every.admits(now=now):
            own.left += 1.0
            return False
        return True

    def take_back(self, tenant: TenantId) -> None:
        """The lease that was admitted last was not given."""
        for limit in (self.every, self.tenants[tenant]):
            limit.left += 1.0


@dataclass(slots=True, kw_only=True)
class SlotEntry:
    epoch: Epoch
    state: SlotState = SlotState.OFF
    reason: str = "starting"
    lease: SlotLease | None = None
    stop: str = ""
    """The order to stop that binds the slot and its lease."""
    stopped_at_s: float = 0.0
    number: int = 0
    """Highest number of an allotment that was received."""
    pace: LeasePace = field(default_factory=LeasePace)


class LeaseTable:
    def __init__(self, *, node: NodeId, ttl_s: float) -> None:
        """`ttl_s` bounds every lease."""
        self.node = node
        self.ttl_s = ttl_s
        self._slots: dict[SlotId, SlotEntry] = {}
        self._ended: OrderedDict[LeaseId, LeaseEnded] = OrderedDict()
        self._answered: OrderedDict[str, LeaseId] = OrderedDict()
        self._newly_ended: list[tuple[SlotLease, EndReason]] = []
        self._left: OrderedDict[SlotId, tuple[Epoch, int]] = OrderedDict()
        """Last epoch and allotment number of removed slots."""

    def add_slot(self, slot: SlotId, *, epoch: Epoch, recorded: SlotLease | None = None) -> None:
        """`epoch` is the one on the page, 0 when there was none. `recorded` is the lease that an
        earlier agent recorded last: it goes on if the page still has its epoch, else it has ended.
        """
        left, number = self._left.get(slot, (Epoch(0), 0))
        entry = self._slots[slot] = SlotEntry(epoch=max(epoch, left), number=number)
        if recorded is None or recorded.slot != slot:
            return
        if recorded.epoch == entry.epoch:
            entry.lease = recorded
            self._answered[recorded.request_id] = recorded.lease
        else:
            # The page may be younger than the record, or lost with the machine's memory.
            entry.epoch = Epoch(max(entry.epoch, recorded.epoch + 1))
            self._newly_ended.append((recorded, EndReason.EXPIRED))

    def remove_slot(self, slot: SlotId) -> None:
        """Forget a slot, if present, whose lease has ended, except its numbers: a slot that comes
        back continues them, even if its pages are lost."""
        self._newly_ended = [
            (lease, reason) for lease, reason in self._newly_ended if lease.slot != slot
        ]
        if (entry := self._slots.pop(slot, None)) is not None:
            self._left[slot] = entry.epoch, entry.number
            _forget(self._left)

    def offer(self, slot: SlotId, state: SlotState, reason: str = "") -> None:
        """Set whether the slot may be leased; a live lease stays."""
        entry = self._slots[slot]
        entry.state, entry.reason = state, reason

    def stop(self, slot: SlotId, order: str, *, now: float) -> None:
        """Set the order to stop that binds the slot and its lease; "" without one."""
        entry = self._slots[slot]
        if not entry.stop:
            entry.stopped_at_s = now
        entry.stop = order

    def take(
        self, request: LeaseRequest, *, secret: str, stop: str = "", absent: str = "", now: float
    ) -> LeaseGranted | LeaseRefused:
        """`secret` is random, 32 characters at most; it makes the id unguessable. `stop`: why this
        tenant gets no new lease on this slot. `absent`: why it is not open."""
        entry = self._slots.get(request.slot)
        if entry is None:
            return self._refused(request, absent or "no such slot on this node")
        self.expire(now=now)
        answered = self._answered.get(request.request_id)
        if answered is not None:
            return self._repeated(request, answered, entry, now)
        if request.allotment is not None:
            if not _newer(entry, request.allotment):
                last = f"this slot's last one has number {entry.number}; use a new one"
                return self._refused(request, f"allotment {request.allotment.number}: {last}")
            # Used up even if it is refused: it may come again, late, once others have its misses.
            entry.number = request.allotment.number
        if entry.lease is not None:
            return self._refused(request, f"leased to job {entry.lease.job}")
        if entry.state is not SlotState.OFFERED:
            return self._refused(request, f"{entry.state}: {entry.reason}")
        if stop:
            return self._refused(request, stop)
        if request.duration_s <= 0:
            return self._refused(request, "duration_s must be above 0")
        if not entry.pace.admits(request.tenant, now=now):
            often = "leased too often, so every 10 s now: the agent's audit names the holders"
            return self._refused(request, often, retry_after_s=_PACE_S)
        self._raise_epoch(entry)
        lease = SlotLease(
            lease=LeaseId(f"{request.slot[:20]}.{entry.epoch}.{secret}"),
            slot=request.slot,
            tenant=request.tenant,
            job=request.job,
            epoch=entry.epoch,
            request_id=request.request_id,
            ends_s=now + min(request.duration_s, self.ttl_s),
            allotment=request.allotment,
        )
        entry.lease = lease
        self._answered[request.request_id] = lease.lease
        _forget(self._answered)
        return _granted(lease, now)

    def withdraw(self, granted: LeaseGranted, reason: str) -> LeaseRefused:
        """Turn a grant that no caller has received into a refusal."""
        entry = self._slots[granted.slot]
        if (held := entry.lease) is not None and held.lease == granted.lease:
            entry.lease = None
            entry.pace.take_back(held.tenant)
            self._raise_epoch(entry)
            self._answered.pop(held.request_id, None)
        return LeaseRefused(slot=granted.slot, reason=reason, retry_after_s=_RETRY_S)

    def renew(
        self, lease: LeaseId, renewal: LeaseRenewal, *, now: float
    ) -> LeaseGranted | LeaseEnded:
        self.expire(now=now)
        found = self._find(lease)
        if found is None:
            return self._ended.get(lease) or LeaseEnded(lease=lease, reason=EndReason.UNKNOWN)
        entry, held = found
        if renewal.epoch != held.epoch:
            return LeaseEnded(lease=lease, reason=EndReason.UNKNOWN)
        if entry.stop and now - entry.stopped_at_s >= HOLD_S and held.ending is None:
            held = entry.lease = replace(held, ending=EndReason.DRAIN)
        if held.ending is not None:
            return LeaseEnded(lease=lease, reason=held.ending, deadline_s=held.ends_s - now)
        ends_s = max(held.ends_s, now + min(renewal.duration_s, self.ttl_s))
        allotment = held.allotment
        if renewal.allotment is not None and _newer(entry, renewal.allotment):
            allotment, entry.number = renewal.allotment, renewal.allotment.number
        entry.lease = replace(held, ends_s=ends_s, allotment=allotment)
        return _granted(entry.lease, now)

    def release(self, lease: LeaseId, *, now: float) -> LeaseEnded:
        """The holder gives it back; an unknown lease is answered as ended."""
        return self.end(lease, EndReason.RELEASED, now=now)

    def end(
        self, lease: LeaseId, reason: EndReason, *, deadline_s: float = 0.0, now: float
    ) -> LeaseEnded:
        """End a lease now or `deadline_s` from now; never later than it would have ended."""
        self.expire(now=now)
        found = self._find(lease)
        if found is None:
            return self._ended.get(lease) or LeaseEnded(lease=lease, reason=EndReason.UNKNOWN)
        entry, held = found
        if deadline_s <= 0:
            return self._free(entry, held, reason)
        ends_s = min(held.ends_s, now + deadline_s)
        entry.lease = replace(held, ends_s=ends_s, ending=held.ending or reason)
        return LeaseEnded(lease=lease, reason=reason, deadline_s=ends_s - now)

    def expire(self, *, now: float) -> None:
        for entry in self._slots.values():
            if entry.lease is not None and entry.lease.ends_s <= now:
                self._free(entry, entry.lease, entry.lease.ending or EndReason.EXPIRED)

    def take_ended(self) -> tuple[tuple[SlotLease, EndReason], ...]:
        """Leases that ended since the last call, with the reason, for counters and the audit."""
        ended, self._newly_ended = tuple(self._newly_ended), []
        return ended

    def view(self, slot: SlotId) -> LeaseView:
        entry = self._slots[slot]
        if entry.lease is None:
            return LeaseView(epoch=entry.epoch)
        return LeaseView(
            epoch=entry.epoch,
            lease=entry.lease.name,
            ending=entry.lease.ending is not None,
            tenant=entry.lease.tenant,
            job=entry.lease.job,
            allotment=entry.lease.allotment,
        )

    def allotted_number(self, slot: SlotId) -> int:
        """Highest number of an allotment that the slot has received."""
        return self._slots[slot].number

    def live(self, slot: SlotId) -> SlotLease | None:
        return self._slots[slot].lease

    def entry(self, slot: SlotId) -> tuple[SlotState, str, Epoch]:
        """State as a scheduler sees it, its reason and the epoch."""
        entry = self._slots[slot]
        if entry.lease is not None:
            return SlotState.LEASED, entry.stop or entry.reason, entry.epoch
        return entry.state, entry.reason, entry.epoch

    def _repeated(
        self, request: LeaseRequest, lease: LeaseId, entry: SlotEntry, now: float
    ) -> LeaseGranted | LeaseRefused:
        held = entry.lease
        if held is not None and held.lease == lease and held.ending is None:
            same = (held.slot, held.tenant, held.job) == (request.slot, request.tenant, request.job)
            if same:
                return _granted(held, now)
        return self._refused(request, "this request id was answered before; use a new one")

    def _free(self, entry: SlotEntry, lease: SlotLease, reason: EndReason) -> LeaseEnded:
        ended = LeaseEnded(lease=lease.lease, reason=reason)
        entry.lease = None
        self._raise_epoch(entry)
        self._ended[lease.lease] = ended
        _forget(self._ended)
        self._newly_ended = [*self._newly_ended[-MAX_REMEMBERED:], (lease, reason)]
        return ended

    def _raise_epoch(self, entry: SlotEntry) -> None:
        entry.epoch = Epoch(entry.epoch + 1)

    def _find(self, lease: LeaseId) -> tuple[SlotEntry, SlotLease] | None:
        for entry in self._slots.values():
            if entry.lease is not None and entry.lease.lease == lease:
                return entry, entry.lease
        return None

    def _refused(
        self, request: LeaseRequest, reason: str, *, retry_after_s: float = _RETRY_S
    ) -> LeaseRefused:
        return LeaseRefused(slot=request.slot, reason=reason, retry_after_s=retry_after_s)


def _newer(entry: SlotEntry, allotment: Allotment) -> bool:
    """Whether it is newer than all before it, which are void from now on."""
    return entry.number < allotment.number <= entry.number + _MOST_STEP


def _granted(lease: SlotLease, now: float) -> LeaseGranted:
    return LeaseGranted(
        lease=lease.lease, slot=lease.slot, epoch=lease.epoch, duration_s=lease.ends_s - now
    )


def _forget(table: OrderedDict[Any, Any]) -> None:
    while len(table) > MAX_REMEMBERED:
        table.popitem(last=False)
