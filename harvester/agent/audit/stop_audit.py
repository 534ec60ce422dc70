"""Audit events of orders to stop, with the caller; apart as orders are the node's, not a slot's."""

from collections.abc import Iterable, Sequence

import msgspec

from harvester.agent.audit.audit_log import AuditLog
from harvester.contracts.audit import AuditKind
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.wire.stops import Stop, StopSource

_CALLED = frozenset({StopSource.OPERATOR, StopSource.CLUSTER})
"""Sources of orders that are calls: their audit events name the caller."""


class StopAudit:
    """Notes orders to stop that came into force, and orders that were lifted, with the caller."""

    def __init__(self, log: AuditLog, stops: Sequence[Stop]) -> None:
        """`stops`: orders in force at the agent's start, which its last run has noted."""
        self._log = log
        self._stops = _unnumbered(stop for stop in stops if stop.source in _CALLED)
        self._limits = {source: EventLimit() for source in StopSource}
        """An alert may flap, and a gateway may stop many tenants: that hides no operator's call."""

    def observe(self, stops: Sequence[Stop], *, caller: str, now: float) -> None:
        """`stops`: orders in force. `caller`: origin of the call that changed them, if any."""
        if not stops and not self._stops:
            return
        before, self._stops = self._stops, _unnumbered(stops)
        # Where one takes another's place, the last line is the one in force.
        for kind, changed in (
            (AuditKind.STOP_LIFTED, before - self._stops),
            (AuditKind.STOP_PLACED, self._stops - before),
        ):
            for stop in sorted(changed, key=lambda stop: (stop.source, stop.slot, stop.tenant)):
                self._note(kind, stop, caller if stop.source in _CALLED else "", now)

    def _note(self, kind: AuditKind, stop: Stop, caller: str, now: float) -> None:
        limit = self._limits[stop.source]
        if not limit.admits(now=now):
            return
        ordered = stop.by if kind is AuditKind.STOP_PLACED else ""
        self._log.note(
            kind,
            slot=stop.slot,
            tenant=stop.tenant,
            who=", ".join(filter(None, (ordered, caller))) or stop.source,
            reason=f"{stop.order} ({stop.source}): {stop.reason or 'no reason given'}",
            omitted=limit.taken(),
        )


def _unnumbered(stops: Iterable[Stop]) -> frozenset[Stop]:
    """The stops without their numbers, which rise while an order stays."""
    return frozenset(msgspec.structs.replace(stop, number=0) for stop in stops)
