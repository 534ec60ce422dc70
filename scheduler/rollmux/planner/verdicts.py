"""Which hostings of a few jobs keep every SLO: forecast verdicts, by the jobs' versions.

A hosting is admitted if its forecast is and every hosting with fewer of its members. Known verdicts
on pairs and parts settle most others without a forecast. A verdict holds as long as the versions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import combinations
from typing import NamedTuple

from scheduler.rollmux.planner.assignments import Masks, sharing, without

Versions = tuple[int, ...]
"""Versions of the planner's beliefs about the members."""
Nodes = tuple[Masks, Masks]
"""Nodes of each member, of either pool."""
VerdictKey = tuple[Versions, Nodes]
_APART = -1


class Hosting(NamedTuple):
    """One group: members by their index in the search's list, and their nodes as masks."""

    members: tuple[int, ...]
    rollout: Masks
    training: Masks


Admits = Callable[[Hosting], bool]
"""Whether the hosting's forecast keeps every SLO."""


@dataclass(slots=True)
class VerdictCache:
    _found: dict[VerdictKey, bool] = field(default_factory=dict)
    _refused: dict[Versions, list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0, 0])
    )
    """Relations known to break an SLO, as 1, by pair of versions."""

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        self._found.clear()
        self._refused.clear()

    def refused(self, versions: Versions, rollout: Masks, training: Masks) -> bool:
        """Whether the hosting, or one with fewer of its members, is known to break an SLO."""
        key = (versions, (rollout, training))
        known = self._found.get(key)
        if known is None and any(self._found.get(part) is False for _, part in _parts(*key)):
            known = self._found[key] = False
        return known is False

    def admitted(self, versions: Versions, hosting: Hosting, admits: Admits) -> bool:
        """Whether the hosting keeps every SLO, and so does every hosting with fewer of its members.

        The smaller ones are asked first: they are parts of many others, which need no forecast
        where one fails.
        """
        members, rollout, training = hosting
        key = (versions, (rollout, training))
        known = self._found.get(key)
        if known is not None:
            return known
        relation = _relation(rollout, training) if len(members) == 2 else None
        if len(members) == 1 or relation == _APART:
            known = True
        else:
            known = self._parts_admitted(key, members, admits)
            if known:
                known = admits(hosting)
        self._found[key] = known
        if relation is not None and not known:
            self._refused[versions][relation] = 1
        return known

    def _parts_admitted(self, key: VerdictKey, members: tuple[int, ...], admits: Admits) -> bool:
        unknown = []
        for at, part in _parts(*key):
            known = self._found.get(part)
            # A hosting that is known to fail spares the forecasts of all others.
            if known is False:
                return False
            if known is None:
                unknown.append((_less(members)[at], part))
        return all(
            self.admitted(versions, Hosting(others, *nodes), admits)
            for others, (versions, nodes) in unknown
        )

    def refused_pairs(self, versions: Versions) -> tuple[int, int, int]:
        """A mask for each relation: the pairs that are known to break an SLO by it."""
        both = rollout = training = 0
        for at, pair in enumerate(combinations(versions, 2)):
            if known := self._refused.get(pair):
                both |= known[0] << at
                rollout |= known[1] << at
                training |= known[2] << at
        return both, rollout, training


def _relation(rollout: Masks, training: Masks) -> int:
    """Relation of a pair: 0 shares nodes of both pools, 1 rollout only, 2 training only, else
    apart."""
    if rollout[0] & rollout[1]:
        return 0 if training[0] & training[1] else 1
    return 2 if training[0] & training[1] else _APART


def _parts(versions: Versions, nodes: Nodes) -> Iterable[tuple[int, VerdictKey]]:
    """Members, and the hosting without each; empty for two, since a job alone always fits."""
    if len(versions) < 3:
        return ()
    less = _less(versions)
    return ((at, (less[at], rest)) for at, rest in _nodes_less(*nodes))


@lru_cache(maxsize=4096)
def _less(whole: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The versions without each of its members."""
    return tuple(whole[:at] + whole[at + 1 :] for at in range(len(whole)))


@cache
def _nodes_less(rollout: Masks, training: Masks) -> tuple[tuple[int, Nodes], ...]:
    """The nodes without each member; first where most pairs share some: the likeliest to fail."""
    less = [(at, (without(rollout, at), without(training, at))) for at in range(len(rollout))]
    return tuple(sorted(less, key=lambda one: -sum(sharing(side).bit_count() for side in one[1])))
