"""A group's execution with leases: the same phases, started by the same rule, on more capacity.

Beside `execution.advance` it sends tails to leased slots and brings them home, shares the slots
among bulks, and lets both run as fast as the headroom of every second allows. Without slots it is
`execution.advance` to the bit. A revocation takes every slot at that moment: bulks go on at their
own speed, tails go home as soon as a place there is free.
"""

from scheduler.policy.groups.compiled import Records, compiled
from scheduler.policy.groups.execution import (
    finish,
    node_count,
    note,
    own_speed,
    prewarm,
    runs,
    start,
)
from scheduler.policy.groups.leased_tails import comes_home, leased_is_sooner, waits_for
from scheduler.policy.groups.leases import (
    NOWHERE,
    LeaseTerms,
    allot,
    forecast_headroom,
    given_until,
    in_force,
    move_s,
    tail_slots,
)
from scheduler.policy.groups.order import next_start
from scheduler.policy.groups.stages import (
    BULK,
    BUSY,
    LOADING,
    TAIL_HELD,
    TAIL_LEASED,
    TAIL_RETURNED,
    TAIL_SENT,
    TAILS,
    WAITS_ROLLOUT,
    Rules,
)

_HALVINGS = 60


@compiled
def _spill_ratio(jobs: Records, k: int, terms: LeaseTerms) -> float:
    """Speed that full headroom on job k's slots would add to its stage."""
    if jobs["slots"][k] == 0:
        return 0.0
    if jobs["stage"][k] == BULK:
        nodes = node_count(jobs["rollout_nodes"][k])
        return float(jobs["slots"][k] / (terms.accelerators * nodes))
    if jobs["stage"][k] == TAIL_LEASED:
        # A sequence decodes on one slot, so more slots than it takes make a tail no faster.
        return float(min(1.0, jobs["slots"][k] / tail_slots(jobs, k, terms)))
    return 0.0


@compiled
def _home_speed(jobs: Records, permits: Records, k: int) -> float:
    return 0.0 if jobs["stage"][k] == TAIL_LEASED else own_speed(jobs, permits, k)


@compiled
def _worked_s(
    jobs: Records,
    permits: Records,
    k: int,
    headroom_s: Records,
    from_s: float,
    passed_s: float,
    terms: LeaseTerms,
) -> float:
    """Solo seconds that job k gets done in so many seconds from `from_s` in the record."""
    spill = _spill_ratio(jobs, k, terms)
    worked_s = passed_s * _home_speed(jobs, permits, k)
    if spill > 0.0:
        end_s = from_s + passed_s
        worked_s += spill * (given_until(headroom_s, end_s) - given_until(headroom_s, from_s))
    return worked_s


@compiled
def _rest_s(
    jobs: Records,
    permits: Records,
    k: int,
    headroom_s: Records,
    now_s: float,
    most_s: float,
    terms: LeaseTerms,
) -> float:
    """Until job k's present stage ends if nothing changes; NOWHERE if that is after `most_s`."""
    overhead_s, left_s = jobs["overhead_s"][k], max(jobs["left_s"][k], 0.0)
    if _spill_ratio(jobs, k, terms) == 0.0:
        speed = _home_speed(jobs, permits, k)
        return float(overhead_s + left_s / speed) if speed > 0.0 else NOWHERE
    from_s, long_s = now_s + overhead_s, most_s - overhead_s
    if long_s <= 0.0 or _worked_s(jobs, permits, k, headroom_s, from_s, long_s, terms) < left_s:
        return NOWHERE
    short_s = 0.0
    for _ in range(_HALVINGS):
        middle_s = 0.5 * (short_s + long_s)
        if _worked_s(jobs, permits, k, headroom_s, from_s, middle_s, terms) < left_s:
            short_s = middle_s
        else:
            long_s = middle_s
    return float(overhead_s + long_s)


@compiled
def _progress(
    jobs: Records,
    permits: Records,
    pool: Records,
    headroom_s: Records,
    now_s: float,
    passed_s: float,
    terms: LeaseTerms,
) -> None:
    from_s = now_s + pool["offset_s"][0]
    for k in range(jobs.size):
        if not runs(jobs["stage"][k]):
            continue
        held = jobs["slots"][k] + jobs["slots_coming"][k]
        pool["leased_slot_s"][0] += held * passed_s
        overhead_s = min(jobs["overhead_s"][k], passed_s)
        works_s = passed_s - overhead_s
        at_home_s = works_s * _home_speed(jobs, permits, k)
        worked_s = _worked_s(jobs, permits, k, headroom_s, from_s + overhead_s, works_s, terms)
        pool["given_node_s"][0] += (worked_s - at_home_s) * node_count(jobs["rollout_nodes"][k])
        jobs["overhead_s"][k] -= overhead_s
        jobs["left_s"][k] -= worked_s
        if jobs["stage"][k] != LOADING:
            jobs["worked_s"][k] += worked_s


@compiled
def _send_tails(
    jobs: Records,
    permits: Records,
    pool: Records,
    headroom_s: Records,
    now_s: float,
    rules: Rules,
    terms: LeaseTerms,
    log: Records,
    at: int,
) -> int:
    for k in range(jobs.size):
        if jobs["stage"][k] != TAIL_HELD or jobs["tail_sent"][k] or not rules.migrate:
            continue
        j = waits_for(jobs, permits, k)
        if j < 0:
            continue
        record_s = now_s + pool["offset_s"][0]
        headroom = forecast_headroom(headroom_s, record_s, terms.quantile)
        if not leased_is_sooner(jobs, permits, pool, headroom, k, j, now_s, rules, terms):
            continue
        jobs["stage"][k], jobs["tail_sent"][k] = TAIL_LEASED, 1
        jobs["slots"][k] = tail_slots(jobs, k, terms)
        jobs["overhead_s"][k] += terms.activation_s + move_s(terms)
        permits[BUSY] &= ~jobs["rollout_nodes"][k]
        at = note(log, at, now_s, TAIL_SENT, jobs["id"][k], jobs["rollout_nodes"][k], 0.0)
    return at


@compiled
def _bring_tails_home(
    jobs: Records,
    permits: Records,
    pool: Records,
    headroom_s: Records,
    now_s: float,
    is_in_force: bool,
    rules: Rules,
    terms: LeaseTerms,
    log: Records,
    at: int,
) -> int:
    for k in range(jobs.size):
        if jobs["stage"][k] != TAIL_LEASED:
            continue
        headroom = 0.0
        if is_in_force:
            headroom, _ = forecast_headroom(headroom_s, now_s + pool["offset_s"][0], 0.0)
        else:
            jobs["slots"][k] = 0
        home_s = rules.warm_s + (move_s(terms) if is_in_force else terms.recomputed_s)
        stage = comes_home(jobs, permits, k, headroom, home_s)
        if stage == TAIL_LEASED:
            continue
        permits[BUSY if stage == TAIL_HELD else TAILS] |= jobs["rollout_nodes"][k]
        jobs["stage"][k], jobs["slots"][k] = stage, 0
        jobs["overhead_s"][k] += home_s
        at = note(log, at, now_s, TAIL_RETURNED, jobs["id"][k], jobs["rollout_nodes"][k], 0.0)
    return at


@compiled
def _finish(
    jobs: Records,
    permits: Records,
    k: int,
    now_s: float,
    lengths_s: Records,
    terms: LeaseTerms,
    log: Records,
    at: int,
) -> int:
    spilled = jobs["stage"][k] == BULK and jobs["slots"][k] > 0
    at = finish(jobs, permits, k, now_s, lengths_s, log, at)
    if spilled and jobs["stage"][k] == TAIL_HELD:
        # What still runs on the slots comes home, where the whole tail has room.
        jobs["overhead_s"][k] += move_s(terms)
    if jobs["stage"][k] == WAITS_ROLLOUT:
        jobs["published_s"][k] = now_s
    return at


@compiled
def advance_leased(
    jobs: Records,
    nodes: Records,
    permits: Records,
    lengths_s: Records,
    rules: Rules,
    pool: Records,
    headroom_s: Records,
    turns_s: Records,
    terms: LeaseTerms,
    now_s: float,
    until_s: float,
    log: Records,
) -> tuple[float, int, int]:
    """As `execution.advance`, with the slots of `pool`, whose two sums it adds to.

    `headroom_s` is what a slot gave up to each second, `turns_s` when leases are revoked and, in
    turn, given back.
    """
    at, events = 0, 0
    while True:
        is_in_force, turns_at_s = in_force(turns_s, now_s)
        at = _bring_tails_home(
            jobs, permits, pool, headroom_s, now_s, is_in_force, rules, terms, log, at
        )
        while True:
            if is_in_force:
                at = _send_tails(jobs, permits, pool, headroom_s, now_s, rules, terms, log, at)
            started = next_start(jobs, permits, rules)
            if started < 0:
                break
            at = start(jobs, nodes, permits, started, now_s, lengths_s, rules, log, at)
            jobs["tail_sent"][started] = 0
            events += 1
        if rules.prewarm:
            prewarm(jobs, nodes, permits, now_s, rules.warm_s)
        ready_s = allot(jobs, pool, now_s, is_in_force, terms)
        if log.size and at > log.size - 8 * jobs.size - 8:
            return now_s, at, events
        next_s = min(until_s, turns_at_s, ready_s)
        first, passed_s = -1, next_s - now_s
        for k in range(jobs.size):
            if not runs(jobs["stage"][k]):
                continue
            from_s = now_s + pool["offset_s"][0]
            rest_s = _rest_s(jobs, permits, k, headroom_s, from_s, passed_s, terms)
            if rest_s < passed_s:
                first, passed_s = k, rest_s
        _progress(jobs, permits, pool, headroom_s, now_s, passed_s, terms)
        if first < 0:
            now_s = next_s
            if now_s >= until_s:
                return until_s, at, events
            continue
        now_s += passed_s
        jobs["left_s"][first] = 0.0
        events += 1
        at = _finish(jobs, permits, first, now_s, lengths_s, terms, log, at)
