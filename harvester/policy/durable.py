"""State of a slot's policy that must outlive its process, and how it moves to another clock.

Everything here keeps harvesting back. What is measured anew within a beat, such as pulses, the
guest's page and leases, is left out, as are counters for people.

Times are monotonic seconds. Those of another boot do not compare, and a wall clock can be set: time
in which no agent could count is therefore no time at all. No stop runs down and no miss grows old
while a machine is off, whatever its clock says afterwards.
"""

import msgspec

from harvester.policy.blocking import BlockingState
from harvester.policy.budget import BudgetState, Ring
from harvester.policy.level import LevelState, MissState
from harvester.policy.proof import ProofState


class DurableState(msgspec.Struct, kw_only=True):
    """Fields are added with defaults and never renamed: an agent reads what an older one left."""

    quarantine: str = ""
    danger_at_s: float | None = None
    step_level: LevelState = msgspec.field(default_factory=LevelState)
    kv_level: LevelState = msgspec.field(default_factory=LevelState)
    misses: MissState = msgspec.field(default_factory=MissState)
    budget: BudgetState | None = None
    guest_losses_s: list[float] = []
    guest_stopped: bool = False
    blocking: BlockingState = msgspec.field(default_factory=BlockingState)
    proof_ttft: ProofState = msgspec.field(default_factory=ProofState)
    proof_itl: ProofState = msgspec.field(default_factory=ProofState)


def moved(state: DurableState, *, from_s: float, to_s: float) -> DurableState:
    """The same ages at `to_s` as at `from_s`."""
    by_s = to_s - from_s
    return DurableState(
        quarantine=state.quarantine,
        danger_at_s=_later(state.danger_at_s, by_s),
        step_level=_level(state.step_level, by_s),
        kv_level=_level(state.kv_level, by_s),
        misses=msgspec.structs.replace(state.misses, at_s=_later(state.misses.at_s, by_s)),
        budget=None if state.budget is None else _budget(state.budget, from_s, to_s),
        guest_losses_s=[at_s + by_s for at_s in state.guest_losses_s],
        guest_stopped=state.guest_stopped,
        blocking=state.blocking,
        proof_ttft=_proof(state.proof_ttft, by_s),
        proof_itl=_proof(state.proof_itl, by_s),
    )


def _later(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s


def _level(level: LevelState, by_s: float) -> LevelState:
    return LevelState(
        ratio=level.ratio,
        breached_at_s=_later(level.breached_at_s, by_s),
        shrunk_at_s=_later(level.shrunk_at_s, by_s),
        grown_at_s=_later(level.grown_at_s, by_s),
    )


def _budget(budget: BudgetState, from_s: float, to_s: float) -> BudgetState:
    return BudgetState(
        minutes=_ring(budget.minutes, from_s, to_s),
        hours=_ring(budget.hours, from_s, to_s),
        stopped_at_s=_later(budget.stopped_at_s, to_s - from_s),
        reason=budget.reason,
    )


def _ring(ring: Ring, from_s: float, to_s: float) -> Ring:
    return ring.moved(int(to_s // ring.period_s) - int(from_s // ring.period_s))


def _proof(proof: ProofState, by_s: float) -> ProofState:
    """Without the slice that was under way: it was not seen whole."""
    return msgspec.structs.replace(
        proof, index=None, n=0.0, x=0.0, stopped_at_s=_later(proof.stopped_at_s, by_s)
    )
