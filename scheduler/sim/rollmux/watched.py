"""What a report needs of a run beside its ledger: prices over time, and groups as they were."""

from dataclasses import dataclass, field

from harvester.contracts.ids import JobId, NodeId
from scheduler.policy.groups.events import GroupEffect, GroupEvent, JobEnded
from scheduler.policy.groups.facts import JobFacts
from scheduler.policy.groups.forecast import Occupant
from scheduler.policy.groups.planner import GroupPlanner
from scheduler.sim.rollmux.ledger import Ledger

Composition = tuple[tuple[JobId, int, int], ...]
"""Jobs of a group with the bits of their nodes in it."""


@dataclass(frozen=True, slots=True)
class Stay:
    """One price that was paid from one time to another."""

    from_s: float
    until_s: float
    price_per_hour: float


class PriceLedger(Ledger):
    """A ledger that remembers each node's time as well."""

    def __init__(self, *, record: bool) -> None:
        super().__init__(record=record)
        self.stays: list[Stay] = []

    def node_down(self, node: NodeId, *, t_s: float) -> None:
        if node in self._up:
            since_s, _, price_per_hour = self._up[node]
            self.stays.append(Stay(since_s, t_s, price_per_hour))
        super().node_down(node, t_s=t_s)


@dataclass(slots=True)
class LivedGroup:
    """Jobs that shared nodes in one way, for as long as they did."""

    occupants: list[Occupant]
    """As they were believed to be when last looked at."""
    lived_s: float = 0.0


@dataclass(slots=True)
class WatchedPlanner:
    """The planner, with its groups noted whenever they may have changed."""

    planner: GroupPlanner
    facts: dict[JobId, JobFacts] = field(init=False)
    sizes: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """Time, and groups of one job, of two, and so on from then."""
    groups: dict[Composition, LivedGroup] = field(default_factory=dict)
    _now: dict[Composition, float] = field(default_factory=dict)
    """Groups that are there, and since when."""

    def __post_init__(self) -> None:
        self.facts = self.planner.facts

    def observe(self, event: GroupEvent, *, now: float) -> tuple[GroupEffect, ...]:
        effects = self.planner.observe(event, now=now)
        if effects or isinstance(event, JobEnded):
            self._look(now)
        return effects

    def _look(self, now: float) -> None:
        counts = [0] * self.planner.packer.limits.group_jobs
        found: dict[Composition, float] = {}
        for cell in self.planner.book.cells.values():
            if not cell.pinned:
                continue
            counts[len(cell.pinned) - 1] += 1
            if len(cell.pinned) == 1:
                continue
            composition = tuple(
                (job, *cell.masks(placement)) for job, placement in cell.pinned.items()
            )
            found[composition] = self._now.get(composition, now)
            group = self.groups.setdefault(composition, LivedGroup([]))
            group.occupants = self.planner.packer.occupants(cell)
        for composition, since_s in self._now.items():
            if composition not in found:
                self.groups[composition].lived_s += now - since_s
        self._now = found
        self.sizes.append((now, tuple(counts)))
