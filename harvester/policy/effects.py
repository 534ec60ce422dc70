"""Effects that the slot policy requests, each with its reason.

A grant serves the guest and is open only with its line in the journal; every other effect protects
production and is applied in any case.
"""

from typing import Self

import msgspec

from harvester.contracts.page.records import Grant, GrantMode
from harvester.contracts.process import ProcessId
from harvester.contracts.wire.leases import EndReason


class SlotEffect(msgspec.Struct, frozen=True, kw_only=True):
    def without_record(self, fault: str) -> Self:  # noqa: ARG002 - no fault takes protection away
        """The effect to apply if its journal line cannot be written; `fault` says why."""
        return self


class WriteGrant(SlotEffect, frozen=True, kw_only=True, tag="write_grant"):
    """Publish this grant; written every beat, since an old one expires."""

    grant: Grant
    ttl_s: float
    reason: str

    def without_record(self, fault: str) -> Self:
        grant = msgspec.structs.replace(self.grant, mode=GrantMode.CLOSED, reason=fault)
        return msgspec.structs.replace(self, grant=grant, reason=fault)


class EndLease(SlotEffect, frozen=True, kw_only=True, tag="end_lease"):
    lease: str
    """Name of the lease."""
    reason: EndReason
    deadline_s: float = 0.0
    """Seconds for which running turns may go on."""


class Quarantine(SlotEffect, frozen=True, kw_only=True, tag="quarantine"):
    """Offer the slot no more until an operator has looked at it and released it."""

    reason: str


class LiftGuest(SlotEffect, frozen=True, kw_only=True, tag="lift_guest"):
    """Move the guest out of its isolation: what production waits for must not wait behind it."""

    processes: tuple[ProcessId, ...]
    reason: str


class SettleGuest(SlotEffect, frozen=True, kw_only=True, tag="settle_guest"):
    """Move a lifted guest back under its isolation backend."""

    reason: str


class KillGuest(SlotEffect, frozen=True, kw_only=True, tag="kill_guest"):
    """End its processes, so that their memory is production's."""

    processes: tuple[ProcessId, ...]
    reason: str


Effect = WriteGrant | EndLease | Quarantine | LiftGuest | SettleGuest | KillGuest
