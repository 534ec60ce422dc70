"""A run's ledger: node time, job ends, and every event for an independent check."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import JobId, NodeId
from scheduler.model import PhaseKind, Pool
from scheduler.rollmux.cluster.cluster import ClusterPolicy
from scheduler.rollmux.cluster.runtime_events import PlanJob
from scheduler.rollmux.planner.group_effects import PlacementDecision
from scheduler.rollmux.planner.group_table import NodeType
from scheduler.sim.rollmux.worker import Worker
from scheduler.sim.rollmux.workload import SimulatedJob, World

WINDOW = 20
"""Iterations of the worst window that is reported."""
_POOLS: Final = {PhaseKind.ROLLOUT: Pool.ROLLOUT, PhaseKind.TRAINING: Pool.TRAINING}
_PLACEMENTS: Final = {
    PlacementDecision.PLACED: "placement",
    PlacementDecision.MOVED: "move",
    PlacementDecision.RESTARTED: "restart",
}


@dataclass(slots=True)
class Ledger:
    record: bool = False
    """Whether events are kept; costs time and memory."""
    events: list[dict[str, Any]] = field(default_factory=list)
    node_hours: dict[Pool, float] = field(default_factory=lambda: dict.fromkeys(Pool, 0.0))
    dollars: float = 0.0
    priced: list[tuple[float, float, float]] = field(default_factory=list)
    """Start, end and price per hour of every node that has gone down."""
    ended_s: dict[JobId, float] = field(default_factory=dict)
    reported_kept: set[JobId] = field(default_factory=set)
    """Jobs whose SLO the control reported as kept."""
    iteration_ends_s: dict[JobId, list[float]] = field(default_factory=dict)
    _up: dict[NodeId, tuple[float, Pool, float]] = field(default_factory=dict)

    def write(self, t_s: float, kind: str, **fields: Any) -> None:
        if self.record:
            self.events.append({"t": t_s, "type": kind, **fields})

    def arrival(self, one: SimulatedJob, world: World, *, t_s: float) -> None:
        self.write(
            t_s,
            "arrival",
            job=one.job.job,
            slo=one.job.slo,
            host_bytes=one.job.host_bytes,
            iterations=one.iterations,
            cold_start_s=world.cold_start_s,
        )

    def node_up(self, node: NodeId, pool: Pool, kind: NodeType, *, t_s: float) -> None:
        self._up[node] = (t_s, pool, kind.price_per_hour)
        self.write(
            t_s,
            "node_up",
            node=node,
            pool=pool,
            price_per_hour=kind.price_per_hour,
            host_bytes=kind.host_bytes,
        )

    def node_down(self, node: NodeId, *, t_s: float) -> None:
        since_s, pool, price = self._up.pop(node)
        hours = (t_s - since_s) / 3600
        self.node_hours[pool] += hours
        self.dollars += hours * price
        self.priced.append((since_s, t_s, price))
        self.write(t_s, "node_down", node=node, pool=pool)

    def placement(self, t_s: float, decided: PlanJob) -> None:
        self.write(
            t_s,
            _PLACEMENTS[decided.decision],
            job=decided.job,
            nodes=list(decided.nodes),
            reason=decided.reason,
        )

    def phase(
        self,
        t_s: float,
        kind: str,
        worker: Worker,
        parts: Mapping[NodeId, object],
        **fields: object,
    ) -> None:
        """Writes one event per node, or one without a node; `parts`: held accelerators of partly
        held nodes."""
        if not self.record:
            return
        if not worker.nodes:
            self.write(t_s, kind, job=worker.job, phase=worker.kind, **fields)
        for node in worker.nodes:
            part = {"accelerators": parts[node]} if node in parts else {}
            place = {"node": node, "pool": _POOLS[worker.kind]}
            self.write(t_s, kind, job=worker.job, **place, phase=worker.kind, **part, **fields)

    def in_order(self) -> list[dict[str, Any]]:
        """Recorded events by time, events of one time in order of writing."""
        return sorted(self.events, key=lambda event: event["t"])

    @property
    def nodes_up(self) -> int:
        return len(self._up)


class NodeBill:
    """Bills every machine from the plan's start of it until the plan gives it back or it fails."""

    def __init__(self, cluster: ClusterPolicy, ledger: Ledger) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._up: set[NodeId] = set()
        self._times: Counter[NodeId] = Counter()

    def update(self, now: float) -> Iterator[tuple[NodeId, int]]:
        """Machines that came up, and how often each has by now."""
        # Clears the marks as a shell does that has written the plan to its disk.
        self._cluster.layout_changed = False
        self._cluster.unsaved.clear()
        used = set(self._cluster.fleet.machines.values())
        for node in sorted(self._up - used):
            self._ledger.node_down(node, t_s=now)
        came = sorted(used - self._up)
        self._up = used
        for node in came:
            pool = self._cluster.fleet.pool_of(node)
            assert pool is not None
            self._ledger.node_up(node, pool, self._cluster.config.types[pool], t_s=now)
            self._times[node] += 1
            yield node, self._times[node]

    def is_up(self, node: NodeId, times: int) -> bool:
        """Whether the node is up and still in its `times`-th run."""
        return node in self._up and self._times[node] == times


@dataclass(slots=True)
class RunCounts:
    """Counters of a run."""

    events: int = 0
    moves: int = 0
    failures: int = 0
    """Failures of nodes."""
    restarts: int = 0
    """Restarts of jobs, because a node failed."""
    given_up: int = 0
    """Jobs that left before they were done; they have no end in the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    ledger: Ledger
    counts: RunCounts
    end_s: float


def write_events(ledger: Ledger, path: Path) -> None:
    """JSON lines in the order of time. Raises ConfigError where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for event in ledger.in_order():
                file.write(json.dumps(event) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def slowdown(one: SimulatedJob, ended_s: float, world: World) -> float:
    return (ended_s - one.arrival_s) / one.solo_s(world)


def attained(one: SimulatedJob, ended_s: float, world: World) -> bool:
    return slowdown(one, ended_s, world) <= one.job.slo + 1e-9


def worst_window(one: SimulatedJob, ends_s: list[float], world: World) -> float:
    """Largest slow-down over any `WINDOW` iterations in a row, as a ratio of the SLO."""
    if len(ends_s) <= WINDOW:
        return slowdown(one, ends_s[-1], world) / one.job.slo
    ends = np.array(ends_s)
    solo = np.concatenate([[0.0], np.cumsum(one.iterations_s(world))])
    elapsed_s = ends[WINDOW:] - ends[:-WINDOW]
    solo_s = solo[WINDOW + 1 :] - solo[1:-WINDOW]
    return float((elapsed_s / solo_s).max() / one.job.slo)
