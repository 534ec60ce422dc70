"""Lower bound on the price of hosting some jobs, found without searching every hosting.

Most searches find nothing. Every set of jobs has a known lower bound on its price in one group; the
cheapest partition at these bounds is a floor under every hosting. Only the sets in that
partition are forecast: a failing set gets a higher bound, until the floor is too high or no set in
it is in doubt. Results are kept by the jobs' versions, like the verdicts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from scheduler.model import Pool
from scheduler.rollmux.forecast.compiled import Records, compiled
from scheduler.rollmux.planner.assignments import Masks, numbers
from scheduler.rollmux.planner.cheapest_hosting import (
    Bounds,
    CheapestHosting,
    Fits,
    SearchedJob,
    bits,
)
from scheduler.rollmux.planner.verdicts import Admits, Hosting

_NONE = float("inf")
_ROUNDING = 1e-6
_DOUBTS_MAX = 4096


@dataclass(slots=True)
class _Doubt:
    """A set of jobs in one group: its cheapest assignment that is not known to break an SLO."""

    rest: Iterator[tuple[float, Masks, Masks]]
    price: float = _NONE
    rollout: Masks = ()
    training: Masks = ()
    settled: bool = False
    """Whether the assignment keeps every SLO, or no assignment is left."""


@dataclass(slots=True)
class PriceFloor:
    search: CheapestHosting
    _doubts: dict[tuple[int, ...], _Doubt] = field(default_factory=dict)

    def bounds(
        self, candidates: list[SearchedJob], admits: Admits, *, at_most: float = _NONE
    ) -> Bounds | None:
        """The least price per hour of any hosting of all the jobs, with the bounds on the way;
        None if it is above `at_most`."""
        fits = self.search.fitting(candidates)
        if len(self._doubts) > _DOUBTS_MAX:
            self._doubts.clear()
        names: list[tuple[int, ...]] = [()]
        for one in candidates:
            names += [(*fewer, one.version) for fewer in names]
        least, work = self._least(candidates, names)
        parts = np.zeros(len(candidates), dtype=np.int64)
        prices = np.zeros(len(least))
        while True:
            price, count = _cheapest_partition(least, prices, parts)
            if price > at_most + _ROUNDING:
                return None
            in_doubt = [
                mask
                for mask in parts[:count].tolist()
                if not ((doubt := self._doubts.get(names[mask])) and doubt.settled)
            ]
            if not in_doubt:
                return Bounds(least, prices, float(price))
            # The fullest is the likeliest to fail. Nodes may be free of charge.
            mask = max(in_doubt, key=lambda mask: work[mask] / max(least[mask], _ROUNDING))
            least[mask] = self._looked_at(candidates, mask, names[mask], fits, admits)

    def _looked_at(
        self,
        candidates: list[SearchedJob],
        mask: int,
        versions: tuple[int, ...],
        fits: Fits,
        admits: Admits,
    ) -> float:
        """Lower bound of the set's price, after one forecast of its cheapest assignment without a
        verdict."""
        members, verdicts = numbers(mask), self.search.verdicts
        doubt = self._doubts.get(versions)
        if doubt is None:
            priced = self.search.priced(candidates, members, (0.0, _NONE), fits)
            doubt = self._doubts[versions] = _Doubt(priced)
        elif verdicts.admitted(versions, Hosting(members, doubt.rollout, doubt.training), admits):
            doubt.settled = True
            return doubt.price
        for price, rollout, training in doubt.rest:
            if not verdicts.refused(versions, rollout, training):
                doubt.price, doubt.rollout, doubt.training = price, rollout, training
                return price
        doubt.price, doubt.settled = _NONE, True
        return _NONE

    def _least(
        self, candidates: list[SearchedJob], names: list[tuple[int, ...]]
    ) -> tuple[Records, Records]:
        """`[candidates as a mask]`: lower bound of their price in one group, and the price of the
        node time that they cannot do without."""
        chosen = bits(len(candidates))
        least, work = np.zeros(len(chosen)), np.zeros(len(chosen))
        for side, pool in enumerate((Pool.ROLLOUT, Pool.TRAINING)):
            kind = self.search.types[pool]
            widths = np.array([one.nodes[side] for one in candidates])
            shares = np.array([one.shares[side] for one in candidates])
            sizes = np.array([one.host_bytes for one in candidates]) / kind.host_bytes
            time = chosen @ (shares * widths)
            needed = np.maximum(time, chosen @ (sizes * widths))
            nodes = np.maximum(np.ceil(needed - _ROUNDING), (chosen * widths).max(axis=1))
            least += nodes * kind.price_per_hour
            work += time * kind.price_per_hour
        least[chosen.sum(axis=1) > self.search.group_jobs] = _NONE
        for mask, versions in enumerate(names):
            if doubt := self._doubts.get(versions):
                least[mask] = max(least[mask], doubt.price)
        return least, work


@compiled
def _cheapest_partition(least: Records, price: Records, parts: Records) -> tuple[float, int]:
    """The cheapest split of all jobs into groups: its price and its number of `parts`.

    Writes the price of every mask to `price`.
    """
    first = np.zeros(least.size, dtype=np.int64)
    for mask in range(1, least.size):
        lowest = mask & -mask
        price[mask], first[mask] = least[mask], mask
        part = (mask - 1) & mask
        while part > 0:
            if part & lowest:
                whole = least[part] + price[mask ^ part]
                if whole < price[mask]:
                    price[mask], first[mask] = whole, part
            part = (part - 1) & mask
    mask, count = least.size - 1, 0
    while mask > 0:
        parts[count] = first[mask]
        mask ^= first[mask]
        count += 1
    return price[-1], count
