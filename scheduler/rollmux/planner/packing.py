"""Finds a placement for a job: Algorithm 1's openings, the cheapest one that keeps every SLO.

Direct packing shares existing nodes, rollout scaling adds rollout nodes to a group, training
scaling (ours) adds training nodes, and a new isolated group is always possible. Host memory is a
hard limit. Among equal prices the fullest group is tried first, so that the emptier ones can end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, islice, product

from harvester.contracts.ids import JobId, NodeId
from scheduler.model import Placement, Pool
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.forecast.forecast import Occupant, Roster
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.planner.group_table import GroupState, GroupTable
from scheduler.rollmux.planner.index import SHARE_MAX, GroupIndex


class OpeningKind(StrEnum):
    DIRECT = "direct packing"
    ROLLOUT_SCALING = "rollout scaling"
    TRAINING_SCALING = "training scaling"
    NEW_GROUP = "new isolated group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    kind: OpeningKind
    group: GroupState
    placement: Placement
    delta_per_hour: float
    """Price of the nodes that it brings up, or keeps up."""

    @property
    def job(self) -> JobId:
        return self.placement.job

    @property
    def widened(self) -> GroupState:
        """The group with the opening taken."""
        group, placement = self.group, self.placement
        return GroupState(
            group.group,
            [*dict.fromkeys((*group.rollout, *placement.rollout_nodes))],
            [*dict.fromkeys((*group.training, *placement.training_nodes))],
            {**group.pinned, placement.job: placement},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingLimits:
    group_jobs: int = 5
    combinations: int = 3
    """Existing node sets tried for each pool of one group."""
    tries: int = 6
    """Openings simulated for one decision, for each kind."""
    training_scaling: bool = True


SloOf = Callable[[JobFacts], float]


def stated_slo(facts: JobFacts) -> float:
    return facts.account.slo


class Packer:
    def __init__(
        self,
        table: GroupTable,
        facts: dict[JobId, JobFacts],
        judge: Judge,
        limits: PackingLimits,
    ) -> None:
        self.table = table
        self.facts = facts
        self.judge = judge
        self.limits = limits
        self.index = GroupIndex(group_jobs=limits.group_jobs)
        self.now_s = 0.0
        """Time of the present question; credit depends on it."""
        self.load_s = 0.0
        """Time for which a job in question loads on its new nodes, under its permits: it and the
        jobs beside it are delayed by that."""

    def refresh(self, group: GroupState) -> None:
        """Updates the group's row; call it whenever the group changed."""
        self.index.refresh(group, self.table, self.node_shares(group))

    def take(self, opening: Opening) -> None:
        """Pins the opening's job there."""
        host_bytes = self.facts[opening.job].spec.host_bytes
        self.table.pin(opening.placement, opening.group, host_bytes)
        self.refresh(opening.group)

    def leave(self, job: JobId, *, stays_resident: bool = False) -> None:
        """Takes a job out of its group, as `GroupTable.unpin`."""
        group = self.table.groups[self.table.home[job]]
        self.table.unpin(job, stays_resident=stays_resident)
        self.refresh(group)

    def put_back(self, job: JobId) -> None:
        """Takes back the last `leave` of a job that was to stay resident."""
        self.table.placed(job)
        self.refresh(self.table.groups[self.table.home[job]])

    def occupant(
        self, job: JobId, rollout: int, training: int, *, slo_of: SloOf = stated_slo
    ) -> Occupant:
        """A job on the nodes of its masks for a forecast; `slo_of` gives the SLO it has to keep."""
        facts = self.facts[job]
        tail, belief = self.judge.tail(facts), self.judge.belief(facts)
        shape = tail.bulk_ratio, tail.share, facts.divisible
        return Occupant(rollout, training, slo_of(facts), belief, *shape)

    def occupants(
        self,
        group: GroupState,
        *,
        slo_of: SloOf = stated_slo,
        without: Sequence[JobId] = (),
    ) -> list[Occupant]:
        return [
            self.occupant(job, *group.masks(placement), slo_of=slo_of)
            for job, placement in group.pinned.items()
            if job not in without
        ]

    def slo_now(self, facts: JobFacts) -> float:
        """Largest slow-down that co-located jobs may cause now; never more than the SLO."""
        return self.judge.slo(facts, now=self.now_s)

    def slo_beside_load(self, facts: JobFacts) -> float:
        """The same where a job comes to the nodes."""
        return self.judge.slo(facts, now=self.now_s, delay_s=self.load_s)

    def slo_ahead(self, facts: JobFacts) -> float:
        """Largest slow-down that co-located jobs may cause ahead, spending the spare credit."""
        return facts.slo_ahead(self.now_s)

    def node_shares(self, group: GroupState) -> dict[NodeId, float]:
        """The least share of each node's time that its jobs need to keep their SLOs."""
        shares = dict.fromkeys((*group.rollout, *group.training), 0.0)
        for placement in group.pinned.values():
            rollout, training = self.shares(self.facts[placement.job])
            for node in placement.rollout_nodes:
                shares[node] += rollout
            for node in placement.training_nodes:
                shares[node] += training
        return shares

    def shares(self, facts: JobFacts) -> tuple[float, float]:
        """Rollout and training share of a node's time that a job needs at its slowest."""
        belief = self.judge.belief(facts)
        slowest_s = facts.account.slo * belief.iteration_s
        node_s = belief.rollout_s * self.judge.tail(facts).node_ratio
        return node_s / slowest_s, belief.training_s / slowest_s

    def best(self, job: JobId, *, without: GroupState | None = None) -> Opening:
        """The cheapest admissible opening, not in the group `without`.

        Looks at the `tries` fullest groups of each kind, regardless of the supply of nodes.
        """
        found = self._in_groups(job, without, within_supply=False)
        return found or self.isolated(job)

    def best_within_supply(
        self, job: JobId, *, without: GroupState | None = None
    ) -> Opening | None:
        """Like `best`, but only in existing groups and on supplied nodes; looks at every group."""
        # The index may be older than the latest beliefs about its jobs.
        for group in self.table.groups.values():
            self.refresh(group)
        return self._in_groups(job, without, within_supply=True)

    def _in_groups(
        self, job: JobId, without: GroupState | None, *, within_supply: bool
    ) -> Opening | None:
        facts = self.facts[job]
        shares, host_bytes = self.shares(facts), facts.spec.host_bytes
        tries = None if within_supply else self.limits.tries
        for kind, pools in self._kinds(facts):
            groups = self.index.candidates(shares, host_bytes, pools=pools, most=tries)
            tried = islice(
                (
                    opening
                    for group in groups
                    if group is not without and self.judge.takes_more(self.occupants(group))
                    for opening in self._openings(group, job, kind)
                    if not within_supply or self.table.is_supplied(opening.placement)
                ),
                tries,
            )
            if (opening := next(filter(self.admits, tried), None)) is not None:
                return opening
        return None

    def admits(self, opening: Opening) -> bool:
        """Whether every job in the group keeps its SLO with the opening taken."""
        occupants = self.occupants(opening.widened, slo_of=self.slo_beside_load)
        return self.judge.admits(Roster.of(occupants))

    def isolated(self, job: JobId) -> Opening:
        facts, table = self.facts[job], self.table
        placement = Placement(
            job=job,
            rollout_nodes=table.fresh_nodes(Pool.ROLLOUT, facts.rollout_nodes),
            training_nodes=table.fresh_nodes(Pool.TRAINING, facts.training_nodes),
        )
        return Opening(
            kind=OpeningKind.NEW_GROUP,
            group=table.fresh_group(),
            placement=placement,
            delta_per_hour=table.price_of(facts.rollout_nodes, facts.training_nodes),
        )

    def _kinds(self, facts: JobFacts) -> list[tuple[OpeningKind, tuple[Pool, ...]]]:
        """Kinds of openings in a group, the cheapest first, and the pools where they need room."""
        rollout, training = facts.rollout_nodes, facts.training_nodes
        price = self.table.price_of
        kinds: list[tuple[float, OpeningKind, tuple[Pool, ...]]] = [
            (0.0, OpeningKind.DIRECT, (Pool.ROLLOUT, Pool.TRAINING)),
            (price(rollout, 0), OpeningKind.ROLLOUT_SCALING, (Pool.TRAINING,)),
        ]
        # Beside rollout nodes free of charge a new group costs no more.
        if self.limits.training_scaling and price(rollout, 0) > 0.0:
            kinds.append((price(0, training), OpeningKind.TRAINING_SCALING, (Pool.ROLLOUT,)))
        return [(kind, pools) for _, kind, pools in sorted(kinds, key=lambda one: one[0])]

    def unjudged(self, group: GroupState, job: JobId, kind: OpeningKind) -> Iterator[Opening]:
        """Openings that memory and group size allow, without regard to SLOs."""
        if len(group.pinned) < self.limits.group_jobs:
            yield from self._openings(group, job, kind, share_max=float("inf"))

    def _openings(
        self, group: GroupState, job: JobId, kind: OpeningKind, *, share_max: float = SHARE_MAX
    ) -> Iterator[Opening]:
        facts, table = self.facts[job], self.table
        taken = self.node_shares(group)
        scaling = (OpeningKind.ROLLOUT_SCALING, OpeningKind.TRAINING_SCALING)
        counts = (facts.rollout_nodes, facts.training_nodes)
        sides: list[list[tuple[NodeId, ...]]] = []
        added = 0.0
        for (pool, nodes), count, share, scaled in zip(
            group.by_pool, counts, self.shares(facts), scaling, strict=True
        ):
            if kind is scaled:
                sides.append([table.fresh_nodes(pool, count)])
                added += count * table.types[pool].price_per_hour
                continue
            fitting = sorted(
                (
                    node
                    for node in nodes
                    if 0.0 < taken[node] <= share_max - share
                    and table.resident.takes(job, node, pool, facts.spec.host_bytes)
                ),
                key=lambda node: -taken[node],
            )
            sides.append(list(islice(combinations(fitting, count), self.limits.combinations)))
        for rollout, training in product(*sides):
            placement = Placement(job=job, rollout_nodes=rollout, training_nodes=training)
            yield Opening(kind=kind, group=group, placement=placement, delta_per_hour=added)
