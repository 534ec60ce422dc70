"""Invariants of groups and leases."""

from harvester.contracts.ids import Epoch, GroupId, JobId, LeaseId, NodeId, SlotId
from scheduler.model import JobSpec, Lease, Placement
from scheduler.rollmux.planner.group_table import GroupState
from tests.unit.scheduler.faults import group_faults, lease_faults

HOST_BYTES = dict.fromkeys(map(NodeId, ("r1", "r2", "t1")), 100)
JOBS = {
    JobId(name): JobSpec(job=JobId(name), phases=(), slo=1.0, host_bytes=60) for name in ("a", "b")
}


def _group(name: str, rollout: str, *jobs: str, pinned: str | None = None) -> GroupState:
    nodes = (NodeId(pinned or rollout),)
    return GroupState(
        group=GroupId(name),
        rollout=[NodeId(rollout)],
        pinned={
            JobId(job): Placement(job=JobId(job), rollout_nodes=nodes, training_nodes=())
            for job in jobs
        },
    )


def _faults(*groups: GroupState) -> tuple[str, ...]:
    return group_faults(groups, host_bytes=HOST_BYTES, jobs=JOBS)


def test_disjoint_groups_whose_state_fits_have_no_fault() -> None:
    assert _faults(_group("g1", "r1", "a"), _group("g2", "r2", "b")) == ()


def test_names_a_node_in_two_groups() -> None:
    assert _faults(_group("g1", "r1"), _group("g2", "r1")) == ("node r1 is in groups g1 and g2",)


def test_names_a_job_pinned_outside_its_group() -> None:
    assert _faults(_group("g1", "r1", "a", pinned="r2")) == ("job a is pinned outside its group",)


def test_names_a_node_whose_residents_do_not_fit_its_host_memory() -> None:
    assert _faults(_group("g1", "r1", "a", "b")) == ("node r1 holds 120 bytes of 100",)


def test_names_a_slot_that_is_leased_twice_and_stops_use_before_the_end() -> None:
    leases = [
        Lease(
            lease=LeaseId(name),
            slot=SlotId("s"),
            agent="x",
            job=JobId("a"),
            epoch=Epoch(1),
            expires_s=10.0,
        )
        for name in ("l1", "l2")
    ]
    assert lease_faults(leases) == ("slot s is leased 2 times",)
    assert lease_faults(leases[:1]) == ()
    assert leases[0].usable(now=8.9, margin_s=1.0)
    assert not leases[0].usable(now=9.0, margin_s=1.0)
