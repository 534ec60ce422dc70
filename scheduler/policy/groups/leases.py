"""Leases as a group's third resource: which job gets which slots, and what these give.

A group may borrow slots of serving accelerators beside its rollout nodes. A slot serves one job at
a time and gives it what production leaves: its headroom, from 0 to 1 of an accelerator. Bulks share
all slots in proportion to their nodes and spill onto them; where tails go is `leased_tails`'.
Admission and forecasts know nothing of leases: whatever they promise holds without any.
"""

from typing import Final, NamedTuple

import numpy as np

from scheduler.policy.groups.compiled import Records, compiled
from scheduler.policy.groups.execution import node_count
from scheduler.policy.groups.stages import BULK, TAIL_LEASED

NOWHERE: Final = float("inf")
_LOOKBACK_BINS: Final = 10
_BIN_S: Final = 60.0
"""A forecast of headroom rests on the last ten minutes, minute by minute."""

POOL: Final = np.dtype(
    [
        ("slots_per_node", "f8"),
        ("offset_s", "f8"),
        ("leased_slot_s", "f8"),
        ("given_node_s", "f8"),
    ]
)
"""One group's slots: how many for each of its rollout nodes, where in the headroom's record its
time begins, slot seconds held so far and node seconds of work that they gave."""


class LeaseTerms(NamedTuple):
    """What using a leased slot costs."""

    activation_s: float
    """From a sleeping policy to a serving one."""
    sync_s: float
    """From a version's publication until every slot holds it; a slot sleeps meanwhile."""
    kept_s: float
    """To move a tail with its KV."""
    recomputed_s: float
    """To move a tail without, and prefill what it has."""
    accelerators: int
    """Of one rollout node."""
    quantile: float
    """Standard deviations below its mean at which headroom is forecast for tails."""


def kv_kept_s(tokens: int, *, bytes_per_token: int, link_bytes_per_s: float) -> float:
    """Seconds to move the KV of so many tokens over a link."""
    return tokens * bytes_per_token / link_bytes_per_s


@compiled
def move_s(terms: LeaseTerms) -> float:
    """A tail moves with its KV or without, whichever is cheaper."""
    return min(terms.kept_s, terms.recomputed_s)


@compiled
def in_force(turns_s: Records, now_s: float) -> tuple[bool, float]:
    """Whether leases are in force, and until when; at every turn they are revoked or given back."""
    passed = np.searchsorted(turns_s, now_s, side="right")
    until_s = turns_s[passed] if passed < turns_s.size else NOWHERE
    return passed % 2 == 0, until_s


@compiled
def given_until(headroom_s: Records, t_s: float) -> float:
    """Accelerator seconds that a slot gave from 0 to `t_s`; `headroom_s` sums it second by second
    from 0 on, and its record begins again when it ends."""
    seconds = headroom_s.size - 1
    laps = np.floor(t_s / seconds)
    rest_s = min(max(t_s - laps * seconds, 0.0), seconds - 1e-9)
    at = int(rest_s)
    within = (rest_s - at) * (headroom_s[at + 1] - headroom_s[at])
    return float(laps * headroom_s[seconds] + headroom_s[at] + within)


@compiled
def forecast_headroom(headroom_s: Records, at_s: float, quantile: float) -> tuple[float, float]:
    """Mean headroom of the minutes before, and what it exceeds with the quantile's probability."""
    mean = square = 0.0
    for back in range(_LOOKBACK_BINS):
        end_s = at_s - back * _BIN_S
        gave = given_until(headroom_s, end_s) - given_until(headroom_s, end_s - _BIN_S)
        mean += gave / _BIN_S / _LOOKBACK_BINS
        square += (gave / _BIN_S) ** 2 / _LOOKBACK_BINS
    spread = np.sqrt(max(0.0, square - mean * mean))
    return mean, max(0.0, mean - quantile * spread)


@compiled
def tail_slots(jobs: Records, k: int, terms: LeaseTerms) -> int:
    """Slots that take job k's tail as far as their headroom allows."""
    wanted = jobs["tail_share"][k] * terms.accelerators * node_count(jobs["rollout_nodes"][k])
    return int(np.ceil(wanted - 1e-6))


@compiled
def all_slots(jobs: Records, pool: Records) -> int:
    pinned = 0
    for k in range(jobs.size):
        pinned |= jobs["rollout_nodes"][k]
    return int(pool["slots_per_node"][0] * node_count(pinned))


@compiled
def _resize(
    jobs: Records, k: int, wanted: int, now_s: float, move_back_s: float, terms: LeaseTerms
) -> None:
    """Slots go at once and come after their activation; what ran on those that go moves home."""
    if jobs["slots_coming"][k] and jobs["slots_ready_s"][k] <= now_s:
        jobs["slots"][k] += jobs["slots_coming"][k]
        jobs["slots_coming"][k] = 0
    have = jobs["slots"][k]
    if have + jobs["slots_coming"][k] < wanted:
        jobs["slots_coming"][k] = wanted - have
        synced_s = jobs["published_s"][k] + terms.sync_s
        jobs["slots_ready_s"][k] = max(now_s + terms.activation_s, synced_s)
        return
    jobs["slots_coming"][k] = max(0, wanted - have)
    if have > wanted:
        whole = have + terms.accelerators * node_count(jobs["rollout_nodes"][k])
        jobs["overhead_s"][k] += move_back_s * (have - wanted) / whole
        jobs["slots"][k] = wanted


@compiled
def allot(
    jobs: Records, pool: Records, now_s: float, is_in_force: bool, terms: LeaseTerms
) -> float:
    """Gives every rollout its slots; the time at which the next of them are ready."""
    left = all_slots(jobs, pool) if is_in_force else 0
    bulk_nodes = 0
    for k in range(jobs.size):
        if jobs["stage"][k] == TAIL_LEASED:
            given = min(left, tail_slots(jobs, k, terms))
            if given and not jobs["slots"][k]:
                # Revoked, and no place at home since: its KV is gone.
                jobs["overhead_s"][k] += terms.activation_s + terms.recomputed_s
            jobs["slots"][k] = given
            left -= given
        elif jobs["stage"][k] == BULK:
            bulk_nodes += node_count(jobs["rollout_nodes"][k])
        else:
            jobs["slots"][k] = jobs["slots_coming"][k] = 0
    move_back_s = move_s(terms) if is_in_force else terms.recomputed_s
    next_s = NOWHERE
    for k in range(jobs.size):
        if jobs["stage"][k] == BULK:
            wanted = left * node_count(jobs["rollout_nodes"][k]) // bulk_nodes
            _resize(jobs, k, wanted, now_s, move_back_s, terms)
            if jobs["slots_coming"][k]:
                next_s = min(next_s, jobs["slots_ready_s"][k])
    return next_s
