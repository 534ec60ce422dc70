"""Requests, renewals and returns of slot leases."""

from typing import Any

from harvester.contracts.ids import Epoch, JobId, LeaseId, SlotId
from scheduler.gateway.policy.capacity import (
    CapacityConfig,
    CapacityPolicy,
    CapacitySample,
    Demand,
    DropLease,
    LeasableSlot,
    ReleaseLease,
    RenewLease,
    SlotRefusal,
    TakeLease,
)
from scheduler.model import Lease

JOB = JobId("job")


def _demand(queued: int = 10, running: int = 4, **more: Any) -> Demand:
    given = {"active": True, "harvesting": True, "dedicated_places": 4, "job": JOB, **more}
    return Demand(queued=queued, running=running, **given)


def _slot(name: str = "s", *, free: bool = True, idle_ratio: float | None = 0.5) -> LeasableSlot:
    return LeasableSlot(slot=SlotId(name), agent="agent", free=free, idle_ratio=idle_ratio)


def _lease(name: str = "l", slot: str = "s", *, expires_s: float) -> Lease:
    return Lease(
        lease=LeaseId(name),
        slot=SlotId(slot),
        agent="agent",
        job=JOB,
        epoch=Epoch(1),
        expires_s=expires_s,
    )


def _policy(**config: Any) -> CapacityPolicy:
    return CapacityPolicy(CapacityConfig(**config))


def _kinds(effects: tuple[Any, ...]) -> list[type]:
    return [type(effect) for effect in effects]


def test_leases_every_free_slot_when_turns_exceed_the_dedicated_places() -> None:
    sample = CapacitySample(
        demands=(_demand(),),
        slots=(_slot("a", idle_ratio=0.2), _slot("b", idle_ratio=0.9), _slot("c", free=False)),
    )
    effects = _policy().observe(sample, now=0.0)
    assert [effect.slot for effect in effects] == ["b", "a"]
    assert all(isinstance(effect, TakeLease) for effect in effects)


def test_leases_the_slot_that_will_surely_be_idle_before_the_one_that_was() -> None:
    was_idle = LeasableSlot(
        slot=SlotId("a"), agent="agent", free=True, idle_ratio=0.9, forecast_ratio=0.1
    )
    will_be = LeasableSlot(
        slot=SlotId("b"), agent="agent", free=True, idle_ratio=0.2, forecast_ratio=0.7
    )
    unknown = LeasableSlot(slot=SlotId("c"), agent="agent", free=True, idle_ratio=0.5)
    sample = CapacitySample(demands=(_demand(),), slots=(was_idle, will_be, unknown))
    effects = _policy().observe(sample, now=0.0)
    assert [effect.slot for effect in effects] == ["b", "c", "a"]


def test_leases_nothing_while_the_dedicated_engines_suffice() -> None:
    sample = CapacitySample(demands=(_demand(queued=0, running=4),), slots=(_slot(),))
    assert _policy().observe(sample, now=0.0) == ()


def test_leases_nothing_for_a_job_that_does_not_harvest_or_is_not_active() -> None:
    for refused in ({"harvesting": False}, {"active": False}):
        sample = CapacitySample(demands=(_demand(**refused),), slots=(_slot(),))
        assert _policy().observe(sample, now=0.0) == ()


def test_asks_again_under_the_same_id_until_there_is_an_answer() -> None:
    policy = _policy(duration_s=10.0)
    sample = CapacitySample(demands=(_demand(),), slots=(_slot(),))
    (first,) = policy.observe(sample, now=0.0)
    (again,) = policy.observe(sample, now=1.0)
    assert first == again
    (late,) = policy.observe(sample, now=11.0)
    assert late.request_id != first.request_id


def test_a_refusal_is_respected_for_as_long_as_the_agent_says() -> None:
    policy = _policy()
    refused = SlotRefusal(slot=SlotId("s"), retry_after_s=5.0)
    sample = CapacitySample(demands=(_demand(),), slots=(_slot(),))
    (first,) = policy.observe(sample, now=0.0)
    with_refusal = CapacitySample(demands=(_demand(),), slots=(_slot(),), refusals=(refused,))
    assert policy.observe(with_refusal, now=1.0) == ()
    assert policy.observe(sample, now=5.9) == ()
    (second,) = policy.observe(sample, now=6.0)
    assert second.request_id != first.request_id


def test_renews_at_a_third_and_drops_a_margin_before_the_end() -> None:
    policy = _policy(duration_s=9.0, margin_s=1.0)
    sample = CapacitySample(demands=(_demand(),), leases=(_lease(expires_s=9.0),))
    assert policy.observe(sample, now=2.9) == ()
    assert _kinds(policy.observe(sample, now=3.0)) == [RenewLease]
    assert _kinds(policy.observe(sample, now=7.9)) == [RenewLease]
    assert _kinds(policy.observe(sample, now=8.0)) == [DropLease]


def test_gives_leases_back_after_a_quiet_time_longer_than_a_training_phase() -> None:
    policy = _policy(idle_release_s=5.0)
    lease = _lease(expires_s=1e9)
    busy = CapacitySample(demands=(_demand(),), leases=(lease,))
    idle = CapacitySample(demands=(_demand(queued=0, running=0),), leases=(lease,))
    assert policy.observe(busy, now=0.0) == ()
    assert policy.observe(idle, now=5.0) == ()
    assert _kinds(policy.observe(idle, now=5.1)) == [ReleaseLease]


def test_switching_harvesting_off_gives_every_lease_back_at_once() -> None:
    leases = (_lease("l1", "a", expires_s=1e9), _lease("l2", "b", expires_s=1e9))
    sample = CapacitySample(
        demands=(_demand(harvesting=False),), leases=leases, slots=(_slot("c"),)
    )
    effects = _policy().observe(sample, now=0.0)
    assert _kinds(effects) == [ReleaseLease, ReleaseLease]
    assert all(effect.reason == "harvesting is switched off" for effect in effects)


def test_one_slot_holds_one_lease() -> None:
    leases = (_lease("l1", expires_s=1e9), _lease("l2", expires_s=1e9))
    sample = CapacitySample(demands=(_demand(),), leases=leases, slots=(_slot(),))
    (released,) = _policy().observe(sample, now=0.0)
    assert (type(released), released.lease) == (ReleaseLease, "l2")


def test_a_restored_policy_decides_like_the_one_that_was_saved() -> None:
    policy, copy = _policy(), _policy()
    sample = CapacitySample(demands=(_demand(),), slots=(_slot(),))
    policy.observe(sample, now=0.0)
    copy.restore(policy.snapshot())
    for now in (1.0, 11.0, 12.0):
        assert copy.observe(sample, now=now) == policy.observe(sample, now=now)
