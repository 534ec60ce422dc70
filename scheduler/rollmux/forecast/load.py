"""A group's load: whether its busiest node has room within the longest job's iteration."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.rollmux.beliefs.tail import TailShape
from scheduler.rollmux.forecast.forecast import Occupant


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """Load of one meta-iteration, in which every job rolls out and trains once."""

    cycle_s: float
    """The longest solo iteration."""
    busiest_s: float
    """Work on the busiest node."""

    @property
    def saturated(self) -> bool:
        """Whether the busiest node is full; Algorithm 1 leaves a saturated group alone."""
        return self.busiest_s >= self.cycle_s


def group_load(occupants: Sequence[Occupant], *, tails_move: bool = False) -> GroupLoad:
    """The load of jobs that take exactly their believed means.

    With `tails_move` a rollout's tail counts for the share of its nodes that it needs.
    """
    loads: dict[tuple[bool, int], float] = {}
    for one in occupants:
        tail = TailShape(bulk_ratio=one.bulk_ratio, share=one.tail_share)
        node_ratio = tail.node_ratio if tails_move else 1.0
        sides = (
            (True, one.rollout_nodes, one.belief.rollout_s * node_ratio),
            (False, one.training_nodes, one.belief.training_s),
        )
        for rollout, mask, phase_s in sides:
            for bit in range(mask.bit_length()):
                if mask >> bit & 1:
                    loads[rollout, bit] = loads.get((rollout, bit), 0.0) + phase_s
    return GroupLoad(
        cycle_s=max((one.belief.iteration_s for one in occupants), default=0.0),
        busiest_s=max(loads.values(), default=0.0),
    )
