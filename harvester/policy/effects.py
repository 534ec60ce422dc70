"""What the slot policy wants done. Every effect says why, and whom it is for.

Nothing is done for the guest without its line in the journal; everything is done for production,
line or not.
"""

from typing import Self

import msgspec

from harvester.contracts.page.records import Grant, GrantMode
from harvester.contracts.process import ProcessId
from harvester.contracts.wire.leases import EndReason


class SlotEffect(msgspec.Struct, frozen=True, kw_only=True):
    def without_record(self, fault: str) -> Self:
        """What is done of it where no line can be written, for the reason given."""
        raise NotImplementedError


class ForProduction(SlotEffect, frozen=True, kw_only=True):
    """Protects production, and is done in any case."""

    def without_record(self, fault: str) -> Self:  # noqa: ARG002 - no fault takes it away
        return self


class WriteGrant(SlotEffect, frozen=True, kw_only=True, tag="write_grant"):
    """Publish this grant; it also stands for the beat, since an old one expires.

    Open it is for the guest, closed for production.
    """

    grant: Grant
    ttl_s: float
    reason: str

    def without_record(self, fault: str) -> Self:
        grant = msgspec.structs.replace(self.grant, mode=GrantMode.CLOSED, reason=fault)
        return msgspec.structs.replace(self, grant=grant, reason=fault)


class EndLease(ForProduction, frozen=True, kw_only=True, tag="end_lease"):
    lease: str
    """Its name."""
    reason: EndReason
    deadline_s: float = 0.0
    """How long running turns may still go on."""


class Quarantine(ForProduction, frozen=True, kw_only=True, tag="quarantine"):
    """Offer the slot no more until an operator has looked at it and released it."""

    reason: str


class LiftGuest(ForProduction, frozen=True, kw_only=True, tag="lift_guest"):
    """Out of its isolation backend: what production waits for must not wait behind production."""

    processes: tuple[ProcessId, ...]
    reason: str


class SettleGuest(ForProduction, frozen=True, kw_only=True, tag="settle_guest"):
    """Back under its isolation backend, where it was lifted out of it."""

    reason: str


class KillGuest(ForProduction, frozen=True, kw_only=True, tag="kill_guest"):
    """End its processes, so that their memory is production's."""

    processes: tuple[ProcessId, ...]
    reason: str


Effect = WriteGrant | EndLease | Quarantine | LiftGuest | SettleGuest | KillGuest
