"""The node's audit: each event goes into its file and, as the same JSON, into the agent's log.

Nothing waits for it and nothing stops for it: events that a full disk refuses are counted, logged
once and stated by the first event that is written again.
"""

import logging
from typing import Any

import msgspec

from harvester.agent.audit.audit_file import AuditFile
from harvester.contracts.audit import SCHEMA, AuditEvent, AuditKind
from harvester.contracts.clock import Clock, wall_time_utc
from harvester.contracts.journal import TAKEN

_log = logging.getLogger("harvester.audit")

AGENT = "agent"
"""`who` of the agent's own decisions."""
_RETRY_S = 1.0
_MAX_REASON = 1000
_MAX_CHANGES = 100
_WARNINGS = frozenset(
    {
        *(AuditKind.KILL_SWITCH, AuditKind.CONFIG_REFUSED, AuditKind.QUARANTINED),
        *(AuditKind.GUEST_KILLED, AuditKind.AUDIT_RESUMED),
        *(AuditKind.STOP_PLACED, AuditKind.STOP_LIFTED),
    }
)


class AuditLog:
    def __init__(self, file: AuditFile, *, node: str, clock: Clock) -> None:
        self._file = file
        self._node = node
        self._clock = clock
        self._retry_at_s = 0.0
        self._missing = 0
        self.fault = ""
        """Why events cannot be written."""
        self.missing_total = 0
        """Events missing in the file."""

    def note(self, kind: AuditKind, **fields: Any) -> None:
        """Record an event with these fields of an `AuditEvent`."""
        event = self._event(kind, fields)
        level = logging.WARNING if kind in _WARNINGS else logging.INFO
        if _log.isEnabledFor(level):
            _log.log(level, "%s", msgspec.json.encode(event).decode())
        self._notice()
        if not self._resumed() or not self._written(event):
            self._missing += 1
            self.missing_total += 1

    def check(self, *, now: float) -> None:
        """Once a beat: each second another try where one is due, and whether the file is there."""
        if now >= self._retry_at_s:
            self._retry_at_s = now + _RETRY_S
            self._notice()
            self._resumed()

    def close(self) -> None:
        self._file.close()

    def _event(self, kind: AuditKind, fields: dict[str, Any]) -> AuditEvent:
        fields["reason"] = _encodable(fields.get("reason", "")[:_MAX_REASON])
        fields["who"] = _encodable(fields.get("who", ""))
        fields["changes"] = tuple(map(_encodable, fields.get("changes", ())[:_MAX_CHANGES]))
        return AuditEvent(
            schema=SCHEMA,
            time=wall_time_utc(),
            t_s=self._clock.now(),
            node=self._node,
            event=kind,
            **fields,
        )

    def _notice(self) -> None:
        """A file that is gone counts as one event: the number of its events is not known."""
        if not self._missing and not self._file.in_place:
            self._file.close()
            self._missing, self.fault = 1, TAKEN
            self.missing_total += 1
            _log.error("the audit was %s", TAKEN)

    def _resumed(self) -> bool:
        """Whether events can be written again; first writes the count of missing events."""
        if not self._missing:
            return True
        fields = {"omitted": self._missing, "reason": self.fault, "who": AGENT}
        event = self._event(AuditKind.AUDIT_RESUMED, fields)
        if not self._written(event):
            return False
        _log.warning("%s", msgspec.json.encode(event).decode())
        self._missing, self.fault = 0, ""
        return True

    def _written(self, event: AuditEvent) -> bool:
        try:
            self._file.append(event)
        except OSError as error:
            self._retry_at_s = self._clock.now() + _RETRY_S
            if not self.fault:
                _log.error("audit events cannot be written: %s", error.strerror or error)
            self.fault = error.strerror or str(error)
            return False
        return True


def _encodable(text: str) -> str:
    """Half a surrogate pair, which a file's name may have, would raise in the beat."""
    return text.encode(errors="replace").decode()
