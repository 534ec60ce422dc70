"""The cheapest way to host a few jobs, by exhaustive search.

Every partition into groups, every assignment of a group's jobs to rollout and training nodes, in
order of price, until one keeps every SLO. Sets that contain a known failure are skipped.
Exponential: for the jobs of two or three groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.model import Pool
from scheduler.rollmux.forecast.compiled import Records
from scheduler.rollmux.planner.assignments import Masks, affordable, connected, table
from scheduler.rollmux.planner.group_table import NodeType
from scheduler.rollmux.planner.verdicts import Admits, Hosting, VerdictCache


class SearchedJob(NamedTuple):
    """A job in the search; `version` identifies the planner's belief about it."""

    version: int
    host_bytes: int
    rollout_share: float
    training_share: float
    rollout_nodes: int = 1
    training_nodes: int = 1


class _Cheapest(NamedTuple):
    """Result for a set of jobs in one group: its cheapest assignment, if any."""

    below: float
    """No assignment is cheaper than this except the one found."""
    price: float
    rollout: Masks
    training: Masks


Found = tuple[float, tuple[Hosting, ...]]
"""A price and the groups that have it."""
Fits = Sequence[npt.NDArray[np.bool_]]
"""Per pool, `[candidates as a mask]`: whether they fit on one node together."""
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
    _cheapest: dict[tuple[int, ...], _Cheapest] = field(default_factory=dict)

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
        fits = [self.fitting(candidates, pool) for pool in (Pool.ROLLOUT, Pool.TRAINING)]
        found = _Search(self, candidates, admits, known, fits).cheapest()
        return found[0], list(found[1])

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
        known = self._cheapest.get(versions)
        if known is None or (known.price == _NONE and known.below < below):
            since = least if known is None else max(least, known.below)
            known = _Cheapest(below, _NONE, (), ())
            for price, rollout, training in self.priced(candidates, members, (since, below), fits):
                hosting = Hosting(members, rollout, training)
                if self.verdicts.admitted(versions, hosting, admits):
                    known = _Cheapest(below, price, rollout, training)
                    break
            self._cheapest[versions] = known
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
        """Assignments, by rising price, that memory, shares and known pairs allow.

        Every member shares a node with another: a job apart costs as much in a group of its own,
        which was tried.
        """
        least, below = between
        versions = tuple(candidates[one].version for one in members)
        left = table(tuple(candidates[one].rollout_nodes for one in members))
        right = table(tuple(candidates[one].training_nodes for one in members))
        prices, rows, columns = affordable(
            (left.nodes, left.residents, left.sharing, fits[0]),
            (right.nodes, right.residents, right.sharing, fits[1]),
            connected(left.widths, right.widths),
            _inside(members),
            self.verdicts.refused_pairs(versions) if len(members) > 2 else (0, 0, 0),
            self._prices,
            (least - _CENT, below - _CENT),
        )
        order = np.argsort(prices, kind="stable")
        return (
            (price, left.choices[row], right.choices[column])
            for price, row, column in zip(
                prices[order].tolist(), rows[order].tolist(), columns[order].tolist(), strict=True
            )
        )

    @property
    def _prices(self) -> tuple[float, float]:
        return self.types[Pool.ROLLOUT].price_per_hour, self.types[Pool.TRAINING].price_per_hour

    def fitting(self, candidates: list[SearchedJob], pool: Pool) -> npt.NDArray[np.bool_]:
        """`[candidates as a mask]`: whether memory and the least share of time allow one node."""
        chosen = bits(len(candidates))
        sizes = np.array([one.host_bytes for one in candidates], dtype=np.float64)
        rollout = pool is Pool.ROLLOUT
        shares = np.array(
            [one.rollout_share if rollout else one.training_share for one in candidates]
        )
        fits = chosen @ sizes <= self.types[pool].host_bytes
        return np.asarray(fits & (chosen @ shares <= SHARE_LIMIT))


@dataclass(slots=True)
class _Search:
    """Branch and bound over the partitions of the jobs into groups. Among equal prices it finds the
    hosting that a search without bounds would find first."""

    by: CheapestHosting
    candidates: list[SearchedJob]
    admits: Admits
    bounds: Bounds
    fits: Fits
    _found: dict[int, Found] = field(default_factory=dict)
    _above: dict[int, float] = field(default_factory=dict)
    """Lower bound of the price of each mask."""

    def cheapest(self) -> Found:
        found = self._within((1 << len(self.candidates)) - 1, self.bounds.price)
        if found is None:
            raise AssertionError("a bound was above the bounded value")
        return found

    def _within(self, mask: int, at_most: float) -> Found | None:
        """The cheapest hosting of these jobs; None if it costs more than `at_most`."""
        if mask == 0:
            return 0.0, ()
        found = self._found.get(mask)
        if found is None and at_most > self._above.get(mask, 0.0):
            found = self._looked_for(mask, at_most)
            if found is None:
                self._above[mask] = at_most
            else:
                self._found[mask] = found
        return found if found is not None and found[0] <= at_most + _CENT else None

    def _looked_for(self, mask: int, at_most: float) -> Found | None:
        least = self.bounds.any_hosting
        price, hostings = _NONE, tuple[Hosting, ...]()
        for part in _parts_with_lowest(mask):
            rest = mask ^ part
            if least[part] + least[rest] > min(at_most + _CENT, price - _CENT):
                continue
            one = self._within(part, at_most - least[rest])
            other = None if one is None else self._within(rest, at_most - one[0])
            if one is not None and other is not None and one[0] + other[0] < price - _CENT:
                price, hostings = one[0] + other[0], one[1] + other[1]
                at_most = min(at_most, price)
        # Separate groups are preferred to a joint group of equal cost.
        below = min(price, at_most + 2 * _CENT)
        if mask.bit_count() <= self.by.group_jobs and self.bounds.one_group[mask] < below - _CENT:
            members = tuple(at for at in range(len(self.candidates)) if mask >> at & 1)
            between = (float(self.bounds.one_group[mask]), below)
            group = self.by.together(self.candidates, members, between, self.fits, self.admits)
            if group is not None:
                return group[0], (group[1],)
        return None if price == _NONE else (price, hostings)


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
