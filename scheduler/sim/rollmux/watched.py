"""Series of a run for a report, beside its ledger: prices over time, and sizes of groups."""

from dataclasses import dataclass, field

from harvester.contracts.ids import NodeId
from scheduler.rollmux.cluster.runtime import PhaseRuntime
from scheduler.sim.rollmux.ledger import Ledger


@dataclass(frozen=True, slots=True)
class PricedInterval:
    """One price over a span of time."""

    from_s: float
    until_s: float
    price_per_hour: float


class PriceLedger(Ledger):
    """A ledger that remembers each node's time as well."""

    def __init__(self, *, record: bool) -> None:
        super().__init__(record=record)
        self.placements: list[PricedInterval] = []

    def node_down(self, node: NodeId, *, t_s: float) -> None:
        if node in self._up:
            since_s, _, price_per_hour = self._up[node]
            self.placements.append(PricedInterval(since_s, t_s, price_per_hour))
        super().node_down(node, t_s=t_s)


@dataclass(slots=True)
class GroupSizes:
    """Numbers of groups by size, recorded whenever nodes have changed hands."""

    sizes: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """Time, and groups of one job, of two, and so on from then."""

    def look(self, runtime: PhaseRuntime, now: float) -> None:
        planner = runtime.cluster.planner
        counts = [0] * planner.packer.limits.group_jobs
        for cell in planner.book.cells.values():
            if cell.pinned:
                counts[len(cell.pinned) - 1] += 1
        self.sizes.append((now, tuple(counts)))
