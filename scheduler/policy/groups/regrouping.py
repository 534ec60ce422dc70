"""The cheapest way to host a few jobs, found by looking at every one.

Every partition into groups, every assignment of a group's jobs to rollout and training nodes, in
the order of price, until one keeps every SLO. What is known to fail is not looked at with more
jobs added. Exponential: for the jobs of two or three groups.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.policy.groups.assignments import Masks, connected, table, without
from scheduler.policy.groups.book import NodeType
from scheduler.policy.model import Pool


class Guest(NamedTuple):
    """A job as the search needs it; `version` names what is believed of it."""

    version: int
    host_bytes: int
    rollout_share: float
    training_share: float
    rollout_nodes: int = 1
    training_nodes: int = 1


class Hosting(NamedTuple):
    """One group: members by their place in the search's list, and their nodes as masks."""

    members: tuple[int, ...]
    rollout: Masks
    training: Masks


class _Cheapest(NamedTuple):
    """What was found about a set of jobs in one group: its cheapest assignment, if any."""

    below: float
    """Nothing cheaper than this but what was found."""
    price: float
    rollout: Masks
    training: Masks


Admits = Callable[[Hosting], bool]
Fits = Sequence[npt.NDArray[np.bool_]]
"""Of each pool, `[guests as a mask]`: whether they may have one node together."""
SHARE_LIMIT = 1.0 + 1e-9
_CENT = 1e-6
"""Prices that differ by less are the same."""
_NONE = float("inf")
_APART = -1
_PARTS_FIRST = 4
"""Of more members some part has mostly failed before, and its verdict is known."""


@dataclass(slots=True)
class CheapestHosting:
    types: dict[Pool, NodeType]
    group_jobs: int = 5
    verdicts: dict[tuple[tuple[int, ...], Masks, Masks], bool] = field(default_factory=dict)
    """What was found about jobs' versions before; holds as long as versions do."""
    simulated: int = 0
    _cheapest: dict[tuple[int, ...], _Cheapest] = field(default_factory=dict)
    _refused: dict[tuple[int, ...], list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0])
    )
    """Of a pair's versions: which relations are known to break an SLO."""

    def forget(self) -> None:
        """Frees what is kept of versions, most of which are outdated by then."""
        self.verdicts.clear()
        self._cheapest.clear()
        self._refused.clear()

    def search(self, guests: list[Guest], admits: Admits) -> tuple[float, list[Hosting]]:
        """The least price per hour and the groups that have it."""
        count = len(guests)
        fits = [self.fitting(guests, pool) for pool in (Pool.ROLLOUT, Pool.TRAINING)]
        best: dict[int, tuple[float, tuple[Hosting, ...]]] = {0: (0.0, ())}
        for size in range(1, count + 1):
            for members in combinations(range(count), size):
                mask = sum(1 << member for member in members)
                price = _NONE
                hostings: tuple[Hosting, ...] = ()
                for part in _parts_with_lowest(mask):
                    whole = best[part][0] + best[mask ^ part][0] if part != mask else price
                    if whole < price - 1e-9:
                        price = whole
                        hostings = best[part][1] + best[mask ^ part][1]
                # Fewer jobs never cost more, so what fewer cost is a floor.
                least = max(best[mask ^ (1 << member)][0] for member in members)
                if size <= self.group_jobs and least < price - _CENT:
                    found = self._together(guests, members, (least, price), fits, admits)
                    if found is not None:
                        price, hostings = found[0], (found[1],)
                best[mask] = (price, hostings)
        price, hostings = best[(1 << count) - 1]
        return price, list(hostings)

    def _together(
        self,
        guests: list[Guest],
        members: tuple[int, ...],
        between: tuple[float, float],
        fits: Fits,
        admits: Admits,
    ) -> tuple[float, Hosting] | None:
        """Cheapest assignment of one group's nodes that keeps every SLO, priced between the two."""
        least, below = between
        versions = tuple(guests[one].version for one in members)
        known = self._cheapest.get(versions)
        if known is None or (known.price == _NONE and known.below < below):
            since = least if known is None else max(least, known.below)
            known = _Cheapest(below, _NONE, (), ())
            for price, rollout, training in self.priced(guests, members, (since, below), fits):
                hosting = Hosting(members, rollout, training)
                if self.admitted(versions, hosting, admits):
                    known = _Cheapest(below, price, rollout, training)
                    break
            self._cheapest[versions] = known
        if known.price < below - _CENT:
            return known.price, Hosting(members, known.rollout, known.training)
        return None

    def priced(
        self,
        guests: list[Guest],
        members: tuple[int, ...],
        between: tuple[float, float],
        fits: Fits,
    ) -> Iterator[tuple[float, Masks, Masks]]:
        """Assignments in the order of price that memory, shares and known pairs allow.

        Who shares no node with the others is no member: two groups cost the same and were tried.
        """
        least, below = between
        versions = tuple(guests[one].version for one in members)
        widths = (
            tuple(guests[one].rollout_nodes for one in members),
            tuple(guests[one].training_nodes for one in members),
        )
        left, right = table(widths[0]), table(widths[1])
        inside = _inside(members)
        rows = np.flatnonzero(fits[0][inside[left.residents]].all(axis=1))
        columns = np.flatnonzero(fits[1][inside[right.residents]].all(axis=1))
        prices = (
            left.nodes[rows, None] * self.types[Pool.ROLLOUT].price_per_hour
            + right.nodes[None, columns] * self.types[Pool.TRAINING].price_per_hour
        )
        wanted = (prices >= least - _CENT) & (prices < below - _CENT)
        wanted &= connected(*widths)[rows[:, None], columns]
        if len(members) > 2 and wanted.any():
            refused = np.array([self._refused[pair] for pair in combinations(versions, 2)]).T
            shared, other = left.shared[rows], right.shared[columns]
            wanted &= (shared * refused[0]) @ other.T == 0
            wanted &= (shared * refused[1]) @ (1.0 - other).T == 0
            wanted &= ((1.0 - shared) * refused[2]) @ other.T == 0
        found = prices[wanted]
        order = np.argsort(found, kind="stable")
        at = np.argwhere(wanted)[order].astype(np.int32)
        return (
            (price, left.choices[rows[row]], right.choices[columns[column]])
            for price, (row, column) in zip(found[order].tolist(), at, strict=True)
        )

    def fitting(self, guests: list[Guest], pool: Pool) -> npt.NDArray[np.bool_]:
        """`[guests as a mask]`: whether memory and the least share of time allow them one node."""
        chosen = bits(len(guests))
        sizes = np.array([one.host_bytes for one in guests], dtype=np.float64)
        shares = np.array(
            [one.rollout_share if pool is Pool.ROLLOUT else one.training_share for one in guests]
        )
        fits = chosen @ sizes <= self.types[pool].host_bytes
        return np.asarray(fits & (chosen @ shares <= SHARE_LIMIT))

    def admitted(self, versions: tuple[int, ...], hosting: Hosting, admits: Admits) -> bool:
        """Whether it keeps every SLO, and so does every hosting with fewer of its members.

        A forecast that fails is short, so the whole is asked before what is not known of its parts.
        """
        members, rollout, training = hosting
        key = (versions, rollout, training)
        known = self.verdicts.get(key)
        if known is not None:
            return known
        unknown = []
        for at in range(len(members) if len(members) > 2 else 0):
            fewer = versions[:at] + versions[at + 1 :]
            less = _less(hosting, at)
            found = self.verdicts.get((fewer, less.rollout, less.training))
            if found is False:
                self.verdicts[key] = False
                return False
            if found is None:
                unknown.append((fewer, less))
        relation = _relation(rollout, training) if len(members) == 2 else None
        if len(members) == 1 or relation == _APART:
            known = True
        else:
            self.simulated += 1
            parts = (self.admitted(fewer, less, admits) for fewer, less in unknown)
            if len(members) > _PARTS_FIRST:
                known = all(parts) and admits(hosting)
            else:
                known = admits(hosting) and all(parts)
        self.verdicts[key] = known
        if relation is not None and not known:
            self._refused[versions][relation] = 1.0
        return known


def _relation(rollout: Masks, training: Masks) -> int:
    """Of a pair: 0 shares nodes of both pools, 1 rollout nodes only, 2 training nodes only."""
    if rollout[0] & rollout[1]:
        return 0 if training[0] & training[1] else 1
    return 2 if training[0] & training[1] else _APART


def _less(hosting: Hosting, at: int) -> Hosting:
    members, rollout, training = hosting
    return Hosting(members[:at] + members[at + 1 :], without(rollout, at), without(training, at))


@cache
def bits(count: int) -> npt.NDArray[np.int64]:
    """`[mask, member]`: 1 where the mask has the member."""
    return np.arange(1 << count)[:, None] >> np.arange(count) & 1


@cache
def _inside(members: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """`[mask of members]`: the same as a mask of all guests."""
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
