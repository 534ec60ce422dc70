"""What the slot policy wants done. Every effect says why."""

import msgspec

from harvester.contracts.page.records import Grant
from harvester.contracts.process import ProcessId
from harvester.contracts.wire.leases import EndReason


class WriteGrant(msgspec.Struct, frozen=True, kw_only=True, tag="write_grant"):
    """Publish this grant; it also stands for the beat, since an old one expires."""

    grant: Grant
    ttl_s: float
    reason: str


class EndLease(msgspec.Struct, frozen=True, kw_only=True, tag="end_lease"):
    lease: str
    """Its name."""
    reason: EndReason
    deadline_s: float = 0.0
    """How long running turns may still go on."""


class Quarantine(msgspec.Struct, frozen=True, kw_only=True, tag="quarantine"):
    """Offer the slot no more until an operator has looked at it and restarted the agent."""

    reason: str


class LiftGuest(msgspec.Struct, frozen=True, kw_only=True, tag="lift_guest"):
    """Out of its isolation backend: what production waits for must not wait behind production."""

    processes: tuple[ProcessId, ...]
    reason: str


class SettleGuest(msgspec.Struct, frozen=True, kw_only=True, tag="settle_guest"):
    """Back under its isolation backend, where it was lifted out of it."""

    reason: str


class KillGuest(msgspec.Struct, frozen=True, kw_only=True, tag="kill_guest"):
    """End its processes, so that their memory is production's."""

    processes: tuple[ProcessId, ...]
    reason: str


Effect = WriteGrant | EndLease | Quarantine | LiftGuest | SettleGuest | KillGuest
