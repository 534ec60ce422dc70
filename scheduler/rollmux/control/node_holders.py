"""Jobs on each node, and the jobs that a waiting job has waited for, from permit effects."""

from collections.abc import Iterable, Mapping
from typing import Any

from harvester.contracts.ids import JobId, NodeId
from scheduler.rollmux.cluster.runtime_events import RuntimeEffect
from scheduler.rollmux.permits.events import (
    EndPermit,
    FreeNodes,
    GrantPermit,
    NarrowPhase,
    WidenPermit,
)


class NodeHolders:
    def __init__(self) -> None:
        self._on: dict[NodeId, set[JobId]] = {}
        self._keeps: dict[JobId, tuple[NodeId, ...]] = {}
        """Nodes that a tail was asked to keep."""

    def begin(self, job_permits: Iterable[Mapping[str, Any]]) -> None:
        """Anew, with the records of a snapshot."""
        self._on, self._keeps = {}, {}
        for permit in job_permits:
            job = JobId(permit["terms"]["job"])
            self._add(job, permit.get("nodes", ()))
            self._keeps[job] = tuple(permit.get("keep", ()))

    def heard(self, effect: RuntimeEffect) -> None:
        match effect:
            case GrantPermit(job=job, nodes=nodes) | WidenPermit(job=job, nodes=nodes):
                self._add(job, nodes)
            case NarrowPhase(job=job, keep=keep):
                self._keeps[job] = keep
            case FreeNodes(job=job, nodes=nodes):
                kept = self._keeps.get(job, ())
                self._remove(job, [node for node in nodes if node not in kept])
            case EndPermit(job=job):
                self._remove(job, list(self._on))
                self._keeps.pop(job, None)
            case _:
                pass

    def before(self, job: JobId, nodes: Iterable[NodeId]) -> set[JobId]:
        """Others on these nodes."""
        found = (self._on.get(node, set()) for node in nodes)
        return set[JobId]().union(*found) - {job}

    def _add(self, job: JobId, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            self._on.setdefault(node, set()).add(job)

    def _remove(self, job: JobId, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            jobs = self._on.get(node, set())
            jobs.discard(job)
            if not jobs:
                self._on.pop(node, None)
