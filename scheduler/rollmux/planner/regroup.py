"""Savings: the jobs of two or three groups, rehosted as cheaply as any hosting of them.

One search takes the groups whose price exceeds the cost of their jobs' least node shares by most,
and tries every hosting of them. Jobs keep their nodes wherever the new hosting allows it; it is
taken only if it saves enough for every job that moves.
"""

from collections.abc import Sequence
from itertools import combinations, islice, product

from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import Placement, Pool
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.stages import FORECAST_NODES_MAX
from scheduler.rollmux.planner.assignments import node_count, numbers
from scheduler.rollmux.planner.cheapest_hosting import CheapestHosting, SearchedJob
from scheduler.rollmux.planner.group_table import GroupState
from scheduler.rollmux.planner.packing import Opening, Packer, SloOf, stated_slo
from scheduler.rollmux.planner.price_floor import PriceFloor
from scheduler.rollmux.planner.relocation import MovePrices, Relocation
from scheduler.rollmux.planner.verdicts import Hosting

_SEEN_MAX = 4096
_VERDICTS_MAX = 60_000
_SEARCHED_GROUPS_MAX = 8
"""Most groups whose pairs and triples are searched."""

Known = list[tuple[int, Placement]]
"""Inputs of a group's spare price: versions and placements of its jobs."""


class Regrouping:
    def __init__(self, packer: Packer, relocation: Relocation, prices: MovePrices) -> None:
        self._packer = packer
        self._table = packer.table
        self._relocation = relocation
        self._prices = prices
        self.search = CheapestHosting(self._table.types, packer.limits.group_jobs)
        self.floor = PriceFloor(self.search)
        self._seen: dict[tuple[int, ...], float] = {}
        """Time until which a neighbourhood, named by its jobs' versions, need not be searched
        again."""
        self._spares: dict[GroupId, tuple[Known, float]] = {}
        """The last answer of each group."""
        self._idle: tuple[list[float], list[list[int]], float] | None = None
        """Spare prices and job versions for which all was searched, and the time until this
        holds."""

    def forget(self) -> None:
        """Drops all results after forecasts have changed."""
        self.search.forget()
        self.floor = PriceFloor(self.search)
        self._seen.clear()
        self._spares.clear()
        self._idle = None

    def improve(self, *, now: float) -> list[Opening]:
        """One search: moves that free nodes, already applied to the table, or none."""
        groups, key = self._most_promising(now=now)
        if not groups:
            return []
        jobs = [job for group in groups for job in group.pinned]
        roster, judge = self._roster(jobs), self._packer.judge
        candidates = [self._searched_job(job, groups) for job in jobs]
        before = sum(map(self._committed, groups))
        self._seen[key] = float("inf")

        def admits(hosting: Hosting) -> bool:
            return judge.admits(roster.hosted(*hosting))

        worth_it = before - self._prices.least_saving_per_move
        bounds = self.floor.bounds(candidates, admits, at_most=worth_it)
        if bounds is None:
            return []
        price, hostings = self.search.search(candidates, admits, bounds)
        if before - price < self._prices.least_saving_per_move:
            return []
        matched = self._matched(jobs, hostings, groups)
        movers = [
            (group, placement)
            for group, placements in matched
            for placement in placements
            if not self._stays(placement)
        ]
        if before - price < self._prices.least_saving_per_move * len(movers):
            return []
        self._seen[key] = now + self._prices.quiet_s / 2
        # The search's results are kept by version, which leaves out credit: check it now.
        owed = self._roster(jobs, slo_of=self._packer.slo_beside_load)
        joined = [
            one
            for one, (_, placements) in zip(hostings, matched, strict=True)
            if not all(map(self._stays, placements))
        ]
        if not all(judge.admits(owed.hosted(*one)) for one in joined):
            return []
        if not all(self._relocation.may_spare(one.job, now=now) for _, one in movers):
            return []
        return self._relocation.move_all(movers)

    def unseen(self, *, now: float) -> bool:
        """Whether another search may find something."""
        return bool(self._most_promising(now=now)[0])

    def _most_promising(self, *, now: float) -> tuple[list[GroupState], tuple[int, ...]]:
        """The unsearched pair or triple of groups with the least used nodes, and its key."""
        groups, spares = self._sparing()
        facts = self._packer.facts
        versions = [[facts[job].version for job in group.pinned] for group in groups]
        if self._idle and self._idle[:2] == (spares, versions) and now < self._idle[2]:
            return [], ()
        seen_until_s = float("inf")
        for at in self._by_promise(spares):
            named = [version for one in at for version in versions[one]]
            if len(named) > self._prices.jobs:
                continue
            key = tuple(sorted(named))
            until_s = self._seen.get(key, now)
            if until_s <= now:
                self._forget()
                return [groups[one] for one in at], key
            seen_until_s = min(seen_until_s, until_s)
        self._idle = (spares, versions, seen_until_s)
        return [], ()

    def _by_promise(self, spares: list[float]) -> list[tuple[int, ...]]:
        """Indices of groups, one to three of them, that together spare enough; the most first."""
        chosen = [
            (sum(spares[one] for one in at), at)
            for size in (1, 2, 3)
            for at in combinations(range(len(spares)), size)
        ]
        enough = [one for one in chosen if one[0] >= self._prices.least_saving_per_move]
        # Stable: of equal promises the smaller neighbourhood comes first.
        return [at for _, at in sorted(enough, key=lambda one: -one[0])]

    def _sparing(self) -> tuple[list[GroupState], list[float]]:
        """The searchable groups that spare most, and by how much each is above its least price."""
        ranked = sorted(
            ((self._spare(group), group) for group in self._table.groups.values() if group.pinned),
            key=lambda one: -one[0],
        )
        searchable = (one for one in ranked if self._searchable(one[1]))
        chosen = list(islice(searchable, _SEARCHED_GROUPS_MAX))
        return [group for _, group in chosen], [spare for spare, _ in chosen]

    def _spare(self, group: GroupState) -> float:
        known: Known = []
        for job, placement in group.pinned.items():
            facts = self._packer.facts[job]
            facts.belief()
            known.append((facts.version, placement))
        last = self._spares.get(group.group)
        if last is None or last[0] != known:
            last = self._spares[group.group] = known, self._committed(group) - self._least(group)
        return last[1]

    def _forget(self) -> None:
        """Drops results kept by version once they are too many: most are outdated by then."""
        if len(self._seen) > _SEEN_MAX:
            self._seen.clear()
            self._idle = None
        if len(self.search.verdicts) > _VERDICTS_MAX:
            self.search.forget()
        if len(self._spares) > 2 * len(self._table.groups):
            self._spares.clear()

    def _searchable(self, group: GroupState) -> bool:
        """Whether the search may regroup the group.

        Its jobs are mature, not moving, may share nodes, and any full set of them fits one group.
        """
        widest = FORECAST_NODES_MAX // self._packer.limits.group_jobs
        return bool(group.pinned) and all(
            facts.mature
            and not facts.moving
            and facts.rollout_nodes + facts.training_nodes <= widest
            and self._packer.slo_now(facts) >= 1.0
            for facts in (self._packer.facts[job] for job in group.pinned)
        )

    def _committed(self, group: GroupState) -> float:
        rollout = {node for one in group.pinned.values() for node in one.rollout_nodes}
        training = {node for one in group.pinned.values() for node in one.training_nodes}
        return self._table.price_of(len(rollout), len(training))

    def _least(self, group: GroupState) -> float:
        """Price of the node time that the group's jobs cannot do without."""
        least = 0.0
        for job in group.pinned:
            facts = self._packer.facts[job]
            rollout, training = self._packer.shares(facts)
            nodes = rollout * facts.rollout_nodes, training * facts.training_nodes
            least += self._table.price_of(*nodes)
        return least

    def _searched_job(self, job: JobId, groups: Sequence[GroupState]) -> SearchedJob:
        facts = self._packer.facts[job]
        home = next(at for at, group in enumerate(groups) if job in group.pinned)
        return SearchedJob(
            facts.version,
            facts.spec.host_bytes,
            self._packer.shares(facts),
            (facts.rollout_nodes, facts.training_nodes),
            1 << home,
            groups[home].masks(groups[home].pinned[job]),
        )

    def _roster(self, jobs: Sequence[JobId], *, slo_of: SloOf = stated_slo) -> Roster:
        """The jobs without nodes."""
        return Roster.of([self._packer.occupant(job, 0, 0, slo_of=slo_of) for job in jobs])

    def _stays(self, placement: Placement) -> bool:
        now = self._table.groups[self._table.home[placement.job]].pinned[placement.job]
        return all(
            set(here) == set(there)
            for (_, here), (_, there) in zip(now.by_pool, placement.by_pool, strict=True)
        )

    def _matched(
        self, jobs: Sequence[JobId], hostings: Sequence[Hosting], groups: Sequence[GroupState]
    ) -> list[tuple[GroupState, list[Placement]]]:
        """New placements on the old nodes of the group that shares most jobs with each hosting."""
        overlaps = sorted(
            (
                (-sum(jobs[one] in group.pinned for one in hosting.members), at, place)
                for at, hosting in enumerate(hostings)
                for place, group in enumerate(groups)
            )
        )
        home: dict[int, GroupState] = {}
        taken: set[GroupId] = set()
        for overlap, at, place in overlaps:
            if overlap and at not in home and groups[place].group not in taken:
                home[at] = groups[place]
                taken.add(groups[place].group)
        matched = []
        for at, hosting in enumerate(hostings):
            group = home.get(at) or self._table.fresh_group()
            rollout = self._nodes(jobs, hosting, group, Pool.ROLLOUT)
            training = self._nodes(jobs, hosting, group, Pool.TRAINING)
            matched.append(
                (
                    group,
                    [
                        Placement(
                            job=jobs[one],
                            rollout_nodes=_taken(rollout, mask),
                            training_nodes=_taken(training, other),
                        )
                        for one, mask, other in zip(*hosting, strict=True)
                    ],
                )
            )
        return matched

    def _nodes(
        self, jobs: Sequence[JobId], hosting: Hosting, group: GroupState, pool: Pool
    ) -> dict[int, NodeId]:
        """A node for every number: the old one of most of its members, or a new one."""
        masks = hosting.rollout if pool is Pool.ROLLOUT else hosting.training
        votes: dict[tuple[int, NodeId], int] = {}
        for one, mask in zip(hosting.members, masks, strict=True):
            placement = group.pinned.get(jobs[one])
            if placement is None:
                continue
            nodes = placement.rollout_nodes if pool is Pool.ROLLOUT else placement.training_nodes
            for number, node in product(numbers(mask), nodes):
                votes[number, node] = votes.get((number, node), 0) + 1
        chosen: dict[int, NodeId] = {}
        for (number, node), _ in sorted(votes.items(), key=lambda vote: (-vote[1], vote[0])):
            if number not in chosen and node not in chosen.values():
                chosen[number] = node
        for number in range(node_count(masks)):
            if number not in chosen:
                chosen[number] = self._table.fresh_nodes(pool, 1)[0]
        return chosen


def _taken(nodes: dict[int, NodeId], mask: int) -> tuple[NodeId, ...]:
    return tuple(nodes[number] for number in numbers(mask))
