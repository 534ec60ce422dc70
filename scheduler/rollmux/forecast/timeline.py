"""A group's run at its believed means: the time spans of each job on each node.

The same execution as a forecast's, without doubt and without variation, with its events kept. A
plan draws it.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from scheduler.model import PhaseKind
from scheduler.rollmux.forecast.compiled import Records
from scheduler.rollmux.forecast.execution import advance
from scheduler.rollmux.forecast.forecast import Roster
from scheduler.rollmux.forecast.stages import (
    EVENT,
    ROLLOUT_ENDED,
    ROLLOUT_STARTED,
    TAIL_MIGRATED,
    TRAINING_ENDED,
    TRAINING_STARTED,
    Rules,
    empty_nodes,
    empty_permits,
)

WARM_UP: Final = 4.0
CYCLES: Final = 12.0
"""Length of the run, in solo iterations of the longest job; slowed down several times, it still
begins twice."""
_LOG_SIZE: Final = 2048
_CLOSES: Final = (TAIL_MIGRATED, ROLLOUT_ENDED, TRAINING_ENDED)
_OPENS: Final = (ROLLOUT_STARTED, TAIL_MIGRATED, TRAINING_STARTED)


class Stretch(NamedTuple):
    """One job on its nodes for one phase, or for a phase's bulk or moved tail."""

    job: int
    """The job's index in the roster."""
    phase: PhaseKind
    nodes: int
    """Bits of the group's nodes."""
    start_s: float
    end_s: float
    tail: bool


class MetaIteration(NamedTuple):
    """The span from one rollout of the longest job to its next; times count from its start."""

    length_s: float
    stretches: tuple[Stretch, ...]


def timeline_of(roster: Roster, *, rules: Rules, cycles: float = CYCLES) -> tuple[Stretch, ...]:
    """Settled stretches over `cycles` of the longest job, in the order of their starts."""
    jobs = roster.jobs.copy()
    count = jobs.size
    jobs["offset"], jobs["length"] = np.arange(count), 1
    lengths_s = np.ascontiguousarray(roster.beliefs[:, :, 0])
    longest_s = float(_iterations_s(roster).max())
    nodes, permits = empty_nodes(), empty_permits()
    settled_s = WARM_UP * longest_s
    _run(jobs, nodes, permits, lengths_s, rules, (0.0, settled_s))
    until_s = settled_s + cycles * longest_s
    log = _run(jobs, nodes, permits, lengths_s, rules, (settled_s, until_s))
    return tuple(sorted(_stretches(log), key=lambda one: (one.start_s, one.job)))


def meta_iteration(roster: Roster, *, rules: Rules) -> MetaIteration:
    longest = int(_iterations_s(roster).argmax())
    cycles, starts_s = CYCLES, list[float]()
    while len(starts_s) < 2:
        stretches = timeline_of(roster, rules=rules, cycles=cycles)
        starts_s = [
            one.start_s
            for one in stretches
            if one.job == longest and one.phase is PhaseKind.ROLLOUT and not one.tail
        ]
        cycles *= 4
    begin_s, end_s = starts_s[0], starts_s[1]
    return MetaIteration(
        end_s - begin_s,
        tuple(
            one._replace(
                start_s=max(one.start_s, begin_s) - begin_s, end_s=min(one.end_s, end_s) - begin_s
            )
            for one in stretches
            if one.start_s < end_s and one.end_s > begin_s
        ),
    )


def _iterations_s(roster: Roster) -> Records:
    """Solo iteration of every job, in s."""
    return np.asarray(roster.beliefs[:, :, 0].sum(axis=1) + roster.jobs["sync_s"])


def _run(
    jobs: Records,
    nodes: Records,
    permits: Records,
    lengths_s: Records,
    rules: Rules,
    span_s: tuple[float, float],
) -> list[tuple[float, int, int, int]]:
    """Time, kind, job and nodes of every event in the span."""
    now_s, until_s = span_s
    events: list[tuple[float, int, int, int]] = []
    while now_s < until_s:
        log = np.zeros(_LOG_SIZE, dtype=EVENT)
        now_s, logged, _ = advance(jobs, nodes, permits, lengths_s, rules, now_s, until_s, log)
        events += log[:logged].tolist()
    return events


def _stretches(events: list[tuple[float, int, int, int]]) -> Iterator[Stretch]:
    """Stretches that began and ended within the events."""
    open_: dict[int, tuple[float, bool]] = {}
    for t_s, kind, job, mask in events:
        if kind in _CLOSES and job in open_:
            start_s, tail = open_.pop(job)
            phase = PhaseKind.TRAINING if kind == TRAINING_ENDED else PhaseKind.ROLLOUT
            yield Stretch(job, phase, mask, start_s, t_s, tail)
        if kind in _OPENS:
            open_[job] = (t_s, kind == TAIL_MIGRATED)
