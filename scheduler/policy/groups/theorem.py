"""RollMux's Theorem 1: when the cyclic round robin is as good as any order, and when it is silent.

With fixed durations and a group that is unsaturated or full, one meta-iteration (every job one
rollout and one training) takes `t_cycle`, the longest job's own iteration, and no order uses the
nodes better. Beyond that, on an oversaturated group or for jobs of unequal cycles whose SLO counts,
the theorem is silent and an order is searched for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.policy.groups.forecast import Occupant


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobinConditions:
    cycle_s: float
    """The longest solo iteration."""
    load_s: float
    """Work of one meta-iteration on the busiest node."""

    @property
    def saturated(self) -> bool:
        """Algorithm 1 leaves such a group alone; equality is full, not oversaturated."""
        return self.load_s >= self.cycle_s

    @property
    def hold(self) -> bool:
        return self.load_s <= self.cycle_s


def conditions(occupants: Sequence[Occupant]) -> RoundRobinConditions:
    """Of a group whose jobs take exactly their believed means."""
    loads: dict[tuple[bool, int], float] = {}
    for one in occupants:
        sides = (
            (True, one.rollout_nodes, one.belief.rollout_s),
            (False, one.training_nodes, one.belief.training_s),
        )
        for rollout, mask, phase_s in sides:
            for bit in range(mask.bit_length()):
                if mask >> bit & 1:
                    loads[rollout, bit] = loads.get((rollout, bit), 0.0) + phase_s
    return RoundRobinConditions(
        cycle_s=max((one.belief.iteration_s for one in occupants), default=0.0),
        load_s=max(loads.values(), default=0.0),
    )
