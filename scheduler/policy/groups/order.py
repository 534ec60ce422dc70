"""Which waiting phase starts now: the one rule that production, forecasts and the simulator share.

Three orders. CYCLIC is the paper's round robin: nobody rolls out or trains again before all that
share the node did; or a given round, in which a job may have several turns. FIFO is first come,
first served: a job that waits for several nodes is passed at none of them. CREDIT is ours: a job's
credit is the delay that it can still absorb, `SLO * solo work done - time since it began`; the
least credit goes first, and a node stays idle for a job that is about to come when starting another
would leave the less credit of the two smaller. All of them only order; how long anything takes is
not known here.
"""

from scheduler.policy.groups.compiled import Records, compiled
from scheduler.policy.groups.stages import (
    BULK,
    BUSY,
    CREDIT,
    CYCLIC,
    DONE,
    FIFO,
    LOADING,
    PARKED,
    TAIL_HELD,
    TAILS,
    TRAINING,
    WAITS_ROLLOUT,
    WAITS_TRAINING,
    Rules,
)


@compiled
def credit_s(jobs: Records, k: int, at_s: float) -> float:
    """Delay that job k can still absorb at `at_s`, by phases that have ended."""
    return float(jobs["slo"][k] * jobs["solo_s"][k] - (at_s - jobs["began_s"][k]))


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
def _can_start(jobs: Records, permits: Records, j: int, rules: Rules) -> bool:
    if jobs["stage"][j] == WAITS_TRAINING:
        return bool((permits[BUSY] & jobs["training_nodes"][j]) == 0)
    wanted = jobs["rollout_nodes"][j] & permits[BUSY]
    for k in range(jobs.size):
        if wanted & jobs["rollout_nodes"][k] and movable_tail(jobs, permits, k, rules):
            wanted &= ~jobs["rollout_nodes"][k]
    return bool(wanted == 0)


@compiled
def round_place(jobs: Records, k: int, turns: int) -> int:
    """Place of job k's next turn after `turns` of them, counted on through the rounds.

    `round` has a bit for every place of the job in the round, and one above the round's last. The
    round robin has no places: one turn each, in the order of the jobs.
    """
    places = jobs["round"][k]
    if places == 0:
        return turns
    length, own = 0, 0
    while places >> (length + 1):
        own += (places >> length) & 1
        length += 1
    place, left = 0, turns % own
    while left or not (places >> place) & 1:
        left -= (places >> place) & 1
        place += 1
    return int(turns // own * length + place)


@compiled
def _is_its_turn(jobs: Records, j: int) -> bool:
    rollout = jobs["stage"][j] == WAITS_ROLLOUT
    nodes = jobs["rollout_nodes"] if rollout else jobs["training_nodes"]
    turns = jobs["rollout_turns"] if rollout else jobs["training_turns"]
    own = round_place(jobs, j, turns[j])
    for k in range(jobs.size):
        stage = jobs["stage"][k]
        if k == j or stage in (LOADING, PARKED, DONE) or (nodes[k] & nodes[j]) == 0:
            continue
        place = round_place(jobs, k, turns[k])
        if place < own or (place == own and k < j):
            return False
    return True


@compiled
def expected_rest_s(jobs: Records, k: int) -> float:
    """Of the phase that job k is in, as far as its mean tells; never quite nothing."""
    rollout = BULK <= jobs["stage"][k] < WAITS_TRAINING
    mean_s = jobs["rollout_mean_s"][k] if rollout else jobs["training_mean_s"][k]
    return float(jobs["overhead_s"][k] + max(mean_s - jobs["worked_s"][k], 0.05 * mean_s))


@compiled
def expected_wish(jobs: Records, k: int, rollout: bool) -> tuple[float, float]:
    """Seconds until job k will want nodes of that kind, and the solo work it will do by then."""
    stage = jobs["stage"][k]
    rollout_s, training_s = jobs["rollout_mean_s"][k], jobs["training_mean_s"][k]
    if stage == LOADING:
        wait_s, work_s = jobs["overhead_s"][k], 0.0
        return (wait_s, work_s) if rollout else (wait_s + rollout_s, rollout_s)
    if stage == WAITS_ROLLOUT:
        return (0.0, 0.0) if rollout else (rollout_s, rollout_s)
    if stage == WAITS_TRAINING:
        return (training_s, training_s) if rollout else (0.0, 0.0)
    rest_s = expected_rest_s(jobs, k)
    if stage == TRAINING:
        if rollout:
            return rest_s, max(training_s, jobs["worked_s"][k])
        return rest_s + rollout_s, training_s + rollout_s
    if rollout:
        return rest_s + training_s, training_s + rollout_s
    return rest_s, max(rollout_s, jobs["worked_s"][k])


@compiled
def _hold_s(jobs: Records, k: int, rollout: bool, rules: Rules) -> float:
    """How long job k would keep others from its nodes."""
    if not rollout:
        return float(rules.warm_s + jobs["training_mean_s"][k])
    if not rules.migrate:
        return float(rules.warm_s + jobs["rollout_mean_s"][k])
    bulk_s = jobs["rollout_mean_s"][k] * jobs["bulk_ratio"][k]
    return float(rules.warm_s + rules.migrate_s + bulk_s)


@compiled
def _leaves_more_credit_waiting(jobs: Records, j: int, now_s: float, rules: Rules) -> bool:
    """Whether job j should leave its free nodes idle for one that is about to want them."""
    rollout = jobs["stage"][j] == WAITS_ROLLOUT
    nodes = jobs["rollout_nodes"] if rollout else jobs["training_nodes"]
    hold_s = _hold_s(jobs, j, rollout, rules)
    for k in range(jobs.size):
        stage = jobs["stage"][k]
        if k == j or stage in (PARKED, DONE) or (nodes[k] & nodes[j]) == 0:
            continue
        wish_s, work_s = expected_wish(jobs, k, rollout)
        delay_s = hold_s - wish_s
        if delay_s <= 0.0 or wish_s <= 0.0:
            continue
        credit = credit_s(jobs, k, now_s + wish_s) + jobs["slo"][k] * work_s - delay_s
        iteration_s = jobs["rollout_mean_s"][k] + jobs["training_mean_s"][k]
        if credit >= rules.reserve_ratio * iteration_s:
            continue
        waited_s = wish_s + _hold_s(jobs, k, rollout, rules)
        if credit_s(jobs, j, now_s + waited_s) > credit:
            return True
    return False


@compiled
def _precedes(jobs: Records, j: int, k: int, now_s: float, order: int) -> bool:
    if order == CREDIT:
        return credit_s(jobs, j, now_s) < credit_s(jobs, k, now_s)
    return bool(jobs["waits_since_s"][j] < jobs["waits_since_s"][k])


@compiled
def next_start(jobs: Records, permits: Records, now_s: float, rules: Rules) -> int:
    """Index of the waiting job whose phase should start now, or -1."""
    tried, awaited = 0, 0
    while True:
        best = -1
        for k in range(jobs.size):
            waits = jobs["stage"][k] in (WAITS_ROLLOUT, WAITS_TRAINING)
            if not waits or tried & (1 << k):
                continue
            if best < 0 or _precedes(jobs, k, best, now_s, rules.order):
                best = k
        if best < 0:
            return -1
        tried |= 1 << best
        if rules.order == FIFO:
            rollout = jobs["stage"][best] == WAITS_ROLLOUT
            wanted = jobs["rollout_nodes"][best] if rollout else jobs["training_nodes"][best]
            passes = (awaited & wanted) != 0
            awaited |= wanted
            if passes:
                continue
        if not _can_start(jobs, permits, best, rules):
            continue
        if rules.order == CYCLIC and not _is_its_turn(jobs, best):
            continue
        if rules.order == CREDIT and _leaves_more_credit_waiting(jobs, best, now_s, rules):
            continue
        return best
