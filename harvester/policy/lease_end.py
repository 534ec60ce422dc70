"""When a slot's lease ends, and why: by an order, a condition that lasts, or a lost guest."""

from harvester.contracts.wire.leases import EndReason
from harvester.contracts.wire.stops import StopOrder
from harvester.policy.durable import SlotMemory
from harvester.policy.effects import Effect, EndLease, Quarantine
from harvester.policy.guest_watch import GuestWatch
from harvester.policy.sample import GuestReading, KillSwitch, SlotSample
from harvester.policy.settings import Mode, SlotSettings
from harvester.policy.states import OUTCOMES, Condition

_PATIENCE = {
    EndReason.PRODUCTION_LOST: "production_lost_s",
    EndReason.GUEST_LOST: "guest_lost_s",
}
"""Settings for how long the condition lasts before the lease ends; for other reasons not at all."""
_EMPTY_S = 1.0
"""A turn that was sent before the hold reaches the guest's page within this time."""


class LeaseEnd:
    def __init__(self, settings: SlotSettings, memory: SlotMemory, guest: GuestWatch) -> None:
        self._settings = settings
        self._memory = memory
        self._guest = guest

    def observe(self, sample: SlotSample, *, now: float) -> tuple[Effect, ...]:
        memory, lease = self._memory, sample.lease.lease
        if lease is None or sample.lease.ending:
            return ()
        if sample.kill_switch is KillSwitch.DRAIN:
            return (EndLease(lease=lease, reason=EndReason.KILL_SWITCH),)
        if sample.stop is not None and sample.stop.order is StopOrder.DRAIN:
            # Applies even if the kill file's weaker order would keep the lease.
            return (EndLease(lease=lease, reason=EndReason.DRAIN),)
        if self._settings.mode is not Mode.HARVEST or self._held_and_empty(sample, now):
            return (EndLease(lease=lease, reason=EndReason.DRAIN),)
        reason = OUTCOMES[memory.condition].ends_lease
        if reason is None or memory.since_s is None:
            return ()
        patience = _PATIENCE.get(reason)
        if patience and now - memory.since_s < getattr(self._settings, patience):
            return ()
        ended = EndLease(lease=lease, reason=reason)
        if memory.condition is not Condition.GUESTLESS:
            return (ended,)
        return (ended, *self._count_loss(sample.guest, now))

    def _held_and_empty(self, sample: SlotSample, now: float) -> bool:
        """Whether a held guest has had no request for long enough to believe that none is on its
        way. A guest that says nothing is lost by itself."""
        memory, guest = self._memory, sample.guest.record
        if sample.stop is None or guest is None or guest.running or guest.waiting:
            memory.empty_since_s = None
            return False
        if memory.empty_since_s is None:
            memory.empty_since_s = now
        return now - memory.empty_since_s >= _EMPTY_S

    def _count_loss(self, reading: GuestReading, now: float) -> tuple[Effect, ...]:
        memory = self._memory
        memory.quarantine = memory.quarantine or self._guest.lose(reading, now=now)
        return (Quarantine(reason=memory.quarantine),) if memory.quarantine else ()
