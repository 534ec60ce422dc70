"""A slot policy's memory: what a journal file replays from, and what outlives the process."""

import msgspec

from harvester.policy.durable import DurableState, KeptMemory
from harvester.policy.guards import GuardMemory
from harvester.policy.guest_watch import GuestState
from harvester.policy.production import WatchState
from harvester.policy.reclaim import ReclaimState
from harvester.policy.states import Condition, State


class SlotMemory(GuardMemory, kw_only=True):
    state: State = State.OFF
    condition: Condition = Condition.UNLEARNED
    reason: str = "starting"
    since_s: float | None = None
    watch: WatchState = msgspec.field(default_factory=WatchState)
    reclaim: ReclaimState = msgspec.field(default_factory=ReclaimState)
    guest: GuestState = msgspec.field(default_factory=GuestState)
    unleased_since_s: float | None = None
    empty_since_s: float | None = None
    """Time since which a held guest has had no request."""

    @classmethod
    def resumed(cls, left: DurableState, *, now: float) -> "SlotMemory":
        """An earlier process's durable state; its times are in this process's clock."""
        guest = GuestState(
            losses_s=left.guest_losses_s,
            crashes_s=left.production_crashes_s,
            stopped=left.guest_stopped,
        )
        kept = {name: getattr(left, name) for name in KeptMemory.__struct_fields__}
        memory = cls(guest=guest, **kept)
        memory.breached_at_s, memory.budget.limit = now, None
        return memory

    def durable(self) -> DurableState:
        """The part that must survive this process."""
        return DurableState(
            guest_losses_s=self.guest.losses_s,
            production_crashes_s=self.guest.crashes_s,
            guest_stopped=self.guest.stopped,
            **{name: getattr(self, name) for name in KeptMemory.__struct_fields__},
        )

    @property
    def verdicts(self) -> tuple[object, ...]:
        """The verdicts that must survive this process; a change means they must be saved."""
        return (
            self.quarantine,
            self.budget.stopped_at_s,
            self.proof.stopped_at_s,
            *self.guest.losses_s,
            *self.guest.crashes_s,
            self.guest.stopped,
        )
