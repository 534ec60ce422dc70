"""A slot's audit events, from its beats: changes of its state, its quarantine and its guest."""

from harvester.agent.audit.audit_log import AGENT, AuditLog
from harvester.contracts.audit import AuditKind
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.process import ProcessId
from harvester.policy.effects import Effect, KillGuest
from harvester.policy.lease_table import SlotLease
from harvester.policy.sample import GuestAction, SlotSample
from harvester.policy.slot import SlotPolicy
from harvester.policy.states import Condition, State

_OPERATOR = "operator, by the release file"
_FAULT = "fault"
"""State of a slot for which the agent cannot decide."""
_PASSING = frozenset({Condition.WITHHELD, Condition.COOLING})
"""Conditions that end by themselves and say less than the one before them."""
_LASTING_S = 10.0
"""Time after which another condition of the same state is noted: a slot that fell silent and has
been overspent since would else seem silent for hours. Flapping conditions last less."""


class SlotAudit:
    def __init__(self, slot: str, log: AuditLog, policy: SlotPolicy) -> None:
        self._slot = slot
        self._log = log
        self._state = policy.state.value
        self._noted: Condition | None = None
        """Condition of the last event about the state; None before the first one."""
        self._condition: Condition | None = None
        """Condition of the last beat, which began at `_since_s`."""
        self._since_s = 0.0
        self._quarantine = ""
        self._guest: tuple[ProcessId, ...] | None = None
        """Processes of the present guest; None without a guest."""
        self._ended: tuple[ProcessId, ...] = ()
        self._kill_reason = ""
        self._limit = EventLimit()
        self._tried: set[object] = set()
        """Events of this beat, also events that were left out and come again in the next beat."""
        self._tried_before: set[object] = set()

    def observe(
        self,
        sample: SlotSample,
        effects: tuple[Effect, ...],
        policy: SlotPolicy,
        lease: SlotLease | None,
        *,
        now: float,
    ) -> None:
        """Note what this beat has changed. Called at every beat, so it is cheap."""
        self._tried_before, self._tried = self._tried, set()
        if policy.condition is not self._condition:
            self._condition, self._since_s = policy.condition, now
        if self._has_news(policy, now):
            self._note_condition(policy, lease, now)
        if policy.quarantined != self._quarantine:
            self._note_quarantine(policy.quarantined, sample.release)
        for effect in effects:
            if isinstance(effect, KillGuest):
                self._kill_reason = effect.reason
        self._note_guest(sample, policy, now)
        for outcome in sample.outcomes:
            if outcome.action is GuestAction.KILL and self._limit.admits(now=now):
                result = f"failed: {outcome.fault}" if outcome.fault else "ended"
                reason = f"{self._kill_reason}; {result}; {_pids(outcome.processes)}"
                self._note(AuditKind.GUEST_KILLED, reason=reason, omitted=self._limit.taken())

    def fail(self, reason: str, *, now: float) -> None:
        """The agent's own fault keeps the slot closed."""
        self._move(_FAULT, reason, None, now)

    def _has_news(self, policy: SlotPolicy, now: float) -> bool:
        """Whether the state is another one, or its condition another one that lasts."""
        # A withheld slice is random, and ends within two minutes: the audit leaves it out.
        if policy.state != self._state:
            return policy.condition is not Condition.WITHHELD
        if policy.condition is self._noted or policy.condition in _PASSING:
            return False
        return now - self._since_s >= _LASTING_S

    def _note_condition(self, policy: SlotPolicy, lease: SlotLease | None, now: float) -> None:
        reason = policy.reason
        if (policy.state, policy.condition) == (State.CLOSED, Condition.CLEAR):
            reason = "closed for one beat before it may open"
        text = f"{policy.condition}: {reason}" if reason else policy.condition
        if self._move(policy.state.value, text, lease, now):
            self._noted = policy.condition

    def _move(self, state: str, reason: str, lease: SlotLease | None, now: float) -> bool:
        """Whether the event was admitted."""
        if not self._admits(state, now):
            return False
        held = {} if lease is None else lease_fields(lease)
        self._note(
            AuditKind.SLOT_STATE,
            from_state=self._state,
            to_state=state,
            reason=reason,
            omitted=self._limit.taken(),
            **held,
        )
        self._state = state
        return True

    def _note_quarantine(self, reason: str, release: str) -> None:
        if release and self._quarantine:
            self._note(AuditKind.QUARANTINE_RELEASED, who=_OPERATOR, reason=release)
        if reason:
            self._note(AuditKind.QUARANTINED, reason=reason)
        self._quarantine = reason

    def _note_guest(self, sample: SlotSample, policy: SlotPolicy, now: float) -> None:
        record = sample.guest.record
        if record is not None and not record.leaving:
            if record.processes != self._guest:
                self._note_processes(record.processes, now)
        elif self._guest is not None:
            stopped = record is not None
            away = policy.guest.away(now=now) and not sample.guest.runs_below_production
            if stopped or away:
                reason = "stopped on purpose" if stopped else f"its page is {sample.guest.fault}"
                self._end_guest(reason, now)

    def _note_processes(self, processes: tuple[ProcessId, ...], now: float) -> None:
        """Notes a new guest if no process of the former one is left, else its processes now."""
        if self._guest and not set(self._guest) & set(processes):
            self._end_guest("another guest writes its page", now)
        if self._guest is None and self._admits(processes, now):
            again = "its page is back; " if processes and processes == self._ended else ""
            reason = f"{again}{_pids(processes)}"
            self._note(AuditKind.GUEST_STARTED, reason=reason, omitted=self._limit.taken())
            self._guest = processes
        elif self._guest is not None:
            self._guest = processes

    def _end_guest(self, reason: str, now: float) -> None:
        if self._guest is None or not self._admits(reason, now):
            return
        reason = f"{reason}; {_pids(self._guest)}"
        self._note(AuditKind.GUEST_ENDED, reason=reason, omitted=self._limit.taken())
        self._ended, self._guest = self._guest, None

    def _admits(self, event: object, now: float) -> bool:
        self._tried.add(event)
        return self._limit.admits(now=now, again=event in self._tried_before)

    def _note(self, kind: AuditKind, **fields: object) -> None:
        self._log.note(kind, slot=self._slot, **{"who": AGENT, **fields})


def lease_fields(lease: SlotLease) -> dict[str, object]:
    """The fields of an event that name a lease: never its id, which is the holder's secret."""
    return {
        "lease": lease.name,
        "epoch": lease.epoch,
        "tenant": lease.tenant,
        "job": lease.job,
    }


def _pids(processes: tuple[ProcessId, ...]) -> str:
    pids = ", ".join(dict.fromkeys(str(process.pid) for process in processes))
    return f"processes {pids}" if pids else "it names no process"
