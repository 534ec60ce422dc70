"""The input of a group's forecast: its jobs, their nodes and the beliefs about them.

`scenarios` runs them over a few meta-iterations.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler.model import Pool
from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.beliefs.tail import TailShape
from scheduler.rollmux.forecast.compiled import Records, compiled
from scheduler.rollmux.forecast.stages import JOB, WAITS_ROLLOUT


class Occupant(NamedTuple):
    """One job in a group as a forecast sees it; nodes are masks within the group."""

    rollout_nodes: int
    training_nodes: int
    slo: float
    belief: Belief
    bulk_ratio: float
    tail_share: float
    divisible: bool = True
    """The rollout may begin on the part of its nodes that another job's tail leaves."""


_OF_OCCUPANTS = ("rollout_nodes", "training_nodes", "slo", "bulk_ratio", "tail_share", "divisible")


@dataclass(frozen=True, slots=True)
class Roster:
    """Jobs ready to be forecast: a forecast takes some of them, on nodes of its choice."""

    jobs: Records
    beliefs: Records
    """`[job, (rollout, training), (mean, spread of the mean, cv)]`"""

    @classmethod
    def of(cls, occupants: Sequence[Occupant]) -> "Roster":
        jobs = np.zeros(len(occupants), dtype=JOB)
        jobs["id"] = np.arange(len(occupants))
        jobs["stage"] = WAITS_ROLLOUT
        for name in _OF_OCCUPANTS:
            jobs[name] = [getattr(one, name) for one in occupants]
        beliefs = np.array([one.belief.doubts for one in occupants], dtype=np.float64)
        beliefs = beliefs.reshape(len(occupants), 2, 3)
        jobs["sync_s"] = [one.belief.sync_s for one in occupants]
        jobs["rollout_mean_s"], jobs["training_mean_s"] = beliefs[:, 0, 0], beliefs[:, 1, 0]
        return cls(jobs, beliefs)

    def hosted(
        self, members: Sequence[int], rollout: Sequence[int], training: Sequence[int]
    ) -> "Roster":
        """Some of the jobs, each on the nodes of its masks; either pool's are numbered from 0."""
        return Roster(*_hosted(self.jobs, self.beliefs, np.array((members, rollout, training))))

    @property
    def slos(self) -> Records:
        return np.asarray(self.jobs["slo"])


@compiled
def _hosted(jobs: Records, beliefs: Records, hosting: Records) -> tuple[Records, Records]:
    members, rollout, training = hosting[0], hosting[1], hosting[2]
    hosted, believed = jobs[: members.size].copy(), beliefs[: members.size].copy()
    first, most = 0, rollout.max()
    while most >> first:
        first += 1
    for at, one in enumerate(members):
        hosted[at] = jobs[one]
        believed[at] = beliefs[one]
        hosted["id"][at] = at
        hosted["rollout_nodes"][at] = rollout[at]
        hosted["training_nodes"][at] = training[at] << first
    return hosted, believed


def group_load(occupants: Sequence[Occupant], *, tails_move: bool = False) -> tuple[float, float]:
    """The longest solo iteration and the work on the busiest node, in s, where every job rolls out
    and trains once and takes its believed means.

    With `tails_move` a rollout's tail counts for the share of its nodes that it needs.
    """
    loads: defaultdict[tuple[Pool, int], float] = defaultdict(float)
    for one in occupants:
        tail = TailShape(bulk_ratio=one.bulk_ratio, share=one.tail_share)
        rollout_s = one.belief.rollout_s * (tail.node_ratio if tails_move else 1.0)
        for pool, nodes, phase_s in (
            (Pool.ROLLOUT, one.rollout_nodes, rollout_s),
            (Pool.TRAINING, one.training_nodes, one.belief.training_s),
        ):
            for bit in range(nodes.bit_length()):
                if nodes >> bit & 1:
                    loads[pool, bit] += phase_s
    cycle_s = max((one.belief.iteration_s for one in occupants), default=0.0)
    return cycle_s, max(loads.values(), default=0.0)
