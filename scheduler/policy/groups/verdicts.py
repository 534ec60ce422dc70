"""Which hostings of a few jobs keep every SLO: what was forecast of them, by their versions.

A hosting is admitted if its forecast is and every hosting with fewer of its members. What is known
of pairs and of parts rules out most others unasked. What was found holds as long as versions do.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from scheduler.policy.groups.assignments import Masks, without

Versions = tuple[int, ...]
"""Of each member, what is believed of it."""
Key = tuple[Versions, Masks, Masks]
_APART = -1


class Hosting(NamedTuple):
    """One group: members by their place in the search's list, and their nodes as masks."""

    members: tuple[int, ...]
    rollout: Masks
    training: Masks


Admits = Callable[[Hosting], bool]
"""Whether its forecast keeps every SLO."""


@dataclass(slots=True)
class Verdicts:
    simulated: int = 0
    _found: dict[Key, bool] = field(default_factory=dict)
    _refused: dict[Versions, list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0, 0])
    )
    """Of a pair's versions: 1 for the relations that are known to break an SLO."""

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        self._found.clear()
        self._refused.clear()

    def refused(self, versions: Versions, hosting: Hosting) -> bool:
        """Whether it is known to break an SLO, or one with fewer of its members is."""
        key = (versions, hosting.rollout, hosting.training)
        known = self._found.get(key)
        if known is None and any(self._found.get(part) is False for part in _parts(*key)):
            known = self._found[key] = False
        return known is False

    def admitted(self, versions: Versions, hosting: Hosting, admits: Admits) -> bool:
        """Whether it keeps every SLO, and so does every hosting with fewer of its members.

        These are asked first: they are parts of many others, which need no forecast where one
        fails.
        """
        members, rollout, training = hosting
        key = (versions, rollout, training)
        known = self._found.get(key)
        if known is not None:
            return known
        relation = _relation(rollout, training) if len(members) == 2 else None
        if len(members) == 1 or relation == _APART:
            known = True
        else:
            known = not self.refused(versions, hosting) and all(
                self.admitted(fewer, Hosting(_less(members, at), *masks), admits)
                for at, (fewer, *masks) in enumerate(_parts(*key))
            )
            if known:
                self.simulated += 1
                known = admits(hosting)
        self._found[key] = known
        if relation is not None and not known:
            self._refused[versions][relation] = 1
        return known

    def refused_pairs(self, versions: Versions) -> tuple[int, int, int]:
        """Of each relation, the pairs that are known to break an SLO by it."""
        both = rollout = training = 0
        for at, pair in enumerate(combinations(versions, 2)):
            if known := self._refused.get(pair):
                both |= known[0] << at
                rollout |= known[1] << at
                training |= known[2] << at
        return both, rollout, training


def _relation(rollout: Masks, training: Masks) -> int:
    """Of a pair: 0 shares nodes of both pools, 1 rollout nodes only, 2 training nodes only."""
    if rollout[0] & rollout[1]:
        return 0 if training[0] & training[1] else 1
    return 2 if training[0] & training[1] else _APART


def _parts(versions: Versions, rollout: Masks, training: Masks) -> list[Key]:
    """What is left without each of the members; of two nobody shares with the one left."""
    if len(versions) < 3:
        return []
    return [
        (_less(versions, at), without(rollout, at), without(training, at))
        for at in range(len(versions))
    ]


def _less(whole: tuple[int, ...], at: int) -> tuple[int, ...]:
    return whole[:at] + whole[at + 1 :]
