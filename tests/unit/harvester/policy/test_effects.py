"""An effect's beneficiary decides its fate when no journal line can be written."""

from typing import get_args

import pytest

from harvester.contracts.ids import LeaseId
from harvester.contracts.page import Grant, GrantMode
from harvester.contracts.process import ProcessId
from harvester.contracts.wire.leases import EndReason
from harvester.policy.effects import (
    Effect,
    EndLease,
    KillGuest,
    LiftGuest,
    Quarantine,
    SettleGuest,
    WriteGrant,
)

PROCESSES = (ProcessId(pid=4, start_ticks=9),)
FOR_PRODUCTION = (
    EndLease(lease=LeaseId("l"), reason=EndReason.BUDGET),
    Quarantine(reason="why"),
    LiftGuest(processes=PROCESSES, reason="why"),
    SettleGuest(reason="why"),
    KillGuest(processes=PROCESSES, reason="why"),
)


def test_every_effect_is_for_production_or_the_one_that_gives() -> None:
    kinds = set(get_args(Effect))
    assert kinds == {WriteGrant, *(type(effect) for effect in FOR_PRODUCTION)}
    assert {kind for kind in kinds if "without_record" in vars(kind)} == {WriteGrant}


@pytest.mark.parametrize("effect", FOR_PRODUCTION, ids=lambda effect: type(effect).__name__)
def test_an_effect_that_protects_production_needs_no_journal_line(effect: Effect) -> None:
    assert effect.without_record("disk full") == effect


@pytest.mark.parametrize("mode", GrantMode)
def test_a_grant_without_a_line_is_closed_and_says_why(mode: GrantMode) -> None:
    effect = WriteGrant(grant=Grant(epoch=3, mode=mode), ttl_s=0.5, reason="")
    done = effect.without_record("disk full")
    assert (done.grant.mode, done.grant.reason, done.grant.epoch) == ("closed", "disk full", 3)
