"""A better round than the round robin, found by search, where RollMux's theorem is silent.

A round is a cyclic sequence of turns on the group's nodes in which a job may have several: of jobs
with unequal cycles the short one runs more often. Every round is judged by running it, as in all
forecasts: the better round has the smaller worst slow-down, each as a ratio of its job's SLO.
Credit reaches as much or more but decides at every start; a round can be told in advance, to
whoever gives out permits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import ceil
from typing import Final

from scheduler.policy.groups.forecast import Horizon, Occupant, Roster, slowdowns
from scheduler.policy.groups.rehearsal import rehearsed
from scheduler.policy.groups.stages import CREDIT, CYCLIC, Rules
from scheduler.policy.groups.theorem import RoundRobinConditions, conditions

TURNS_MAX: Final = 6
"""Of one job in a round."""
LENGTH_MAX: Final = 12
SPARE_RATIO: Final = 0.1
"""Share of the longest iteration that a place is kept beyond what the means say."""
_HORIZON: Final = Horizon(scenarios=1, warm_up=3.0, cycles=20.0)
_LEAST_GAIN: Final = 1e-6

Turns = tuple[int, ...]
"""Jobs by their place in the roster; the round begins again after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderForecast:
    """What an order makes of the group at its believed means."""

    slowdowns: tuple[float, ...]
    """By job."""
    worst: float
    """The largest slow-down as a ratio of its job's SLO; promises hold up to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSearch:
    conditions: RoundRobinConditions
    round_robin: OrderForecast
    credit: OrderForecast
    turns: Turns
    """The best round found; the round robin itself where none was better."""
    found: OrderForecast
    patience_s: float
    """How long the round keeps a node for whose turn it is, with some to spare for variation."""
    tried: int

    @property
    def gain(self) -> float:
        """Worst slow-down of the round robin over that of the round; at least 1."""
        return self.round_robin.worst / self.found.worst


def search_order(occupants: Sequence[Occupant], *, rules: Rules, tries: int = 1500) -> OrderSearch:
    """Tries rounds from the shortest on, `tries` of them at most, then changes the best."""
    roster = Roster.of(occupants)
    in_turn = rules._replace(order=CYCLIC)
    plain: Turns = tuple(range(len(occupants)))
    round_robin = _forecast(roster, in_turn)
    best, best_turns, tried = round_robin, plain, 0
    most = _most_turns(roster)
    if len(occupants) > 1:
        for turns in islice(_rounds(most), tries):
            tried += 1
            found = _forecast(_with_turns(roster, turns), in_turn)
            if found.worst < best.worst - _LEAST_GAIN:
                best, best_turns = found, turns
        best, best_turns, more = _improved(roster, in_turn, best, best_turns, tries=tries // 3)
        tried += more
    return OrderSearch(
        conditions=conditions(occupants),
        round_robin=round_robin,
        credit=_forecast(roster, rules._replace(order=CREDIT)),
        turns=best_turns,
        found=best,
        patience_s=_patience_s(_with_turns(roster, best_turns), in_turn),
        tried=tried,
    )


def _forecast(roster: Roster, rules: Rules) -> OrderForecast:
    found = slowdowns(roster, rules=rules, horizon=_HORIZON)[0]
    return OrderForecast(slowdowns=tuple(found.tolist()), worst=float((found / roster.slos).max()))


def _with_turns(roster: Roster, turns: Turns) -> Roster:
    jobs = roster.jobs.copy()
    for k in range(jobs.size):
        places = sum(1 << at for at, job in enumerate(turns) if job == k)
        jobs["round"][k] = places | 1 << len(turns)
    return Roster(jobs, roster.beliefs)


def _most_turns(roster: Roster) -> list[int]:
    """Of each job: as often as it could run while the longest runs once."""
    iterations_s = roster.beliefs[:, :, 0].sum(axis=1)
    ratios = iterations_s.max() / iterations_s
    return [min(TURNS_MAX, ceil(round(ratio, 6))) for ratio in ratios.tolist()]


def _rounds(most: Sequence[int]) -> Iterator[Turns]:
    """Every round once, whichever turn it begins with, the shortest first."""
    counts = product(*(range(1, each + 1) for each in most))
    for count in sorted(counts, key=lambda count: (sum(count), count)):
        if sum(count) > LENGTH_MAX:
            return
        # Turning a round does not change it, so it begins with the job of fewest turns.
        first = min(range(len(count)), key=lambda job: (count[job], job))
        left = list(count)
        left[first] -= 1
        yield from _arranged((first,), left)


def _arranged(begun: Turns, left: list[int]) -> Iterator[Turns]:
    if not any(left):
        yield begun
        return
    for job, turns in enumerate(left):
        if turns:
            left[job] -= 1
            yield from _arranged((*begun, job), left)
            left[job] += 1


def _improved(
    roster: Roster, rules: Rules, best: OrderForecast, turns: Turns, *, tries: int
) -> tuple[OrderForecast, Turns, int]:
    """The best round that single changes lead to: a turn more, or two turns exchanged."""
    tried, better = 0, True
    while better:
        better = False
        for changed in _changes(turns, int(roster.jobs.size)):
            if tried >= tries:
                break
            tried += 1
            found = _forecast(_with_turns(roster, changed), rules)
            if found.worst < best.worst - _LEAST_GAIN:
                best, turns, better = found, changed, True
                break
    return best, turns, tried


def _changes(turns: Turns, jobs: int) -> Iterator[Turns]:
    if len(turns) < LENGTH_MAX:
        for job in range(jobs):
            if turns.count(job) < TURNS_MAX:
                for at in range(len(turns)):
                    yield (*turns[:at], job, *turns[at:])
    for one in range(len(turns)):
        for other in range(one + 1, len(turns)):
            if turns[one] != turns[other]:
                changed = list(turns)
                changed[one], changed[other] = turns[other], turns[one]
                yield tuple(changed)


def _patience_s(roster: Roster, rules: Rules) -> float:
    """Longest time for which free nodes wait while a later turn could start, and some more."""
    ready_s: dict[int, float] = {}
    free_s: dict[int, float] = {}
    longest_s = 0.0
    for one in rehearsed(roster, rules=rules):
        bits = [bit for bit in range(one.nodes.bit_length()) if one.nodes >> bit & 1]
        if not one.tail:
            since_s = max([ready_s.get(one.job, one.start_s), *(free_s.get(b, 0.0) for b in bits)])
            longest_s = max(longest_s, one.start_s - since_s)
            free_s |= dict.fromkeys(bits, one.end_s)
        ready_s[one.job] = one.end_s
    iterations_s = roster.beliefs[:, :, 0].sum(axis=1)
    return longest_s + SPARE_RATIO * float(iterations_s.max())
