"""Audit events of the lease table's answers: leases with their holders, refusals with reasons.

A request and its answer are one event; a granted renewal gives no event.
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


class LeaseAudit:
    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._refused = EventLimit()

    def granted(self, lease: SlotLease, *, who: str, ttl_s: float) -> None:
        reason = f"for {ttl_s:g} s at a time"
        fields = lease_fields(lease)
        self._log.note(AuditKind.LEASE_GRANTED, slot=lease.slot, who=who, reason=reason, **fields)

    def refused(self, request: LeaseRequest, answer: LeaseRefused, *, who: str, now: float) -> None:
        if self._refused.admits(now=now):
            self._log.note(
                AuditKind.LEASE_REFUSED,
                slot=request.slot,
                tenant=request.tenant,
                job=request.job,
                who=who,
                reason=answer.reason,
                omitted=self._refused.taken(),
            )

    def renewal_refused(
        self, answer: LeaseEnded, held: SlotLease | None, *, who: str, now: float
    ) -> None:
        """`held` is the lease that the caller named, if it is in force. The answer of an unknown id
        has no name: a text that a caller made up is not repeated."""
        if not self._refused.admits(now=now):
            return
        fields = {} if held is None else {"slot": held.slot, **lease_fields(held)}
        if held is None and answer.reason is not EndReason.UNKNOWN:
            fields = {"lease": answer.lease.rpartition(".")[0]}
        self._log.note(
            AuditKind.RENEWAL_REFUSED,
            who=who,
            reason=answer.reason.value,
            omitted=self._refused.taken(),
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
