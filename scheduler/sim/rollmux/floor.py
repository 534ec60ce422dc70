"""One group's machines in the simulator: its jobs' and nodes' records under the durations drawn."""

from dataclasses import dataclass, field

import numpy as np

from harvester.contracts.ids import NodeId
from scheduler.policy.groups.compiled import Records
from scheduler.policy.groups.execution import advance
from scheduler.policy.groups.stages import (
    BULK,
    BUSY,
    EVENT,
    JOB,
    LOADING,
    NODES_MAX,
    PARKED,
    TAIL_HELD,
    TAIL_LEASED,
    TAIL_MOVED,
    TAILS,
    TRAINING,
    WAITS_ROLLOUT,
    WAITS_TRAINING,
    Rules,
    empty_nodes,
    empty_permits,
)
from scheduler.policy.model import Placement

_LOG_SIZE = 4096


@dataclass(slots=True)
class Floor:
    rules: Rules
    lengths_s: Records
    jobs: Records = field(default_factory=lambda: np.zeros(0, dtype=JOB))
    nodes: Records = field(default_factory=empty_nodes)
    permits: Records = field(default_factory=empty_permits)
    names: list[NodeId | None] = field(default_factory=lambda: [None] * NODES_MAX)
    now_s: float = 0.0
    events: int = 0
    _log: Records = field(default_factory=lambda: np.zeros(_LOG_SIZE, dtype=EVENT))

    def mask(self, wanted: tuple[NodeId, ...]) -> int:
        """Bits of nodes, which get one where they have none yet."""
        mask = 0
        for node in wanted:
            if node not in self.names:
                bit = self.names.index(None)
                self.names[bit] = node
                self.nodes[bit] = (-1, 0.0, 0.0)
            mask |= 1 << self.names.index(node)
        return mask

    def named(self, mask: int) -> list[NodeId]:
        return [node for bit, node in enumerate(self.names) if node and mask >> bit & 1]

    def drop_node(self, node: NodeId) -> None:
        if node in self.names:
            bit = self.names.index(node)
            self.names[bit] = None
            self.permits &= ~np.int64(1 << bit)

    def enter(self, row: Records, placement: Placement, *, loading_s: float) -> None:
        row = row.copy()
        row["stage"], row["overhead_s"], row["left_s"] = LOADING, loading_s, 0.0
        row["worked_s"], row["park"] = 0.0, 0
        row["slots"] = row["slots_coming"] = 0
        row["rollout_nodes"] = self.mask(placement.rollout_nodes)
        row["training_nodes"] = self.mask(placement.training_nodes)
        self.jobs = np.append(self.jobs, row)

    def ask_to_leave(self, job: int) -> None:
        """At its iteration's end, or at once where it is between two."""
        at = self.row(job)
        self.jobs["park"][at] = 1
        if self.jobs["stage"][at] in (WAITS_ROLLOUT, LOADING):
            self.jobs["stage"][at] = PARKED

    def leave(self, job: int) -> Records:
        at = self.row(job)
        row = self.jobs[at : at + 1].copy()
        self.jobs = np.delete(self.jobs, at)
        return row

    def stop(self, job: int) -> tuple[Records, int, bool]:
        """Takes the job out wherever it is: its record as at its iteration's beginning, the nodes
        of the phase that it loses, and whether that was a rollout.
        """
        row = self.leave(job)
        stage = int(row["stage"][0])
        rollout = stage in (BULK, TAIL_HELD, TAIL_MOVED, TAIL_LEASED)
        mask = 0
        if rollout or stage == TRAINING:
            mask = int(row["rollout_nodes" if rollout else "training_nodes"][0])
            if stage != TAIL_LEASED:
                self.permits[TAILS if stage == TAIL_MOVED else BUSY] &= ~np.int64(mask)
        if stage in (WAITS_TRAINING, TRAINING):
            iteration = row["offset"][0] + row["done"][0] % row["length"][0]
            row["solo_s"] -= self.lengths_s[iteration, 0]
        return row, mask, rollout

    def row(self, job: int) -> int:
        return int(np.flatnonzero(self.jobs["id"] == job)[0])

    def advance(self, until_s: float) -> Records:
        """The events up to `until_s`, in their order."""
        parts = []
        while True:
            self.now_s, logged, events = self._run(until_s, self._log)
            self.events += events
            parts.append(self._log[:logged].copy())
            if self.now_s >= until_s:
                return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _run(self, until_s: float, log: Records) -> tuple[float, int, int]:
        return advance(
            self.jobs,
            self.nodes,
            self.permits,
            self.lengths_s,
            self.rules,
            self.now_s,
            until_s,
            log,
        )


def new_row(
    number: int,
    *,
    offset: int,
    iterations: int,
    slo: float,
    began_s: float,
    solo_s: float,
    bulk_ratio: float,
    tail_share: float,
) -> Records:
    row = np.zeros(1, dtype=JOB)
    row["divisible"] = 1
    row["id"], row["offset"], row["length"] = number, offset, iterations
    row["iterations"], row["slo"], row["began_s"] = iterations, slo, began_s
    row["solo_s"], row["bulk_ratio"], row["tail_share"] = solo_s, bulk_ratio, tail_share
    return row
