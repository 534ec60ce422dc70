"""The cheapest way to host a few jobs, by exhaustive search.

Every partition into groups, every assignment of a group's jobs to rollout and training nodes, in
order of price, until one keeps every SLO. Sets that contain a known failure are skipped. Among
equal prices the hosting is taken by which most jobs keep their nodes: each move costs minutes.
Exponential: for the jobs of two or three groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import combinations
from operator import or_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.model import Pool
from scheduler.rollmux.forecast.compiled import Records
from scheduler.rollmux.planner.assignments import (
    Masks,
    affordable,
    connected,
    numbers,
    sharing,
    table,
)
from scheduler.rollmux.planner.group_table import NodeType
from scheduler.rollmux.planner.verdicts import Admits, Hosting, VerdictCache, Versions


class SearchedJob(NamedTuple):
    """A job in the search; `version` identifies the planner's belief about it. Pairs are of the
    rollout's and of the training's nodes."""

    version: int
    host_bytes: int
    shares: tuple[float, float]
    """Least share of a node's time."""
    nodes: tuple[int, int] = (1, 1)
    home: int = 0
    """Bit of the job's present group; 0 without one."""
    masks: tuple[int, int] = (0, 0)
    """The job's present nodes, as bits within its group."""


class _Cheapest(NamedTuple):
    """Result for a set of jobs in one group: its cheapest assignment, if any."""

    below: float
    """No assignment is cheaper than this except the one found."""
    price: float
    rollout: Masks
    training: Masks


Found = tuple[float, int, tuple[Hosting, ...]]
"""A price, the number of jobs that keep their nodes, and the groups that have it."""
Sharing = tuple[int, int, int]
"""Masks of pairs, in the order of `combinations`."""
Fits = Sequence[npt.NDArray[np.bool_]]
"""`[candidates as a mask]` of each pool: whether they fit on one node together."""
SHARE_LIMIT = 1.0 + 1e-9
_CENT = 1e-6
"""Prices that differ by less count as equal."""
_NONE = float("inf")


class Bounds(NamedTuple):
    """Lower bounds of prices, `[candidates as a mask]`."""

    one_group: Records
    any_hosting: Records
    price: float
    """Price of the cheapest hosting of all of them; infinite if not known."""

    @classmethod
    def none(cls, count: int) -> "Bounds":
        return cls(np.zeros(1 << count), np.zeros(1 << count), _NONE)


@dataclass(slots=True)
class CheapestHosting:
    types: dict[Pool, NodeType]
    group_jobs: int = 5
    verdicts: VerdictCache = field(default_factory=VerdictCache)
    _cheapest: dict[tuple[Versions, Sharing], _Cheapest] = field(default_factory=dict)

    def forget(self) -> None:
        """Frees results kept by version, most of which are outdated by then."""
        self.verdicts.clear()
        self._cheapest.clear()

    def search(
        self, candidates: list[SearchedJob], admits: Admits, bounds: Bounds | None = None
    ) -> tuple[float, list[Hosting]]:
        """The least price per hour and the groups that have it.

        `bounds` that are close save most of the work; they change no answer.
        """
        known = bounds or Bounds.none(len(candidates))
        found = _Search(self, candidates, admits, known, self.fitting(candidates)).cheapest()
        return found[0], list(found[2])

    def together(
        self,
        candidates: list[SearchedJob],
        members: tuple[int, ...],
        between: tuple[float, float],
        fits: Fits,
        admits: Admits,
    ) -> tuple[float, Hosting] | None:
        """Cheapest assignment of one group's nodes that keeps every SLO; `between`: its price."""
        least, below = between
        versions = tuple(candidates[one].version for one in members)
        key = versions, present_sharing(candidates, members)
        known = self._cheapest.get(key)
        if known is None or (known.price == _NONE and known.below < below):
            since = least if known is None else max(least, known.below)
            known = _Cheapest(below, _NONE, (), ())
            for price, rollout, training in self.priced(candidates, members, (since, below), fits):
                hosting = Hosting(members, rollout, training)
                if self.verdicts.admitted(versions, hosting, admits):
                    known = _Cheapest(below, price, rollout, training)
                    break
            self._cheapest[key] = known
        if known.price < below - _CENT:
            return known.price, Hosting(members, known.rollout, known.training)
        return None

    def priced(
        self,
        candidates: list[SearchedJob],
        members: tuple[int, ...],
        between: tuple[float, float],
        fits: Fits,
    ) -> Iterator[tuple[float, Masks, Masks]]:
        """Assignments, by rising price, that memory, shares and known pairs allow; equal prices by
        falling number of members that keep their nodes.

        Every member shares a node with another: a job apart costs as much in a group of its own,
        which was tried.
        """
        least, below = between
        versions = tuple(candidates[one].version for one in members)
        left = table(tuple(candidates[one].nodes[0] for one in members))
        right = table(tuple(candidates[one].nodes[1] for one in members))
        prices, rows, columns, alike = affordable(
            (left.nodes, left.residents, left.sharing, fits[0]),
            (right.nodes, right.residents, right.sharing, fits[1]),
            connected(left.widths, right.widths),
            _inside(members),
            self.verdicts.refused_pairs(versions) if len(members) > 2 else (0, 0, 0),
            present_sharing(candidates, members),
            self._prices,
            (least - _CENT, below - _CENT),
        )
        order = np.lexsort((-_largest(len(members))[alike], prices))
        return (
            (price, left.choices[row], right.choices[column])
            for price, row, column in zip(
                prices[order].tolist(), rows[order].tolist(), columns[order].tolist(), strict=True
            )
        )

    @property
    def _prices(self) -> tuple[float, float]:
        return self.types[Pool.ROLLOUT].price_per_hour, self.types[Pool.TRAINING].price_per_hour

    def fitting(self, candidates: list[SearchedJob]) -> Fits:
        """Whether memory and the least share of time allow candidates on one node."""
        chosen = bits(len(candidates))
        sizes = np.array([one.host_bytes for one in candidates], dtype=np.float64)
        return [
            (chosen @ sizes <= self.types[pool].host_bytes)
            & (chosen @ np.array([one.shares[side] for one in candidates]) <= SHARE_LIMIT)
            for side, pool in enumerate((Pool.ROLLOUT, Pool.TRAINING))
        ]


@dataclass(slots=True)
class _Search:
    """Branch and bound over the partitions of the jobs into groups. Among equals it finds the
    hosting that a search without bounds would find first."""

    by: CheapestHosting
    candidates: list[SearchedJob]
    admits: Admits
    bounds: Bounds
    fits: Fits
    _found: dict[tuple[int, int], Found] = field(default_factory=dict)
    """Results by masks of jobs and of the present groups that no other hosting continues."""
    _above: dict[int, float] = field(default_factory=dict)
    """Lower bound of the price of each mask."""

    def cheapest(self) -> Found:
        homes = reduce(or_, (one.home for one in self.candidates), 0)
        found = self._within((1 << len(self.candidates)) - 1, homes, self.bounds.price)
        if found is None:
            raise AssertionError("a bound was above the bounded value")
        return found

    def _within(self, mask: int, homes: int, at_most: float) -> Found | None:
        """The cheapest hosting of these jobs; None if it costs more than `at_most`."""
        if mask == 0:
            return 0.0, 0, ()
        found = self._found.get((mask, homes))
        if found is None and at_most > self._above.get(mask, 0.0):
            found = self._looked_for(mask, homes, at_most)
            if found is None:
                self._above[mask] = at_most
            else:
                self._found[mask, homes] = found
        return found if found is not None and found[0] <= at_most + _CENT else None

    def _looked_for(self, mask: int, homes: int, at_most: float) -> Found | None:
        best: Found | None = None
        # Separate groups are preferred to a joint group of equal cost.
        for part in (*_parts_with_lowest(mask), mask):
            rest = mask ^ part
            group = self._group(part, at_most - self.bounds.any_hosting[rest])
            if group is None:
                continue
            price, hosting = group
            for home, staying in self._homes(hosting, homes):
                other = self._within(rest, homes & ~home, at_most - price)
                if other is None:
                    break
                found = (price + other[0], staying + other[1], (hosting, *other[2]))
                if best is None or (_cents(found[0]), -found[1]) < (_cents(best[0]), -best[1]):
                    best, at_most = found, min(at_most, found[0])
        return best

    def _group(self, part: int, at_most: float) -> tuple[float, Hosting] | None:
        """The jobs as one group, at its price."""
        least = float(self.bounds.one_group[part])
        if part.bit_count() > self.by.group_jobs or least > at_most + _CENT:
            return None
        between = (least, at_most + 2 * _CENT)
        return self.by.together(self.candidates, numbers(part), between, self.fits, self.admits)

    def _homes(self, hosting: Hosting, homes: int) -> list[tuple[int, int]]:
        """Present groups, of `homes`, on whose nodes the hosting may go on, and how many members
        stay; last, none."""
        members, rollout, training = hosting
        own = [self.candidates[one].home for one in members]
        _, *now = present_sharing(self.candidates, members)
        alike = ~(sharing(rollout) ^ now[0]) & ~(sharing(training) ^ now[1])
        most = _largest(len(members))
        found = [
            (home, int(most[alike & sharing([one & home for one in own])]))
            for home in sorted({one & homes for one in own} - {0})
        ]
        return [*found, (0, 0)]


def present_sharing(candidates: Sequence[SearchedJob], members: Sequence[int]) -> Sharing:
    """Pairs of members in one group now, and those that share rollout and training nodes."""
    jobs = [candidates[one] for one in members]
    home = sharing([one.home for one in jobs])
    rollout, training = (sharing([one.masks[side] for one in jobs]) for side in (0, 1))
    return home, rollout, training


@cache
def _largest(count: int) -> npt.NDArray[np.int64]:
    """`[pairs as a mask]`: size of the largest set of members whose pairs are all in the mask."""
    pairs = list(combinations(range(count), 2))
    found = np.ones(1 << len(pairs), dtype=np.int64)
    for size in range(2, count + 1):
        for members in combinations(range(count), size):
            inside = sum(1 << at for at, pair in enumerate(pairs) if {*pair} <= {*members})
            found[np.arange(len(found)) & inside == inside] = size
    return found


def _cents(price: float) -> int:
    return round(price / _CENT)


@cache
def bits(count: int) -> npt.NDArray[np.int64]:
    """`[mask, member]`: 1 where the mask has the member."""
    return np.arange(1 << count)[:, None] >> np.arange(count) & 1


@cache
def _inside(members: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """`[mask of members]`: the same as a mask of all candidates."""
    return bits(len(members)) @ (1 << np.array(members))


def _parts_with_lowest(mask: int) -> Iterator[int]:
    """Subsets that hold the mask's lowest bit, but not all of it."""
    lowest = mask & -mask
    rest = mask ^ lowest
    part = (rest - 1) & rest
    while rest:
        yield part | lowest
        if part == 0:
            return
        part = (part - 1) & rest
