"""Disruptions of a run: nodes that fail, and jobs that their owners give up.

Every node has its own clock from its start, drawn from its name, so that one run's failures do not
depend on the order of queries. No policy knows them in advance.
"""

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from harvester.contracts.ids import NodeId
from scheduler.sim.rollmux.workload import SimulatedJob, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Disruptions:
    seed: int = 0
    node_mtbf_s: float = float("inf")
    """Mean time that a node is up until it fails; exponential."""
    leaving_ratio: float = 0.0
    """Share of the jobs that are given up, anywhere in their solo life."""

    def fails_at_s(self, node: NodeId, *, up_s: float, times: int) -> float:
        """`times` counts how often the machine has come up."""
        if self.node_mtbf_s == float("inf"):
            return float("inf")
        return up_s + float(self._rng(f"{node} {times}").exponential(self.node_mtbf_s))

    def leaves_at_s(self, one: SimulatedJob, world: World) -> float:
        rng = self._rng(one.job.job)
        if rng.random() >= self.leaving_ratio:
            return float("inf")
        return one.arrival_s + float(rng.random()) * one.solo_s(world)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, crc32(name.encode())]))


UNDISTURBED = Disruptions()
