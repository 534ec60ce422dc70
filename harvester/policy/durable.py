"""State of a slot's policy that must outlive its process, and its move to another clock.

All of it restrains harvesting, except the forecast's seasons. Pulses, the guest's page and leases
are not kept: they are read again within a beat. Times are monotonic seconds, which do not compare
between boots; a wall clock could be set. Time without an agent therefore does not count: no stop
ends and no miss ages meanwhile.
"""

from typing import TypeVar

import msgspec

from harvester.policy.blocking import BlockingState
from harvester.policy.budget import BudgetState, Ring
from harvester.policy.evictions import EvictionState
from harvester.policy.evictions import moved as moved_evictions
from harvester.policy.idle_forecast import ForecastState
from harvester.policy.level import LevelState, MissState
from harvester.policy.proof import ProofState
from harvester.policy.proof import moved as moved_proof

S = TypeVar("S", bound=msgspec.Struct)


class DurableState(msgspec.Struct, kw_only=True):
    """Fields are added with defaults and keep their stored names: an agent reads what an older one
    left."""

    life: str = ""
    """Random name of this history; a scheduler knows by it that a history was lost."""
    run: int = 0
    """Starts of the agent in this life."""
    quarantine: str = ""
    breached_at_s: float | None = msgspec.field(default=None, name="danger_at_s")
    step_level: LevelState = msgspec.field(default_factory=LevelState)
    kv_level: LevelState = msgspec.field(default_factory=LevelState)
    misses: MissState = msgspec.field(default_factory=MissState)
    """Counts of times to first token."""
    itl_misses: MissState = msgspec.field(default_factory=MissState)
    budget: BudgetState = msgspec.field(default_factory=BudgetState)
    evictions: EvictionState = msgspec.field(default_factory=EvictionState)
    guest_losses_s: list[float] = []
    production_crashes_s: list[float] = []
    guest_stopped: bool = False
    blocking: BlockingState = msgspec.field(default_factory=BlockingState)
    proof: ProofState = msgspec.field(default_factory=ProofState)
    forecast: ForecastState = msgspec.field(default_factory=ForecastState)


def moved(state: DurableState, *, from_s: float, to_s: float) -> DurableState:
    """The same ages at `to_s` as at `from_s`."""
    by_s = to_s - from_s
    budget = state.budget
    return msgspec.structs.replace(
        _later(state, by_s),
        step_level=_later(state.step_level, by_s),
        kv_level=_later(state.kv_level, by_s),
        misses=_later(state.misses, by_s),
        itl_misses=_later(state.itl_misses, by_s),
        budget=msgspec.structs.replace(
            _later(budget, by_s),
            minutes=_ring(budget.minutes, from_s, to_s),
            hours=_ring(budget.hours, from_s, to_s),
            judged_minute=-1,
        ),
        evictions=moved_evictions(state.evictions, by_s),
        guest_losses_s=[at_s + by_s for at_s in state.guest_losses_s],
        production_crashes_s=[at_s + by_s for at_s in state.production_crashes_s],
        proof=moved_proof(_later(state.proof, by_s)),
    )


def _later(state: S, by_s: float) -> S:
    """The struct with each moment in it, a field `...at_s`, later by `by_s`."""
    known = {name: getattr(state, name) for name in state.__struct_fields__}
    moments = {name: at_s for name, at_s in known.items() if name.endswith("at_s")}
    later = {name: at_s + by_s for name, at_s in moments.items() if at_s is not None}
    return msgspec.structs.replace(state, **later)


def _ring(ring: Ring, from_s: float, to_s: float) -> Ring:
    return ring.moved(int(to_s // ring.period_s) - int(from_s // ring.period_s))
