"""Chooses the next waiting phase to start: first come, first served on every node.

A job waits from the end of its phase before on. Its next phase starts once all of its nodes are
free and no job that waits longer waits for one of them, so a job of several nodes is never
overtaken on one. A rollout's tail that may be moved keeps no node from the next job, unless that
job's rollout is not divisible: it waits until the tail has ended. Forecasts ask this rule, and
permits follow it with tickets; it knows no durations.
"""

from scheduler.rollmux.forecast.compiled import Records, compiled
from scheduler.rollmux.forecast.stages import (
    BUSY,
    TAIL_HELD,
    TAILS,
    WAITS_ROLLOUT,
    WAITS_TRAINING,
    Rules,
)


@compiled
def movable_tail(jobs: Records, permits: Records, k: int, rules: Rules) -> bool:
    """Whether job k holds whole nodes for a tail that is worth moving; a node takes one tail."""
    return (
        rules.migrate
        and jobs["stage"][k] == TAIL_HELD
        and jobs["left_s"][k] > rules.migrate_s
        and (permits[TAILS] & jobs["rollout_nodes"][k]) == 0
    )


@compiled
def awaited_nodes(jobs: Records, j: int) -> int:
    """Nodes of the phase that job j waits for; 0: it waits for none."""
    if jobs["stage"][j] == WAITS_ROLLOUT:
        return int(jobs["rollout_nodes"][j])
    return int(jobs["training_nodes"][j]) if jobs["stage"][j] == WAITS_TRAINING else 0


@compiled
def _taken_nodes(jobs: Records, permits: Records, j: int, rules: Rules) -> int:
    """Mask of the nodes that job j awaits and others hold, without nodes of movable tails."""
    awaited = awaited_nodes(jobs, j)
    taken = awaited & permits[BUSY]
    if jobs["stage"][j] == WAITS_ROLLOUT:
        if not jobs["divisible"][j]:
            return int(taken | (awaited & permits[TAILS]))
        for k in range(jobs.size):
            if taken & jobs["rollout_nodes"][k] and movable_tail(jobs, permits, k, rules):
                taken &= ~jobs["rollout_nodes"][k]
    return int(taken)


@compiled
def next_start(jobs: Records, permits: Records, rules: Rules) -> int:
    """Index of the waiting job whose phase should start now, or -1."""
    asked, awaited = 0, 0
    while True:
        first = -1
        for k in range(jobs.size):
            if asked & (1 << k) or not awaited_nodes(jobs, k):
                continue
            if first < 0 or jobs["waits_since_s"][k] < jobs["waits_since_s"][first]:
                first = k
        if first < 0:
            return -1
        nodes = awaited_nodes(jobs, first)
        if not nodes & awaited and not _taken_nodes(jobs, permits, first, rules):
            return first
        asked |= 1 << first
        awaited |= nodes
