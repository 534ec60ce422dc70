"""The cheapest way to host a few jobs, found by looking at every one.

Every partition into groups, every assignment of a group's jobs to rollout and training nodes, in
the order of price, until one keeps every SLO. What is known to fail is not looked at with more
jobs added. Exponential: for the jobs of two or three groups. Jobs of one node a pool only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.policy.groups.book import NodeType
from scheduler.policy.model import Pool

Blocks = tuple[int, ...]
"""The block of each member, numbered in the order of their first members."""


class Guest(NamedTuple):
    """A job as the search needs it; `version` names what is believed of it."""

    version: int
    host_bytes: int
    rollout_share: float
    training_share: float


class Hosting(NamedTuple):
    """One group: members by their place in the search's list, and their nodes by block."""

    members: tuple[int, ...]
    rollout: Blocks
    training: Blocks


Admits = Callable[[Hosting], bool]
SHARE_LIMIT = 1.0 + 1e-9


@cache
def block_choices(count: int) -> tuple[Blocks, ...]:
    """Every way to split `count` members into blocks, fewest blocks first."""

    def grow(prefix: Blocks) -> Iterator[Blocks]:
        if len(prefix) == count:
            yield prefix
            return
        for block in range(max(prefix, default=-1) + 2):
            yield from grow((*prefix, block))

    return tuple(sorted(grow(()), key=lambda blocks: (max(blocks, default=-1), blocks)))


@cache
def _choice_matrix(count: int) -> tuple[tuple[Blocks, ...], npt.NDArray[np.float64]]:
    """The choices, and for each a matrix `[member, block]` of who is where."""
    choices = block_choices(count)
    return choices, np.eye(count)[np.array(choices)]


@cache
def without(blocks: Blocks, at: int) -> Blocks:
    """The same split with one member gone, numbered anew."""
    numbers: dict[int, int] = {}
    return tuple(
        numbers.setdefault(block, len(numbers)) for place, block in enumerate(blocks) if place != at
    )


@dataclass(slots=True)
class CheapestHosting:
    types: dict[Pool, NodeType]
    group_jobs: int = 5
    verdicts: dict[tuple[tuple[int, ...], Blocks, Blocks], bool] = field(default_factory=dict)
    """What was found about jobs' versions before; holds as long as versions do."""
    simulated: int = 0

    def search(self, guests: list[Guest], admits: Admits) -> tuple[float, list[Hosting]]:
        """The least price per hour and the groups that have it."""
        count = len(guests)
        best: dict[int, tuple[float, tuple[Hosting, ...]]] = {0: (0.0, ())}
        for size in range(1, count + 1):
            for members in combinations(range(count), size):
                mask = sum(1 << member for member in members)
                price = float("inf")
                hostings: tuple[Hosting, ...] = ()
                for part in _parts_with_lowest(mask):
                    whole = best[part][0] + best[mask ^ part][0] if part != mask else price
                    if whole < price - 1e-9:
                        price = whole
                        hostings = best[part][1] + best[mask ^ part][1]
                # Fewer jobs never cost more, so what fewer cost is a floor.
                least = max(best[mask ^ (1 << member)][0] for member in members)
                if size <= self.group_jobs and least < price - 1e-6:
                    found = self._together(guests, members, (least, price), admits)
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
        admits: Admits,
    ) -> tuple[float, Hosting] | None:
        """Cheapest assignment of one group's nodes that keeps every SLO, priced between the two."""
        prices = [self.types[pool].price_per_hour for pool in (Pool.ROLLOUT, Pool.TRAINING)]
        least, below = between
        trainings = self._fitting(guests, members, Pool.TRAINING)
        rollouts = self._fitting(guests, members, Pool.ROLLOUT)
        priced = sorted(
            (price, rollout, training)
            for training in trainings
            for rollout in rollouts
            if least - 1e-6
            <= (price := (max(rollout) + 1) * prices[0] + (max(training) + 1) * prices[1])
            < below - 1e-6
        )
        for price, rollout, training in priced:
            hosting = Hosting(members, rollout, training)
            if self._admitted(guests, hosting, admits):
                return price, hosting
        return None

    def _fitting(self, guests: list[Guest], members: tuple[int, ...], pool: Pool) -> list[Blocks]:
        """Splits over nodes of one pool that memory and the least share of time allow."""
        choices, blocks = _choice_matrix(len(members))
        sizes = np.array([guests[one].host_bytes for one in members], dtype=np.float64)
        shares = np.array(
            [
                guests[one].rollout_share if pool is Pool.ROLLOUT else guests[one].training_share
                for one in members
            ]
        )
        fits = (sizes @ blocks).max(axis=1) <= self.types[pool].host_bytes
        fits &= (shares @ blocks).max(axis=1) <= SHARE_LIMIT
        return [choices[at] for at in np.flatnonzero(fits)]

    def _admitted(self, guests: list[Guest], hosting: Hosting, admits: Admits) -> bool:
        """Whether it keeps every SLO; first whether it would with any one member fewer."""
        members, rollout, training = hosting
        if len(members) == 1:
            return True
        versions = tuple(guests[one].version for one in members)
        key = (versions, rollout, training)
        known = self.verdicts.get(key)
        if known is None:
            known = all(
                self._admitted(guests, _less(hosting, at), admits) for at in range(len(members))
            )
            if known:
                self.simulated += 1
                known = admits(hosting)
            self.verdicts[key] = known
        return known


def _less(hosting: Hosting, at: int) -> Hosting:
    members, rollout, training = hosting
    return Hosting(members[:at] + members[at + 1 :], without(rollout, at), without(training, at))


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
