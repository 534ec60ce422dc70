"""What is where in the simulator: the nodes that are up, who is resident on them, and the floors.

Does what the cluster tells it and decides nothing. A node costs from when the first job is put on
it to when it is given back or fails.
"""

from collections.abc import Callable, Iterable

import numpy as np

from harvester.contracts.ids import GroupId, NodeId
from scheduler.policy.groups.compiled import Records
from scheduler.policy.groups.stages import Rules
from scheduler.policy.model import Node, PhaseKind, Placement
from scheduler.sim.rollmux.floor import Floor
from scheduler.sim.rollmux.ledger import Ledger
from scheduler.sim.rollmux.workload import SimulatedJob

FloorOf = Callable[[GroupId, Rules, Records, float], Floor]
"""A new group's machines, by the rules, everybody's durations and the time."""


def own_nodes(_: GroupId, rules: Rules, lengths_s: Records, now_s: float) -> Floor:
    """Without leases."""
    return Floor(rules, lengths_s, now_s=now_s)


class Site:
    def __init__(
        self,
        jobs: list[SimulatedJob],
        rules: Rules,
        ledger: Ledger,
        floor_of: FloorOf = own_nodes,
    ) -> None:
        self._jobs = jobs
        self._rules = rules
        self._floor_of = floor_of
        self._lengths_s = np.concatenate([one.lengths_s for one in jobs])
        self._ledger = ledger
        self.floors: dict[GroupId, Floor] = {}
        self.home: dict[int, GroupId] = {}
        """Of each job that has begun: the group that it is in, or was in last."""
        self.nodes: dict[NodeId, tuple[Node, GroupId]] = {}
        self._held: dict[int, tuple[NodeId, ...]] = {}
        self._held_bytes: dict[NodeId, int] = {}
        self.past_events = 0
        """Of floors that are gone."""

    def enter(
        self, row: Records, placement: Placement, group: GroupId, *, loading_s: float, now: float
    ) -> list[NodeId]:
        """Puts a job on its nodes; returns those that came up with it."""
        number = int(row["id"][0])
        floor = self.floors.get(group)
        if floor is None:
            floor = self._floor_of(group, self._rules, self._lengths_s, now)
            self.floors[group] = floor
        names = nodes_of(placement)
        up = []
        for name in names:
            if self._ledger.node_up(self.nodes[name][0], t_s=now):
                up.append(name)
        self._hold(number, names)
        floor.enter(row, placement, loading_s=loading_s)
        self._ledger.write(now, "loading", job=placement.job, nodes=list(names))
        self.home[number] = group
        return up

    def leave(self, number: int) -> Records:
        """Takes out a job that is between two iterations."""
        self._hold(number, ())
        return self.floors[self.home[number]].leave(number)

    def stop(self, number: int, *, keeps: Iterable[NodeId] = (), now: float) -> Records:
        """Takes out a job at once, its iteration lost; it stays resident on nodes that it keeps."""
        floor = self.floors[self.home[number]]
        row, held, rollout = floor.stop(number)
        job = self._jobs[number].job.job
        phase = PhaseKind.ROLLOUT if rollout else PhaseKind.TRAINING
        for node in floor.named(held):
            pool = self.nodes[node][0].pool
            self._ledger.write(now, "phase_lost", job=job, node=node, pool=pool, phase=phase)
        self._ledger.write(now, "left", job=job)
        kept = set(keeps)
        self._hold(number, tuple(node for node in self._held[number] if node in kept))
        return row

    def forget(self, number: int) -> None:
        """Its state is nowhere any more."""
        self._hold(number, ())
        del self._held[number], self.home[number]

    def has_room(self, number: int, placement: Placement) -> bool:
        size = self._jobs[number].job.host_bytes_per_node
        return all(
            self._held_bytes.get(node, 0) + size <= self.nodes[node][0].host_bytes
            for node in nodes_of(placement)
            if node not in self._held.get(number, ())
        )

    def release(self, name: NodeId, *, now: float) -> None:
        self._ledger.node_down(name, t_s=now)
        _, group = self.nodes.pop(name)
        if (floor := self.floors.get(group)) is not None:
            floor.drop_node(name)
            if not floor.jobs.size and not any(floor.names):
                self.past_events += floor.events
                del self.floors[group]

    def _hold(self, number: int, names: tuple[NodeId, ...]) -> None:
        size = self._jobs[number].job.host_bytes_per_node
        for name in self._held.get(number, ()):
            self._held_bytes[name] -= size
        for name in names:
            self._held_bytes[name] = self._held_bytes.get(name, 0) + size
        self._held[number] = names


def nodes_of(placement: Placement) -> tuple[NodeId, ...]:
    return (*placement.rollout_nodes, *placement.training_nodes)
