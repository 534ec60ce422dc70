"""Leases as a group's third resource: what they give, what they cost, what a revocation leaves."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.groups.compiled import Records
from scheduler.policy.groups.execution import advance
from scheduler.policy.groups.forecast import Occupant, Roster
from scheduler.policy.groups.leased_execution import advance_leased
from scheduler.policy.groups.leased_tails import leased_is_sooner
from scheduler.policy.groups.leases import (
    POOL,
    LeaseTerms,
    forecast_headroom,
    given_until,
    in_force,
    kv_kept_s,
    move_s,
)
from scheduler.policy.groups.stages import (
    BULK,
    BUSY,
    EVENT,
    TAIL_HELD,
    TAIL_MOVED,
    TAIL_RETURNED,
    TAIL_SENT,
    TAILS,
    TRAINING,
    TRAINING_ENDED,
    WAITS_ROLLOUT,
    Rules,
    empty_nodes,
    empty_permits,
)
from tests.unit.scheduler.groups.stage_jobs import occupant

RULES = Rules(migrate=True, prewarm=True, warm_s=5.0, migrate_s=3.0)
TERMS = LeaseTerms(
    activation_s=5.0, sync_s=20.0, kept_s=4.0, recomputed_s=3.0, accelerators=8, quantile=1.28
)
FREE = LeaseTerms(
    activation_s=0.0, sync_s=0.0, kept_s=0.0, recomputed_s=0.0, accelerators=8, quantile=0.0
)


def steady(headroom: float) -> Records:
    return np.arange(3601) * headroom


class Machines(NamedTuple):
    jobs: Records
    nodes: Records
    permits: Records
    lengths_s: Records
    pool: Records

    def run(
        self,
        until_s: float,
        *,
        headroom_s: Records,
        turns_s: tuple[float, ...] = (),
        terms: LeaseTerms = TERMS,
        now_s: float = 0.0,
        rules: Rules = RULES,
    ) -> Records:
        log = np.zeros(20_000, dtype=EVENT)
        _, logged, _ = advance_leased(
            self.jobs,
            self.nodes,
            self.permits,
            self.lengths_s,
            rules,
            self.pool,
            headroom_s,
            np.array(turns_s, dtype=np.float64),
            terms,
            now_s,
            until_s,
            log,
        )
        return log[:logged]


def machines(occupants: list[Occupant], *, slots_per_node: float = 4.0) -> Machines:
    jobs = Roster.of(occupants).jobs.copy()
    jobs["offset"], jobs["length"] = np.arange(len(occupants)), 1
    lengths_s = np.array([[one.belief.rollout_s, one.belief.training_s] for one in occupants])
    pool = np.zeros(1, dtype=POOL)
    pool["slots_per_node"], pool["offset_s"] = slots_per_node, 3600.0
    return Machines(jobs, empty_nodes(), empty_permits(), lengths_s, pool)


def _iterations_s(log: Records, job: int) -> list[float]:
    ends = [
        event["t_s"] for event in log if event["kind"] == TRAINING_ENDED and event["job"] == job
    ]
    return list(np.diff(ends))


@st.composite
def groups(draw: st.DrawFn) -> list[Occupant]:
    rollout = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    return [
        occupant(
            draw(st.floats(50, 500)),
            draw(st.floats(30, 300)),
            slo=draw(st.floats(1.0, 3.0)),
            rollout=1 << node,
            training=8 << draw(st.integers(0, 1)),
            bulk=draw(st.sampled_from([0.5, 0.7, 1.0])),
        )
        for node in rollout
    ]


@settings(max_examples=30, deadline=None)
@given(groups(), st.booleans())
def test_without_slots_or_with_all_revoked_it_is_the_group_s_own_execution_to_the_bit(
    occupants: list[Occupant], revoked: bool
) -> None:
    own = machines(occupants)
    log = np.zeros(20_000, dtype=EVENT)
    _, logged, _ = advance(
        own.jobs, own.nodes, own.permits, own.lengths_s, RULES, 0.0, 9_000.0, log
    )
    leased = machines(occupants, slots_per_node=4.0 if revoked else 0.0)
    told = leased.run(9_000.0, headroom_s=steady(0.6), turns_s=(0.0,) if revoked else ())
    assert told.tobytes() == log[:logged].tobytes()
    assert leased.pool["leased_slot_s"][0] == 0.0


def _held_once(machine: Machines, is_in_force: bool) -> None:
    """Every permit has one holder, every slot one job, and revoked slots none."""
    busy: list[int] = []
    tails: list[int] = []
    pinned = 0
    for job in machine.jobs:
        pinned |= int(job["rollout_nodes"])
        if job["stage"] in (BULK, TAIL_HELD):
            busy.append(int(job["rollout_nodes"]))
        elif job["stage"] == TRAINING:
            busy.append(int(job["training_nodes"]))
        elif job["stage"] == TAIL_MOVED:
            tails.append(int(job["rollout_nodes"]))
    for masks, permit in ((busy, BUSY), (tails, TAILS)):
        assert sum(masks) == int(np.bitwise_or.reduce(masks or [0]))
        assert sum(masks) == machine.permits[permit]
    leased = int((machine.jobs["slots"] + machine.jobs["slots_coming"]).sum())
    assert leased <= (4 * pinned.bit_count() if is_in_force else 0)


@settings(max_examples=40, deadline=None)
@given(
    groups(),
    st.lists(st.floats(1, 400), min_size=1, max_size=12),
    st.floats(0.0, 1.0),
    st.lists(st.floats(5, 900), max_size=8),
)
def test_revocations_at_any_moment_break_no_permit_and_starve_nobody(
    occupants: list[Occupant], steps_s: list[float], headroom: float, stays_s: list[float]
) -> None:
    machine = machines(occupants)
    turns_s = tuple(np.cumsum(stays_s)) if stays_s else ()
    now_s = 0.0
    for step_s in steps_s:
        machine.run(now_s + step_s, headroom_s=steady(headroom), turns_s=turns_s, now_s=now_s)
        now_s += step_s
        _held_once(machine, in_force(np.array(turns_s), now_s - 1e-6)[0] if turns_s else True)
    machine.run(now_s + 40_000.0, headroom_s=steady(headroom), turns_s=turns_s, now_s=now_s)
    assert (machine.jobs["done"] > 0).all()


def test_a_bulk_is_faster_by_what_its_slots_give() -> None:
    alone = machines([occupant(300.0, 100.0)])
    log = alone.run(10_000.0, headroom_s=steady(0.5), terms=FREE)
    # Four of eight accelerators' worth at half headroom: a quarter more speed.
    assert _iterations_s(log, 0)[1] == pytest.approx(300.0 / 1.25 + 100.0)
    assert alone.pool["given_node_s"][0] > 0


def test_slots_serve_only_once_they_hold_the_new_weights_and_are_awake() -> None:
    synced = machines([occupant(300.0, 100.0)])
    log = synced.run(10_000.0, headroom_s=steady(0.5))
    # 20 s at the node's own speed, the rest a quarter faster.
    assert _iterations_s(log, 0)[1] == pytest.approx(20.0 + 280.0 / 1.25 + 100.0)


def test_slots_are_shared_by_the_bulks_that_run() -> None:
    machine = machines([occupant(300.0, 100.0, rollout=1 << at, training=16) for at in range(3)])
    machine.run(30.0, headroom_s=steady(0.5))
    assert machine.jobs["slots"].tolist() == [4, 4, 4]
    assert machine.pool["leased_slot_s"][0] == pytest.approx(12 * 30.0)


def test_a_revoked_tail_goes_on_at_home_and_its_slots_are_gone() -> None:
    machine, log = _with_leased_tail()
    sent_s = log["t_s"][log["kind"] == TAIL_SENT][0]
    leased = int(log["job"][log["kind"] == TAIL_SENT][0])
    revoked_s = sent_s + 12.0
    machine, log = _with_leased_tail(turns_s=(revoked_s,))
    back = log[log["kind"] == TAIL_RETURNED]
    assert back["job"][0] == leased
    assert (log["kind"] == TAIL_SENT).sum() == len(back)
    assert back["t_s"][0] >= revoked_s
    assert (machine.jobs["slots"] == 0).all()
    assert (machine.jobs["done"] > 0).all()


def _with_leased_tail(turns_s: tuple[float, ...] = ()) -> tuple[Machines, Records]:
    """Two tails that would need the same quarter of a node, and a third job that waits."""
    machine = machines(
        [
            occupant(rollout_s, 60.0, slo=3.0, training=2 << at, bulk=0.3)
            for at, rollout_s in enumerate((500.0, 400.0, 300.0))
        ],
        slots_per_node=8.0,
    )
    return machine, machine.run(900.0, headroom_s=steady(0.95), turns_s=turns_s, terms=TERMS)


def _two_jobs(*, slo: float) -> Machines:
    """Job 0 rolls out its tail on the node for which job 1 waits; job 2's tail has a quarter."""
    machine = machines(
        [occupant(400.0, 100.0, slo=slo, bulk=0.5) for _ in range(3)], slots_per_node=8.0
    )
    machine.jobs["stage"] = (TAIL_HELD, WAITS_ROLLOUT, TAIL_MOVED)
    machine.jobs["left_s"], machine.jobs["worked_s"] = (200.0, 0.0, 150.0), (200.0, 0.0, 250.0)
    machine.permits[BUSY] = machine.permits[TAILS] = 1
    machine.jobs["published_s"] = -1000.0
    return machine


@pytest.mark.parametrize(
    ("headroom", "slo", "sooner"),
    [((0.95, 0.9), 2.0, True), ((0.3, 0.2), 2.0, False), ((0.95, 0.9), 0.5, False)],
)
def test_a_tail_is_leased_where_that_ends_sooner_and_its_credit_pays_for_a_revocation(
    headroom: tuple[float, float], slo: float, sooner: bool
) -> None:
    machine = _two_jobs(slo=slo)
    found = leased_is_sooner(
        machine.jobs, machine.permits, machine.pool, headroom, 0, 1, 200.0, RULES, TERMS
    )
    assert found is sooner


def test_a_tail_stays_at_home_while_slots_lack_its_weights() -> None:
    machine = _two_jobs(slo=2.0)
    machine.jobs["published_s"] = 190.0
    assert not leased_is_sooner(
        machine.jobs, machine.permits, machine.pool, (0.95, 0.9), 0, 1, 200.0, RULES, TERMS
    )


def test_kv_is_kept_or_recomputed_whichever_is_cheaper() -> None:
    kept_s = kv_kept_s(600_000, bytes_per_token=147_456, link_bytes_per_s=25e9)
    assert kept_s == pytest.approx(3.54, abs=0.01)
    assert move_s(TERMS._replace(kept_s=kept_s)) == 3.0
    assert move_s(TERMS._replace(kept_s=1.0)) == 1.0


def test_a_headroom_that_varies_is_forecast_below_its_mean() -> None:
    uneven = np.concatenate([[0.0], np.cumsum(np.tile(np.repeat([0.8, 0.2], 60), 30))])
    mean, low = forecast_headroom(uneven, 3600.0, 1.0)
    assert mean == pytest.approx(0.5)
    assert low == pytest.approx(0.2)
    assert forecast_headroom(steady(0.4), 5000.0, 1.0) == pytest.approx((0.4, 0.4))


@given(st.floats(0, 1e6), st.floats(0, 500))
def test_what_a_slot_gives_adds_up_over_the_record_s_end(at_s: float, more_s: float) -> None:
    record = np.concatenate([[0.0], np.cumsum(np.linspace(0.0, 1.0, 100))])
    gave = given_until(record, at_s + more_s) - given_until(record, at_s)
    assert -1e-6 <= gave <= more_s + 1e-6
    lap = given_until(record, at_s + 100.0) - given_until(record, at_s)
    assert lap == pytest.approx(record[-1], abs=1e-5)
