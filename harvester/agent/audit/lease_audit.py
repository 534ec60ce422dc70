"""Audit events of the lease table's answers: leases with their holders, refusals with reasons.

A request and its answer are one event; a granted renewal gives no event. Refusals are bounded for
each caller, so that a noisy one hides no other's.
"""

from harvester.agent.audit.audit_log import AGENT, AuditLog
from harvester.agent.audit.slot_audit import lease_fields
from harvester.contracts.audit import AuditKind
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.wire.leases import (
    EndReason,
    LeaseEnded,
    LeaseRefused,
    LeaseRequest,
)
from harvester.policy.lease_table import SlotLease

_CALLERS = 8
_PER_S = 0.1
"""All callers together, noisy for ever, fill the audit's default bound in two weeks."""
_OTHERS = "other callers"
"""Callers beyond `_CALLERS`; their refusals are bounded together."""
_QUIET_S = 1 / _PER_S
_FORGOTTEN_S = 60.0 / _PER_S
"""A caller who was silent for so long has a whole burst again, as a new one has."""


class LeaseAudit:
    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._limits: dict[str, EventLimit] = {}

    def check(self, *, now: float) -> None:
        """Once a beat: what was left out of a caller who has fallen silent, as one event."""
        for who, limit in tuple(self._limits.items()):
            silent_s = now - (limit.at_s or 0.0)
            # The event is one of those that the caller may cause.
            if limit.omitted and silent_s >= _QUIET_S and limit.admits(now=now, again=True):
                self._log.note(AuditKind.REFUSALS_OMITTED, who=who, omitted=limit.taken())
            if silent_s >= _FORGOTTEN_S:
                del self._limits[who]

    def _limit(self, who: str) -> EventLimit:
        known = who in self._limits or len(self._limits) < _CALLERS
        return self._limits.setdefault(who if known else _OTHERS, EventLimit(per_s=_PER_S))

    def granted(self, lease: SlotLease, *, who: str, ttl_s: float) -> None:
        reason = f"for {ttl_s:g} s at a time"
        fields = lease_fields(lease)
        self._log.note(AuditKind.LEASE_GRANTED, slot=lease.slot, who=who, reason=reason, **fields)

    def refused(self, request: LeaseRequest, answer: LeaseRefused, *, who: str, now: float) -> None:
        limit = self._limit(who)
        if limit.admits(now=now):
            self._log.note(
                AuditKind.LEASE_REFUSED,
                slot=request.slot,
                tenant=request.tenant,
                job=request.job,
                who=who,
                reason=answer.reason,
                omitted=limit.taken(),
            )

    def renewal_refused(
        self, answer: LeaseEnded, held: SlotLease | None, *, who: str, now: float
    ) -> None:
        """`held` is the lease that the caller named, if it is in force. The answer of an unknown id
        has no name: a text that a caller made up is not repeated."""
        limit = self._limit(who)
        if not limit.admits(now=now):
            return
        fields = {} if held is None else {"slot": held.slot, **lease_fields(held)}
        if held is None and answer.reason is not EndReason.UNKNOWN:
            fields = {"lease": answer.lease.rpartition(".")[0]}
        self._log.note(
            AuditKind.RENEWAL_REFUSED,
            who=who,
            reason=answer.reason.value,
            omitted=limit.taken(),
            **fields,
        )

    def ended(self, lease: SlotLease, reason: EndReason, *, who: str, detail: str) -> None:
        """`detail` is the agent's own reason at that moment."""
        by_agent = reason not in (EndReason.RELEASED, EndReason.EXPIRED)
        self._log.note(
            AuditKind.LEASE_ENDED,
            slot=lease.slot,
            who=who if reason is EndReason.RELEASED else AGENT,
            reason=f"{reason}: {detail}" if by_agent and detail else reason.value,
            **lease_fields(lease),
        )
