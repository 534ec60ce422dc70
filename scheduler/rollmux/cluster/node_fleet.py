"""Maps the planner's node names to machines; tracks free and failed machines.

The planner numbers nodes as it invents them; this module assigns machines. A name whose machine
failed while no other is free waits for the next free machine.
"""

from collections.abc import Iterable, Mapping

from harvester.contracts.ids import NodeId
from scheduler.model import Pool
from scheduler.rollmux.cluster.config import PoolNodes


class NodeFleet:
    def __init__(self, pools: Mapping[Pool, PoolNodes]) -> None:
        self._names = {pool: nodes.names for pool, nodes in pools.items()}
        self._pool = {name: pool for pool, nodes in pools.items() for name in nodes.names}
        self.failed: set[NodeId] = set()
        """Failed machines; read-only for callers, `fail` and `repair` change it."""
        self.machines: dict[NodeId, NodeId] = {}
        """Machine by planner name; read-only for callers."""
        self.awaited: dict[NodeId, Pool] = {}
        """Planner's names without a machine, the longest waiting first."""
        self._free: dict[Pool, tuple[NodeId, ...]] = {}
        """Free machines by pool, cached since a machine last changed hands."""

    def restore(
        self,
        machines: Mapping[NodeId, NodeId],
        awaited: Mapping[NodeId, Pool],
        failed: Iterable[NodeId],
    ) -> None:
        self.machines, self.awaited = dict(machines), dict(awaited)
        self.failed = {node for node in failed if node in self._pool}
        self._free.clear()

    def has_up(self, machine: NodeId) -> bool:
        """Whether the machine is up; includes one in use that was removed from the pools."""
        known = machine in self._pool or machine in self.machines.values()
        return known and machine not in self.failed

    def pool_of(self, machine: NodeId) -> Pool | None:
        return self._pool.get(machine)

    def count(self, pool: Pool) -> int:
        """Number of machines, failed ones included."""
        return len(self._names[pool])

    def free(self, pool: Pool) -> tuple[NodeId, ...]:
        """Free machines, in the order of the file."""
        free = self._free.get(pool)
        if free is None:
            used = self.failed | set(self.machines.values())
            free = tuple(name for name in self._names[pool] if name not in used)
            self._free[pool] = free
        return free

    def counts(self, pool: Pool) -> dict[str, int]:
        """Machines used, free and failed, and names that miss one."""
        failed = sum(self._pool[name] is pool for name in self.failed)
        free = len(self.free(pool))
        return {
            "used": self.count(pool) - failed - free,
            "free": free,
            "failed": failed,
            "missing": sum(each is pool for each in self.awaited.values()),
        }

    def spare(self, pool: Pool) -> int:
        """Free machines that no name waits for."""
        waiting = sum(1 for each in self.awaited.values() if each is pool)
        return max(0, len(self.free(pool)) - waiting)

    def planned(self, machine: NodeId) -> NodeId | None:
        """The planner's name of a machine in use."""
        return next((name for name, own in self.machines.items() if own == machine), None)

    def bind(self, name: NodeId, pool: Pool) -> None:
        self.awaited[name] = pool
        self.bind_awaited()

    def bind_awaited(self) -> list[NodeId]:
        """Gives free machines to names that wait for one; returns those names."""
        bound = []
        for name, pool in list(self.awaited.items()):
            free = self.free(pool)
            if free:
                self.machines[name] = free[0]
                self._free[pool] = free[1:]
                del self.awaited[name]
                bound.append(name)
        return bound

    def release(self, name: NodeId) -> None:
        self._free.clear()
        self.machines.pop(name, None)
        self.awaited.pop(name, None)

    def fail(self, machine: NodeId) -> NodeId | None:
        """Returns the planner's name of it, where it was in use."""
        name = self.planned(machine)
        self._free.clear()
        if machine in self._pool:
            self.failed.add(machine)
        if name is not None:
            del self.machines[name]
        return name

    def repair(self, machine: NodeId) -> None:
        self._free.clear()
        self.failed.discard(machine)

    def named(self, names: Iterable[NodeId]) -> tuple[NodeId, ...]:
        """Machines with these names; () if one is missing."""
        requested = tuple(names)
        found = tuple(self.machines[name] for name in requested if name in self.machines)
        return found if len(found) == len(requested) else ()
