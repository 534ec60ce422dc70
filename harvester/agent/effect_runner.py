"""Carries out a slot policy's effects: on the grant page, the lease and the guest's processes."""

import logging

from harvester.agent.guest_processes import GuestProcesses
from harvester.agent.lease_file import LeaseFile
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.errors import NotYet
from harvester.contracts.ids import Epoch, SlotId
from harvester.contracts.page import Grant, GrantMode, KeptPage, PageDirectory, PageHeld
from harvester.policy.effects import (
    Effect,
    EndLease,
    KillGuest,
    LiftGuest,
    Quarantine,
    SettleGuest,
    WriteGrant,
)
from harvester.policy.lease_table import LeaseTable
from harvester.policy.sample import ActionOutcome, GuestAction

_log = logging.getLogger(__name__)

_MOST_EPOCH = 10**15


class EffectRunner:
    def __init__(
        self,
        slot: SlotId,
        *,
        grant_page: KeptPage[Grant],
        guest: GuestProcesses,
        lease_file: LeaseFile,
        leases: LeaseTable,
    ) -> None:
        self._slot = slot
        self._grant_page = grant_page
        self._guest = guest
        self._lease_file = lease_file
        self._leases = leases

    def run(self, effect: Effect, *, sampled_ns: int, keeps_page: bool, now: float) -> None:
        """`keeps_page`: look first whether the grant page is still in its directory."""
        match effect:
            case WriteGrant():
                ttl_ns = int(effect.ttl_s * 1e9)
                if keeps_page:
                    self._grant_page.keep()
                # Counted from the sample: an agent that is stopped between the two, or waits for
                # its disk, would else open the gate for data as old as the stop.
                self._grant_page.write(effect.grant, now_ns=sampled_ns, ttl_ns=ttl_ns)
            case EndLease():
                self._end_lease(effect, now)
            case LiftGuest():
                self._guest.lift(effect.processes)
            case SettleGuest():
                self._guest.settle()
            case KillGuest():
                _log.error("slot %s: ending the guest: %s", self._slot, effect.reason)
                self._guest.kill(effect.processes)
            case Quarantine():
                _log.error("slot %s is quarantined: %s", self._slot, effect.reason)

    def write_closed(self, reason: str) -> None:
        """Leave a grant that is closed and already expired."""
        epoch = self._leases.view(self._slot).epoch
        grant = Grant(epoch=epoch, mode=GrantMode.CLOSED, reason=reason)
        self._grant_page.write(grant, now_ns=monotonic_ns(), ttl_ns=0)

    def outcomes(self) -> tuple[ActionOutcome, ...]:
        """Outcomes of earlier effects on the guest that became known since the last call."""
        outcomes = self._guest.outcomes()
        for outcome in outcomes:
            if outcome.fault:
                message = "slot %s: %s of the guest failed: %s"
                _log.error(message, self._slot, outcome.action, outcome.fault)
            elif outcome.action is GuestAction.KILL:
                _log.warning("slot %s: the guest has ended", self._slot)
        return outcomes

    def _end_lease(self, effect: EndLease, now: float) -> None:
        lease = self._leases.live(self._slot)
        if lease is None or lease.name != effect.lease:
            return
        self._leases.end(lease.lease, effect.reason, deadline_s=effect.deadline_s, now=now)
        # At once: the lease stays ended even if the agent is killed before its next beat.
        self._lease_file.follow(self._leases.live(self._slot))


def reserved_grant_page(directory: PageDirectory) -> KeptPage[Grant]:
    """The grant page with its writer lock held: two agents on one page would undo each other's
    closing. Raises NotYet while another agent holds it."""
    page = directory.grant_page()
    try:
        page.reserve()
    except PageHeld as error:
        raise NotYet(
            f"another agent runs on pages {page.path.parent}: {error}; stop it first"
        ) from error
    return page


def epoch_left(directory: PageDirectory) -> Epoch:
    """The highest epoch on the grant and guest pages, 0 if none. A guest's epoch counts only up to
    `_MOST_EPOCH`, which no agent reaches: a grant above the wire's integers could not be written.
    """
    grant = directory.grant_reader().read_left().record
    guest = directory.guest_reader().read_left().record
    epoch = guest.epoch if guest is not None and guest.epoch <= _MOST_EPOCH else 0
    return Epoch(max(0, grant.epoch if grant else 0, epoch))
