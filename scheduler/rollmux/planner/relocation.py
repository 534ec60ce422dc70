"""Moves: the jobs that leave a group to restore every SLO or to free a node.

Every search applies its moves to the table, compares, and takes them back unless it keeps them. A
moving job is resident at both ends, so a move that memory cannot carry is never found. If no job's
credit covers a move, jobs move only where a job that needs dedicated nodes has neighbours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, starmap

from harvester.contracts.ids import JobId
from scheduler.model import Placement
from scheduler.rollmux.beliefs.facts import JobFacts
from scheduler.rollmux.beliefs.slo import SPEND_OVER_S
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.judge import Judge
from scheduler.rollmux.forecast.scenarios import ROUNDING, shares_nodes
from scheduler.rollmux.planner.group_table import GroupState, GroupTable
from scheduler.rollmux.planner.packing import Opening, OpeningKind, Packer


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePrices:
    move_s: float = 300.0
    """Time that a job loses by a move."""
    least_saving_per_move: float = 1.5
    """Least saving of a move, in dollars an hour; a move costs about three hours of it."""
    quiet_s: float = 3600.0
    """Least time between two moves of one job that only save money, in s."""
    jobs: int = 7
    """Most jobs that are regrouped at once."""
    surprise_iterations: float = 1.0
    """Additional cost of a move, in iterations: the wait for the iteration's end."""


class Relocation:
    def __init__(self, packer: Packer, prices: MovePrices) -> None:
        self._packer = packer
        self._table: GroupTable = packer.table
        self._prices = prices
        self.move_s = prices.move_s
        """Time that a job loses by a move, as far as it is known."""

    def restore(self, group: GroupState, *, now: float) -> list[Opening]:
        """The fewest, then cheapest, moves out of a group that does not keep its promises.

        Already applied to the table; empty where nothing can or need be done.
        """
        moves = self._restore(
            group, [job for job in group.pinned if self.affords_move(job, now=now)]
        )
        crowded = any(self._besides(group, one) for one in group.pinned)
        if moves or not crowded:
            return moves
        # No job can amortise a move, and staying together costs more: move all that soon regain it,
        # and if they do not suffice, the job that comes closest.
        left_s = {job: self._left_of_move_s(job, now=now) for job in group.pinned}
        able = [job for job in group.pinned if not self._facts(job).moving]
        able.sort(key=lambda job: -left_s[job])
        soon = sum(left_s[job] >= 0.0 for job in able)
        for count in range(max(1, soon), len(able) + 1):
            moves = self._restore(group, able[:count])
            if moves:
                break
        return moves

    def _restore(self, group: GroupState, movable: Sequence[JobId]) -> list[Opening]:
        fewest = [combinations(movable, count) for count in (1, 2)]
        # A list: tentative moves that are taken back change the group meanwhile.
        all_beside = [self._besides(group, one) for one in group.pinned]
        many = [jobs for jobs in all_beside if len(jobs) > 2 and set(jobs) <= set(movable)]
        for candidates in (*fewest, many):
            best: tuple[float, tuple[JobId, ...]] | None = None
            for jobs in candidates:
                if len(jobs) == len(group.pinned):
                    continue
                rest = self._packer.occupants(group, slo_of=self._packer.slo_now, without=jobs)
                if not self._packer.judge.admits(Roster.of(rest)):
                    continue
                before = self._table.committed_per_hour
                moves = self.relocate(jobs, group)
                if moves is None:
                    continue
                price = self._table.committed_per_hour - before
                self.take_back(moves)
                if best is None or price < best[0]:
                    best = (price, jobs)
            if best is not None:
                return self.relocate(best[1], group) or []
        return []

    def _besides(self, group: GroupState, job: JobId) -> tuple[JobId, ...]:
        """Jobs on the job's nodes although it may share none; empty if it may share."""
        alone = self._packer.slo_now(self._facts(job)) < 1.0
        return group.beside(group.pinned[job]) if alone else ()

    def relocate(self, jobs: Sequence[JobId], home: GroupState) -> list[Opening] | None:
        """Moves all of these jobs of a group, the heaviest first, or no job; None if one finds no
        opening elsewhere."""
        packer = self._packer

        def opening(job: JobId) -> Opening | None:
            found = packer.best(job, without=home)
            supplied = self._table.is_supplied(found.placement)
            return found if supplied else packer.best_within_supply(job, without=home)

        heaviest_first = sorted(jobs, key=lambda job: -sum(packer.shares(packer.facts[job])))
        return self._move(jobs, map(opening, heaviest_first))

    def take_back(self, moves: Sequence[Opening]) -> None:
        for move in reversed(moves):
            self._packer.leave(move.job)
            self._packer.put_back(move.job)

    def affords_move(self, job: JobId, *, now: float) -> bool:
        """Whether the job's credit covers the move and its additional cost."""
        facts = self._facts(job)
        return not facts.moving and facts.account.credit_s(now) >= self._need_s(facts)

    def _left_of_move_s(self, job: JobId, *, now: float) -> float:
        """The job's remaining credit, in s, after a move and a further stay alone.

        The stay is as long again as the job has lived, at most six hours.
        """
        facts = self._facts(job)
        account = facts.account
        lasts_s = min(now - account.began_s, SPEND_OVER_S)
        return account.credit_s(now) + (account.slo - 1.0) * lasts_s - self._need_s(facts)

    def _need_s(self, facts: JobFacts) -> float:
        prices = self._prices
        return self.move_s + prices.surprise_iterations * facts.belief().iteration_s

    def may_spare(self, job: JobId, *, now: float) -> bool:
        facts = self._facts(job)
        quiet = facts.moved_s is None or now - facts.moved_s >= self._prices.quiet_s
        return quiet and facts.mature and self.affords_move(job, now=now)

    def _facts(self, job: JobId) -> JobFacts:
        return self._packer.facts[job]

    def move_all(self, targets: Sequence[tuple[GroupState, Placement]]) -> list[Opening]:
        """Moves jobs to given nodes, all or none: memory may not carry both ends of a move, or a
        node may be missing."""
        table = self._table

        def opening(group: GroupState, placement: Placement) -> Opening | None:
            host_bytes = self._facts(placement.job).spec.host_bytes
            fits = table.planned.has_room(placement, host_bytes)
            if not fits or not table.is_supplied(placement):
                return None
            kind = OpeningKind.DIRECT
            return Opening(kind=kind, group=group, placement=placement, delta_per_hour=0.0)

        return self._move([one.job for _, one in targets], starmap(opening, targets)) or []

    def _move(
        self, jobs: Sequence[JobId], openings: Iterable[Opening | None]
    ) -> list[Opening] | None:
        """Moves the jobs, each opening found after the moves before; None takes all back."""
        for job in jobs:
            self._packer.leave(job, stays_resident=True)
        moves: list[Opening] = []
        for opening in openings:
            if opening is None:
                self.take_back(moves)
                for job in jobs:
                    if job not in self._table.home:
                        self._packer.put_back(job)
                return None
            self._packer.take(opening)
            moves.append(opening)
        return moves


def together(move: Opening, moves: Sequence[Opening]) -> str:
    """Names of the other jobs that move for the same reason; empty if none does."""
    others: list[JobId] = sorted(one.job for one in moves if one.job != move.job)
    return f", together with {', '.join(others)}" if others else ""


def endangered(jobs: Sequence[JobFacts], roster: Roster, judge: Judge, *, now: float) -> str:
    """Text on jobs that the roster's judge does not admit, with forecasts of the endangered ones.

    `jobs` in the roster's order.
    """
    limits, bounds = roster.slos.tolist(), judge.bounds(roster).tolist()
    alone = [limit < 1.0 for limit in limits]
    crowded = [at for at, one in enumerate(alone) if one and shares_nodes(roster.jobs, at)]
    why = [_crowded(jobs[at], now) for at in crowded]
    over = {at: bounds[at] - max(1.0, limits[at]) for at in range(len(jobs)) if not alone[at]}
    # A short look at the means may have rejected a roster that the whole forecast finds close.
    least = ROUNDING if why else min(ROUNDING, max(over.values()) - ROUNDING)
    why += [_slowed(jobs[at], limits[at], bounds[at]) for at in over if over[at] > least]
    return "; ".join(why)


def _crowded(facts: JobFacts, now: float) -> str:
    return (
        f"the promise to {facts.spec.job} was at risk: its credit of "
        f"{facts.settled_credit_s(now):.0f} s absorbs no surprise beside others"
    )


def _slowed(facts: JobFacts, limit: float, bound: float) -> str:
    return (
        f"the promise to {facts.spec.job} was at risk: forecast slow-down {bound:.2f}, at most "
        f"{limit:.2f} keeps its SLO of {facts.account.slo:.2f}"
    )
