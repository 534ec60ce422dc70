"""The round of every group: searched for when its jobs or what is believed of them change.

A round begins anew when it is given, so one that hardly differs is not given again.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from harvester.contracts.ids import GroupId, JobId
from scheduler.policy.cluster.submission import KINDS
from scheduler.policy.groups.book import Cell
from scheduler.policy.groups.packing import Packer
from scheduler.policy.groups.rounds import search_order
from scheduler.policy.groups.stages import Rules
from scheduler.policy.model import Placement
from scheduler.policy.phases.standing import Stage, Standing
from scheduler.policy.phases.terms import PATIENCE_MAX_S

_TRIES: Final = 150
"""Rounds tried of one group: some tens of milliseconds at most."""
_SAME_RATIO: Final = 0.2
"""By how much patience may differ before the round is given again."""


class Round(NamedTuple):
    turns: tuple[JobId, ...]
    patience_s: float


NO_ROUND: Final = Round((), 0.0)


class RoundBook:
    def __init__(self, packer: Packer, rules: Rules) -> None:
        self._packer = packer
        self._rules = rules
        self._asked: dict[GroupId, tuple[tuple[Any, ...], Round]] = {}
        """The last search of each group, by what it was asked with."""
        self.given: dict[GroupId, Round] = {}

    def changed(self, cell: Cell, members: Sequence[Placement]) -> Round | None:
        """What the group's jobs that are there shall follow now; None where nothing changes.

        Of one job alone a round of its own, which takes it out of the one that it was in.
        """
        before = self.given.get(cell.group, NO_ROUND)
        wanted = self._searched(cell, members) if len(members) > 1 else NO_ROUND
        if _alike(before, wanted):
            return None
        if wanted.turns:
            self.given[cell.group] = wanted
            return wanted
        self.given.pop(cell.group, None)
        return Round((members[0].job,), 0.0) if members else None

    def forget(self, group: GroupId) -> None:
        self._asked.pop(group, None)
        self.given.pop(group, None)

    def _searched(self, cell: Cell, members: Sequence[Placement]) -> Round:
        occupants = [self._packer.occupant(cell, one) for one in members]
        key = (tuple(one.job for one in members), tuple(occupants))
        asked = self._asked.get(cell.group)
        if asked is None or asked[0] != key:
            found = search_order(occupants, rules=self._rules, tries=_TRIES)
            turns = tuple(members[at].job for at in found.turns)
            asked = (key, Round(turns, min(found.patience_s, PATIENCE_MAX_S)))
            self._asked[cell.group] = asked
        return asked[1]


def leader(standings: Sequence[Standing]) -> JobId | None:
    """Who is furthest in its iteration: nobody may be made to wait for a turn that has passed."""
    first = min(standings, key=_lead, default=None)
    return None if first is None else first.job


def led_by(job: JobId | None, turns: tuple[JobId, ...]) -> tuple[JobId, ...]:
    """The same round, told from the job's turn on."""
    at = turns.index(job) if job in turns else 0
    return turns[at:] + turns[:at]


def _lead(standing: Standing) -> tuple[int, int]:
    if standing.stage is Stage.APART or standing.kind is None:
        return 4, standing.ticket
    last = standing.kind is KINDS[-1]
    if standing.holding:
        return (0 if last else 2), standing.ticket
    return (1 if last else 3), standing.ticket


def _alike(one: Round, other: Round) -> bool:
    """Whether they differ by where they begin, or hardly in patience."""
    if len(one.turns) != len(other.turns):
        return False
    gap_s = abs(one.patience_s - other.patience_s)
    if gap_s > _SAME_RATIO * max(one.patience_s, other.patience_s):
        return False
    twice = one.turns + one.turns
    length = len(other.turns)
    return not length or any(twice[at : at + length] == other.turns for at in range(length))
