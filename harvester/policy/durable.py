"""A slot policy's memory, from which a journal's file replays; the part of it that outlives the
process, and that part's move to another clock.

All of that part restrains harvesting, except the forecast's seasons. Pulses, the guest's page and
leases are not kept: they are read again within a beat. Times are monotonic seconds, which do not
compare between boots; a wall clock could be set. Time without an agent therefore does not count: no
stop ends and no miss ages meanwhile.
"""

from typing import Any, TypeVar

import msgspec

from harvester.contracts.served import Served
from harvester.policy.blocking import Blocking
from harvester.policy.budget import BudgetState, Ring
from harvester.policy.evictions import EvictionState
from harvester.policy.evictions import moved as moved_evictions
from harvester.policy.guest_watch import GuestState
from harvester.policy.idle_forecast import ForecastState
from harvester.policy.level import LevelState, MissState
from harvester.policy.production import WatchState
from harvester.policy.proof import ProofState
from harvester.policy.proof import moved as moved_proof
from harvester.policy.reclaim import ReclaimState
from harvester.policy.states import Condition, State

S = TypeVar("S", bound=msgspec.Struct)


class KeptMemory(msgspec.Struct, kw_only=True):
    """The part of a policy's memory that outlives it. Fields are added with defaults and keep their
    stored names: an agent reads what an older one left."""

    life: str = ""
    """Random name of this history; a scheduler knows by it that a history was lost."""
    run: int = 0
    """Starts of the agent in this life."""
    quarantine: str = ""
    breached_at_s: float | None = msgspec.field(default=None, name="danger_at_s")
    step_level: LevelState = msgspec.field(default_factory=LevelState)
    kv_level: LevelState = msgspec.field(default_factory=LevelState)
    misses: MissState = msgspec.field(default_factory=MissState)
    """Late first tokens."""
    itl_misses: MissState = msgspec.field(default_factory=MissState)
    budget: BudgetState = msgspec.field(default_factory=BudgetState)
    evictions: EvictionState = msgspec.field(default_factory=EvictionState)
    blocking: Blocking = msgspec.field(default_factory=Blocking)
    proof: ProofState = msgspec.field(default_factory=ProofState)


class DurableState(KeptMemory, kw_only=True):
    """Kept memory, with the parts that the guest's watch and the forecaster have."""

    guest_losses_s: list[float] = []
    production_crashes_s: list[float] = []
    guest_stopped: bool = False
    forecast: ForecastState = msgspec.field(default_factory=ForecastState)


class GuardMemory(KeptMemory, kw_only=True):
    served: Served = Served()
    """Requests served since the agent's run began."""
    unanswered: float = 0.0
    """Requests that ended without a first token before their SLO, since then."""


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


def moved(state: DurableState, *, from_s: float, to_s: float) -> DurableState:
    """The same ages at `to_s` as at `from_s`."""
    by_s = to_s - from_s
    later = _later(state, by_s)
    return msgspec.structs.replace(
        later,
        budget=msgspec.structs.replace(
            later.budget,
            minutes=_ring(state.budget.minutes, from_s, to_s),
            hours=_ring(state.budget.hours, from_s, to_s),
            judged_minute=-1,
        ),
        evictions=moved_evictions(state.evictions, by_s),
        guest_losses_s=[at_s + by_s for at_s in state.guest_losses_s],
        production_crashes_s=[at_s + by_s for at_s in state.production_crashes_s],
        proof=moved_proof(later.proof),
    )


def _later(state: S, by_s: float) -> S:
    """The struct with each moment in it, a field `...at_s`, later by `by_s`."""
    later: dict[str, Any] = {}
    for name in state.__struct_fields__:
        match getattr(state, name):
            case msgspec.Struct() as part:
                later[name] = _later(part, by_s)
            case float() | int() as at_s if name.endswith("at_s"):
                later[name] = at_s + by_s
    return msgspec.structs.replace(state, **later)


def _ring(ring: Ring, from_s: float, to_s: float) -> Ring:
    return ring.moved(int(to_s // ring.period_s) - int(from_s // ring.period_s))
