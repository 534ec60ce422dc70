"""Where a rollout's tail goes when somebody waits for its nodes: home, or to leased slots.

It goes to slots only where that ends the two jobs' iterations sooner, by a headroom that is
exceeded with the stated risk, and where the job's credit pays even for an immediate revocation. It
comes home when the leases are revoked, or when its nodes are idle and faster.
"""

from typing import Final

from scheduler.policy.groups.compiled import Records, compiled
from scheduler.policy.groups.execution import node_count
from scheduler.policy.groups.leases import LeaseTerms, all_slots, move_s, tail_slots
from scheduler.policy.groups.order import expected_rest_s, movable_tail
from scheduler.policy.groups.stages import (
    BUSY,
    TAIL_HELD,
    TAIL_LEASED,
    TAIL_MOVED,
    TAILS,
    WAITS_ROLLOUT,
    Rules,
)

_RESERVE_RATIO: Final = 0.03
"""Share of an iteration that a leased job's credit keeps against noise."""


@compiled
def _credit_s(jobs: Records, k: int, at_s: float) -> float:
    """Delay that job k can still absorb at `at_s`, by phases that have ended."""
    return float(jobs["slo"][k] * jobs["solo_s"][k] - (at_s - jobs["began_s"][k]))


@compiled
def waits_for(jobs: Records, permits: Records, k: int) -> int:
    """The job that waits longest of those that only job k's tail keeps from nodes, or -1."""
    first = -1
    for j in range(jobs.size):
        shared = jobs["rollout_nodes"][j] & jobs["rollout_nodes"][k]
        others = permits[BUSY] & jobs["rollout_nodes"][j] & ~jobs["rollout_nodes"][k]
        if jobs["stage"][j] != WAITS_ROLLOUT or not shared or others:
            continue
        if first < 0 or jobs["waits_since_s"][j] < jobs["waits_since_s"][first]:
            first = j
    return first


@compiled
def _bulk_s(jobs: Records, j: int, share: float, beside_s: float, spill: float) -> float:
    """Of job j's bulk, beside a tail that takes `share` of its nodes for `beside_s`."""
    work_s = jobs["rollout_mean_s"][j] * jobs["bulk_ratio"][j]
    slow = 1.0 - share + spill
    if slow * beside_s >= work_s:
        return float(work_s / slow)
    return float(beside_s + (work_s - slow * beside_s) / (1.0 + spill))


@compiled
def _after_bulk_s(jobs: Records, j: int) -> float:
    tail_s = jobs["rollout_mean_s"][j] * (1.0 - jobs["bulk_ratio"][j])
    return float(tail_s + jobs["training_mean_s"][j] + jobs["sync_s"][j])


@compiled
def _tail_on(jobs: Records, k: int) -> tuple[float, float]:
    """Rest and share of the tail that occupies job k's nodes; zeros where there is none."""
    rest_s = share = 0.0
    for m in range(jobs.size):
        shares = (jobs["rollout_nodes"][m] & jobs["rollout_nodes"][k]) != 0
        if m != k and shares and jobs["stage"][m] == TAIL_MOVED:
            rest_s = max(rest_s, expected_rest_s(jobs, m))
            share = max(share, jobs["tail_share"][m])
    return rest_s, share


@compiled
def leased_is_sooner(
    jobs: Records,
    permits: Records,
    pool: Records,
    headroom: tuple[float, float],
    k: int,
    j: int,
    now_s: float,
    rules: Rules,
    terms: LeaseTerms,
) -> bool:
    """Whether job k's tail should leave its nodes to job j and go to leased slots."""
    needed, slots = tail_slots(jobs, k, terms), all_slots(jobs, pool)
    for m in range(jobs.size):
        if jobs["stage"][m] == TAIL_LEASED:
            slots -= jobs["slots"][m]
    mean, low = headroom
    synced = now_s >= jobs["published_s"][k] + terms.sync_s
    if not synced or needed == 0 or slots < needed or low <= 0.0:
        return False
    rest_s = expected_rest_s(jobs, k)
    other_s, other_share = _tail_on(jobs, k)
    per_slot = mean / (terms.accelerators * node_count(jobs["rollout_nodes"][j]))
    # At home the tail takes its share of the nodes, or all of them until the tail there has gone.
    wait_s = 0.0 if movable_tail(jobs, permits, k, rules) else min(rest_s, other_s)
    spill = per_slot * slots
    beside_s = rest_s - wait_s
    j_home_s = wait_s + _bulk_s(jobs, j, jobs["tail_share"][k], beside_s, spill)
    trained_s = jobs["training_mean_s"][k] + jobs["sync_s"][k]
    home_s = max(rest_s + trained_s, j_home_s + _after_bulk_s(jobs, j))
    leased_s = terms.activation_s + move_s(terms) + rest_s / low
    spill = per_slot * (slots - needed)
    j_away_s = _bulk_s(jobs, j, other_share, other_s, spill)
    away_s = max(leased_s + trained_s, j_away_s + _after_bulk_s(jobs, j))
    # Revoked at once, it comes home when the tail there has gone, and loads and prefills again.
    revoked_s = move_s(terms) + terms.recomputed_s + rules.warm_s + other_s + rest_s
    credit = _credit_s(jobs, k, now_s + max(leased_s, revoked_s))
    credit += jobs["slo"][k] * jobs["rollout_mean_s"][k]
    iteration_s = jobs["rollout_mean_s"][k] + jobs["training_mean_s"][k] + jobs["sync_s"][k]
    return bool(away_s < home_s and credit >= _RESERVE_RATIO * iteration_s)


@compiled
def comes_home(jobs: Records, permits: Records, k: int, headroom: float, home_s: float) -> int:
    """The stage in which job k's leased tail goes on at home, or TAIL_LEASED: it stays out.

    `headroom` is what its slots give at present, 0 once they are revoked; `home_s` is the way.
    """
    nodes = jobs["rollout_nodes"][k]
    if not permits[BUSY] & nodes:
        rest_s = expected_rest_s(jobs, k)
        stays = headroom > 0.0 and rest_s / headroom <= rest_s + home_s
        if stays or (headroom > 0.0 and waits_for(jobs, permits, k) >= 0):
            return TAIL_LEASED
        return TAIL_HELD
    if headroom == 0.0 and not permits[TAILS] & nodes:
        return TAIL_MOVED
    return TAIL_LEASED
