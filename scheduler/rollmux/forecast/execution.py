"""A group's execution in virtual time, phase by phase, with the durations that a planner expects.

A job waits from the end of its phase before on. Its next phase starts once all of its nodes are
free and no job that waits longer waits for one of them, so a job of several nodes is never
overtaken on one; permits follow the same rule with tickets. A rollout's bulk runs at the speed of
the share of its nodes that no other tail occupies; a tail runs at its own speed anywhere. If a job
waits only for nodes held by a tail, that tail is moved; a rollout that is not divisible waits until
the tail has ended. A weight sync follows a training on no node. A state stays on accelerators until
another job starts there; a phase that starts after another job's pays a warm start. The compiled
model of `cluster.runtime`: a test runs both on the same draws.
"""

from scheduler.rollmux.forecast.compiled import Records, compiled
from scheduler.rollmux.forecast.stages import (
    BULK,
    BUSY,
    FORECAST_NODES_MAX,
    ROLLOUT_ENDED,
    ROLLOUT_STARTED,
    SYNC_ENDED,
    SYNCING,
    TAIL_HELD,
    TAIL_MIGRATED,
    TAIL_MOVED,
    TAILS,
    TRAINING,
    TRAINING_ENDED,
    TRAINING_STARTED,
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


@compiled
def note(log: Records, at: int, t_s: float, kind: int, job: int, nodes: int) -> int:
    if at < log.size:
        log["t_s"][at], log["kind"][at] = t_s, kind
        log["job"][at], log["nodes"][at] = job, nodes
        return at + 1
    return at


@compiled
def runs(stage: int) -> bool:
    return stage not in (WAITS_ROLLOUT, WAITS_TRAINING)


@compiled
def own_speed(jobs: Records, permits: Records, k: int) -> float:
    """Speed of job k's present stage on its own nodes, beside the tails of others, in (0, 1]."""
    if jobs["stage"][k] != BULK or not permits[TAILS] & jobs["rollout_nodes"][k]:
        return 1.0
    taken = 0.0
    for other in range(jobs.size):
        if jobs["stage"][other] == TAIL_MOVED:
            shared = jobs["rollout_nodes"][other] & jobs["rollout_nodes"][k]
            taken += jobs["tail_share"][other] * bit_count(shared)
    return float(1.0 - taken / bit_count(jobs["rollout_nodes"][k]))


@compiled
def bit_count(mask: int) -> int:
    count = 0
    while mask:
        mask &= mask - 1
        count += 1
    return count


@compiled
def _load(nodes: Records, required: int, job: int, now_s: float, warm_s: float) -> float:
    """Puts the job's state on its nodes; returns the seconds until tails that are being moved have
    left them, and it is loaded."""
    left_s = loaded_s = 0.0
    for bit in range(FORECAST_NODES_MAX):
        if required >> bit == 0:
            break
        if (required >> bit) & 1:
            left_s = max(left_s, nodes["left_at_s"][bit] - now_s)
            if nodes["loaded"][bit] != job:
                loaded_s = max(loaded_s, warm_s if nodes["loaded"][bit] >= 0 else 0.0)
                nodes["loaded"][bit] = job
    return left_s + loaded_s


@compiled
def _move_tails(
    jobs: Records,
    nodes: Records,
    permits: Records,
    j: int,
    now_s: float,
    rules: Rules,
    log: Records,
    at: int,
) -> int:
    """Moves every tail that keeps job j from its nodes; returns the log's end."""
    for k in range(jobs.size):
        held = permits[BUSY] & jobs["rollout_nodes"][j] & jobs["rollout_nodes"][k]
        if k == j or not held or not movable_tail(jobs, permits, k, rules):
            continue
        jobs["stage"][k] = TAIL_MOVED
        jobs["overhead_s"][k] += rules.migrate_s
        permits[BUSY] &= ~jobs["rollout_nodes"][k]
        permits[TAILS] |= jobs["rollout_nodes"][k]
        for bit in range(FORECAST_NODES_MAX):
            if jobs["rollout_nodes"][k] >> bit == 0:
                break
            if (jobs["rollout_nodes"][k] >> bit) & 1:
                nodes["left_at_s"][bit] = now_s + rules.migrate_s
        at = note(log, at, now_s, TAIL_MIGRATED, jobs["id"][k], jobs["rollout_nodes"][k])
    return at


@compiled
def _iteration(jobs: Records, k: int) -> int:
    """Row of job k's present iteration."""
    done, length = jobs["done"][k], jobs["length"][k]
    # A division costs as much as a look at all jobs, and few runs need it.
    return int(jobs["offset"][k] + (done if done < length else done % length))


@compiled
def start(
    jobs: Records,
    nodes: Records,
    permits: Records,
    j: int,
    now_s: float,
    lengths_s: Records,
    rules: Rules,
    log: Records,
    at: int,
) -> int:
    length_s = lengths_s[_iteration(jobs, j)]
    jobs["worked_s"][j] = 0.0
    if jobs["stage"][j] == WAITS_ROLLOUT:
        at = _move_tails(jobs, nodes, permits, j, now_s, rules, log, at)
        required = jobs["rollout_nodes"][j]
        jobs["stage"][j] = BULK
        jobs["left_s"][j] = length_s[0] * jobs["bulk_ratio"][j]
        kind = ROLLOUT_STARTED
    else:
        required = jobs["training_nodes"][j]
        jobs["stage"][j] = TRAINING
        jobs["left_s"][j] = length_s[1]
        kind = TRAINING_STARTED
    permits[BUSY] |= required
    jobs["overhead_s"][j] = _load(nodes, required, jobs["id"][j], now_s, rules.warm_s)
    return note(log, at, now_s, kind, jobs["id"][j], required)


@compiled
def finish(
    jobs: Records,
    permits: Records,
    k: int,
    now_s: float,
    lengths_s: Records,
    log: Records,
    at: int,
) -> int:
    """Moves job k to its next stage when its present one has no work left; returns the log
    length."""
    stage, job = jobs["stage"][k], jobs["id"][k]
    if stage == BULK and jobs["bulk_ratio"][k] < 1.0:
        jobs["stage"][k] = TAIL_HELD
        jobs["left_s"][k] = lengths_s[_iteration(jobs, k), 0] * (1.0 - jobs["bulk_ratio"][k])
        return at
    jobs["solo_s"][k] += jobs["worked_s"][k]
    jobs["waits_since_s"][k] = now_s
    jobs["worked_s"][k] = 0.0
    if stage not in (TRAINING, SYNCING):
        released = TAILS if stage == TAIL_MOVED else BUSY
        permits[released] &= ~jobs["rollout_nodes"][k]
        jobs["stage"][k] = WAITS_TRAINING
        return note(log, at, now_s, ROLLOUT_ENDED, job, jobs["rollout_nodes"][k])
    if stage == TRAINING:
        permits[BUSY] &= ~jobs["training_nodes"][k]
        at = note(log, at, now_s, TRAINING_ENDED, job, jobs["training_nodes"][k])
        if jobs["sync_s"][k] > 0.0:
            jobs["stage"][k], jobs["left_s"][k] = SYNCING, jobs["sync_s"][k]
            return at
    else:
        at = note(log, at, now_s, SYNC_ENDED, job, 0)
    jobs["done"][k] += 1
    jobs["stage"][k] = WAITS_ROLLOUT
    return at


@compiled
def _progress(jobs: Records, permits: Records, passed_s: float) -> None:
    for k in range(jobs.size):
        if not runs(jobs["stage"][k]):
            continue
        overhead_s = min(jobs["overhead_s"][k], passed_s)
        worked_s = (passed_s - overhead_s) * own_speed(jobs, permits, k)
        jobs["overhead_s"][k] -= overhead_s
        jobs["left_s"][k] -= worked_s
        jobs["worked_s"][k] += worked_s


@compiled
def advance(
    jobs: Records,
    nodes: Records,
    permits: Records,
    lengths_s: Records,
    rules: Rules,
    now_s: float,
    until_s: float,
    log: Records,
) -> tuple[float, int, int]:
    """Runs the group up to `until_s`: the time reached, events logged, events in all.

    `lengths_s` has a row of rollout and training solo seconds for every iteration; job k's are the
    `length` rows from its `offset`, again and again. A full log stops it early.
    """
    at, events = 0, 0
    while True:
        started = next_start(jobs, permits, rules)
        while started >= 0:
            at = start(jobs, nodes, permits, started, now_s, lengths_s, rules, log, at)
            events += 1
            started = next_start(jobs, permits, rules)
        if log.size and at > log.size - 4 * jobs.size - 4:
            return now_s, at, events
        first, passed_s = -1, until_s - now_s
        for k in range(jobs.size):
            if not runs(jobs["stage"][k]):
                continue
            left_s = max(jobs["left_s"][k], 0.0)
            rest_s = jobs["overhead_s"][k] + left_s / own_speed(jobs, permits, k)
            if rest_s < passed_s:
                first, passed_s = k, rest_s
        _progress(jobs, permits, passed_s)
        if first < 0:
            return until_s, at, events
        now_s += passed_s
        jobs["left_s"][first] = 0.0
        events += 1
        at = finish(jobs, permits, first, now_s, lengths_s, log, at)
