"""Whose turn it is in a given round.

A round is a cyclic sequence of jobs, searched for by a planner, in which a job may have several
turns. Places are counted on through the rounds, so that any two turns of one round compare. A turn
is for a whole iteration: it is taken where its first phase begins, and its later phases keep the
place. A turn that was missed is gone: nobody runs twice in a row to catch up. Knows neither lines
nor time.
"""

from bisect import bisect_right

from harvester.contracts.ids import JobId
from scheduler.policy.model import PhaseKind
from scheduler.policy.phases.standing import Stage, Standing


def begin_round(standing: Standing, turns: tuple[JobId, ...], *, patience_s: float) -> None:
    """Whatever was before; without turns it is first come, first served."""
    standing.turns, standing.turn_patience_s = turns, patience_s
    standing.turn, standing.upcoming, standing.missed = -1, 0, ()
    if turns:
        # An iteration that has begun is the job's first turn.
        if _has_begun(standing):
            standing.turn = _following(standing, -1)
        standing.upcoming = _following(standing, standing.turn)


def next_place(standing: Standing, kind: PhaseKind) -> int:
    """Of the job's next phase of this kind."""
    return standing.turn if _in_this_turn(standing, kind) else standing.upcoming


def take_turn(standing: Standing, kind: PhaseKind) -> None:
    """The phase begins."""
    if not standing.turns:
        return
    if kind is standing.terms.phases[0].kind:
        standing.turn = standing.upcoming
        standing.upcoming = _following(standing, standing.turn)
    standing.missed = tuple(one for one in standing.missed if one is not kind)


def miss_until(standing: Standing, kind: PhaseKind, place: int) -> bool:
    """Gives up every turn before `place`; whether there was one that was not given up before."""
    if next_place(standing, kind) >= place:
        return False
    if not _in_this_turn(standing, kind):
        standing.upcoming = _following(standing, place - 1)
    elif kind in standing.missed:
        return False
    standing.missed = (*(one for one in standing.missed if one is not kind), kind)
    return True


def _in_this_turn(standing: Standing, kind: PhaseKind) -> bool:
    """Whether the next phase of this kind belongs to the iteration that has begun."""
    kinds = [phase.kind for phase in standing.terms.phases]
    if not _has_begun(standing) or standing.kind not in kinds or kind not in kinds:
        return False
    now, then = kinds.index(standing.kind), kinds.index(kind)
    return now < then or (now == then and not standing.holding)


def _has_begun(standing: Standing) -> bool:
    """Whether the job is within an iteration."""
    if standing.stage is Stage.APART:
        return False
    return standing.holding or standing.kind is not standing.terms.phases[0].kind


def _following(standing: Standing, place: int) -> int:
    """The job's first place after `place`."""
    own = [at for at, job in enumerate(standing.turns) if job == standing.job]
    rounds, within = divmod(place, len(standing.turns))
    after = bisect_right(own, within)
    if after == len(own):
        rounds, after = rounds + 1, 0
    return rounds * len(standing.turns) + own[after]
