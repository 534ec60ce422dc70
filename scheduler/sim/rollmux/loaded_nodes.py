"""The accelerators of all nodes in a simulation: the job whose state is loaded on each node."""

from collections.abc import Iterable

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import NO_JOB
from scheduler.sim.rollmux.worker import Worker
from scheduler.sim.rollmux.workload import World


class LoadedNodes:
    def __init__(self, world: World) -> None:
        self._world = world
        self._jobs: dict[NodeId, JobId] = {}
        """`NO_JOB` on a node whose state made way: the next job there pays for it with its warm
        start."""

    def load(self, worker: Worker, nodes: tuple[NodeId, ...]) -> float:
        """Loads the job's state on these nodes; returns the seconds that it takes."""
        missing = [node for node in nodes if self._jobs.get(node) != worker.job]
        # On accelerators that hold nothing, a state from storage comes at once.
        warm = any(node in self._jobs or node in worker.resident for node in missing)
        self._jobs.update(dict.fromkeys(nodes, worker.job))
        return warm * self._world.warm_start_s + worker.bring(nodes, self._world)

    def widen(self, worker: Worker, nodes: tuple[NodeId, ...]) -> None:
        """The running phase has its state on these nodes too."""
        self._jobs.update(dict.fromkeys(nodes, worker.job))
        worker.resident.update(nodes)

    def make_way(self, nodes: Iterable[NodeId], job: JobId | None = None) -> None:
        """The states on these nodes are off; `job`: only those of this job."""
        self._jobs |= {n: NO_JOB for n in nodes if job is None or self._jobs.get(n) == job}

    def unload(self, job: JobId) -> None:
        """The job's process has taken its states off all accelerators."""
        self._jobs = {node: one for node, one in self._jobs.items() if one != job}

    def lose(self, node: NodeId) -> None:
        """The node has failed."""
        self._jobs.pop(node, None)
