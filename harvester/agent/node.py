"""All slots of one node on one beat: the agent without its sockets."""

import logging
import secrets
from functools import partial

import msgspec

from harvester.agent.audit.audit_file import AuditFile
from harvester.agent.audit.audit_log import AGENT, AuditLog
from harvester.agent.audit.lease_audit import LeaseAudit
from harvester.agent.audit.stop_audit import StopAudit
from harvester.agent.interlock_watch import InterlockWatch
from harvester.agent.metrics import AgentMetrics
from harvester.agent.open_slots import OpenSlots, make_page_root
from harvester.agent.operator_files import LastRead, kill_switch_setter, read_kill_switch
from harvester.agent.reload import Reload, reload
from harvester.agent.slot_loop import Slot
from harvester.agent.state_lock import StateLock
from harvester.agent.stop_orders import StopRegistry
from harvester.config import AgentConfig
from harvester.contracts.audit import AuditKind
from harvester.contracts.clock import Clock, monotonic_ns
from harvester.contracts.event_limit import EventLimit
from harvester.contracts.ids import LeaseId, NodeId
from harvester.contracts.wire.leases import (
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
)
from harvester.contracts.wire.stops import Stop, StopOrder, StopReply, StopRequest
from harvester.policy.lease_table import LeaseTable
from harvester.policy.sample import KillSwitch
from harvester.policy.settings import SlotSettings
from harvester.policy.stop_table import binding

_log = logging.getLogger(__name__)

_SECRET_BYTES = 16
RELOADER = "operator, by SIGHUP"
_BEAT_S = SlotSettings().beat_s
_ORDERS_NS = 200_000_000
"""Age at which orders are read again before a slot's grant: with the grant's time to live an order
in a file closes every gate within 1 s, however long the agent was stopped between read and grant,
or earlier slots of the beat waited for their disk."""
_LATE_BEATS = 20
"""Beats without completion after which the loop counts as hung."""


class NodeAgent:
    def __init__(self, config: AgentConfig, *, clock: Clock, version: str) -> None:
        self.clock = clock
        self.metrics = AgentMetrics(version=version)
        self._kill_file = config.kill_switch
        started = clock.now()
        self.leases = LeaseTable(node=NodeId(config.node), ttl_s=config.lease_ttl_s)
        make_page_root(config)
        self._lock = StateLock(config.state_dir)
        file = AuditFile(
            config.audit_file, max_bytes=config.audit_max_bytes, max_days=config.audit_max_days
        )
        self.audit = AuditLog(file, node=config.node, clock=clock)
        self._lease_audit = LeaseAudit(self.audit)
        self._switched = KillSwitch.NONE
        self._last_read = LastRead[KillSwitch]()
        self.stops = StopRegistry(config)
        self._stop_audit = StopAudit(self.audit, self.stops.stops)
        self.interlocks = InterlockWatch(config, clock=clock)
        self.slots = OpenSlots(
            config,
            leases=self.leases,
            metrics=self.metrics,
            audit=self.audit,
            clock=clock,
            on_closed=partial(self._count_ended, detail="slot removed"),
            beat_if_due=self._beat_if_due,
        )
        self._noted: tuple[str, ...] = ()
        """Changes that the audit has noted last."""
        self._beat_at_s = started
        self.restart_needed: tuple[str, ...] = ()
        """Fields of the configuration file that await a restart."""
        self.refused: dict[str, str] = {}
        """Why a reload was refused, by its origin, until one is taken over."""
        self.slots_file_age_s = 0.0
        self.slots_file_absent = ""
        """Path of the configured slots file that has not been there yet."""
        self._audit_missing = 0
        self._early_beats = EventLimit(per_s=1.0)
        """Limit on the beats that orders to stop bring forward."""
        try:
            self.slots.open_all()
        except Exception:
            self._lock.close()
            raise
        modes = ", ".join(f"{slot.name} {slot.policy.settings.mode}" for slot in self.slots)
        self.audit.note(
            AuditKind.AGENT_STARTED, who=AGENT, reason=f"version {version}; modes: {modes}"
        )

    @property
    def beat_s(self) -> float:
        return min((slot.policy.settings.beat_s for slot in self.slots), default=_BEAT_S)

    def beat(self) -> None:
        """Raises NotYet where another agent has taken `state_dir` over."""
        self._lock.keep()
        now, read_ns = self.clock.now(), monotonic_ns()
        switch, stops = self._orders(now=now)
        for slot in self.slots:
            sampled_ns = monotonic_ns()
            if sampled_ns - read_ns > _ORDERS_NS:
                read_ns = sampled_ns
                switch, stops = self._orders(now=self.clock.now())
            # A slot that is about to be closed is drained until then.
            leaving = slot.name in self.slots.unopened
            self._beat_slot(slot, KillSwitch.DRAIN if leaving else switch, stops, sampled_ns)
        if switch is not self._switched:
            fault = self._last_read.fault
            self.audit.note(
                AuditKind.KILL_SWITCH,
                who=AGENT if fault else kill_switch_setter(self._kill_file),
                reason=fault or self._last_read.unclear,
                from_state=self._switched,
                to_state=switch,
            )
            self._switched = switch
        self._count_ended()
        self._lease_audit.check(now=now)
        self.audit.check(now=now)
        self._beat_at_s = now

    def _orders(self, *, now: float) -> tuple[KillSwitch, tuple[Stop, ...]]:
        switch = read_kill_switch(self._kill_file, self._last_read)
        self.stops.interlocks = self.interlocks.stops(self._evicted(), now=now)
        stops = self.stops.refresh(now=now)
        self._stop_audit.observe(stops, caller="", now=now)
        return switch, stops

    def _beat_slot(
        self, slot: Slot, switch: KillSwitch, stops: tuple[Stop, ...], sampled_ns: int
    ) -> None:
        """Beats one slot. If that raises, its grant ends at once, and other slots go on."""
        # Leases expire for each slot, behind its grant's stamp: an agent that was stopped anywhere
        # in the beat opens no gate under a lease that ended meanwhile.
        failed, now = slot.failed, self.clock.now()
        self.leases.expire(now=now)
        try:
            slot.beat(switch, stops, sampled_ns=sampled_ns, now=now)
        except Exception as error:
            fault = f"agent fault: {type(error).__name__}"
            slot.fail(fault, now=now)
            if failed != fault:
                _log.exception("slot %s: its beat failed; no grant until one succeeds", slot.name)
                slot.audit.fail(fault, now=now)
        else:
            if failed:
                _log.warning("slot %s: its beat succeeds again", slot.name)

    def take(self, request: LeaseRequest, *, who: str = "") -> LeaseGranted | LeaseRefused:
        """A lease is granted only once it is on disk for a restarted agent. `who` is the caller,
        for the audit."""
        now, before = self.clock.now(), {slot.name: slot.live_lease for slot in self.slots}
        answer = self._take(request, now=now)
        self._count_ended()
        if isinstance(answer, LeaseRefused):
            self._lease_audit.refused(request, answer, who=who, now=now)
            return answer
        lease = self.leases.live(answer.slot)
        if lease is not None and lease != before[lease.slot]:
            self._lease_audit.granted(lease, who=who, ttl_s=answer.duration_s)
            # The guest must know the epoch before the holder's first request carries it. A repeated
            # call gets no beat: each is a line in the journal.
            self.beat()
        return answer

    def _take(self, request: LeaseRequest, *, now: float) -> LeaseGranted | LeaseRefused:
        secret = secrets.token_hex(_SECRET_BYTES)
        # Checked here too: the slot's state dates from the last beat and knows no tenant.
        stop = binding(self.stops.stops, slot=request.slot, tenant=request.tenant)
        text, absent = "" if stop is None else stop.text, self.slots.unopened.get(request.slot, "")
        answer = self.leases.take(request, secret=secret, stop=text, absent=absent, now=now)
        if not isinstance(answer, LeaseGranted):
            return answer
        slot = self.slots.named(answer.slot)
        lease = self.leases.live(slot.name)
        try:
            if lease is not None:
                slot.lease_file.keep(lease)
        except OSError as error:
            _log.error(
                "slot %s: no lease, because it cannot be recorded: %s", slot.name, error.strerror
            )
            return self.leases.withdraw(answer, f"no record of a lease: {error.strerror}")
        return msgspec.structs.replace(answer, forecasts=slot.forecasts())

    def renew(
        self, lease: LeaseId, renewal: LeaseRenewal, *, who: str = ""
    ) -> LeaseGranted | LeaseEnded:
        now = self.clock.now()
        answer = self.leases.renew(lease, renewal, now=now)
        if isinstance(answer, LeaseEnded):
            leases = (slot.live_lease for slot in self.slots)
            held = next((one for one in leases if one is not None and one.lease == lease), None)
            self._lease_audit.renewal_refused(answer, held, who=who, now=now)
            return answer
        slot = self.slots.named(answer.slot)
        return msgspec.structs.replace(answer, forecasts=slot.forecasts())

    def release(self, lease: LeaseId, *, who: str = "") -> LeaseEnded:
        answer = self.leases.release(lease, now=self.clock.now())
        if self._count_ended(who=who):
            self.beat()
        return answer

    def _evicted(self) -> dict[str, int]:
        """Slots with more evictions an hour than may be, and how many may be."""
        return {
            slot.name: slot.policy.settings.evictions_per_hour_max
            for slot in self.slots
            if slot.policy.evictions.exceeded
        }

    def order(self, request: StopRequest, *, who: str = "") -> StopReply:
        """Place or lift an order; it is in force when this returns, or at the next beat after a
        flood of calls, which would fill the journal with beats. `who` is the caller, for the audit.
        Raises as `StopRegistry.order`, and Exhausted."""
        now = self.clock.now()
        leases = [lease for slot in self.slots if (lease := slot.live_lease) is not None]
        tenants = {*self.slots.config.tenants, *(lease.tenant for lease in leases)}
        reached = tuple(
            f"{lease.slot} ({lease.tenant}/{lease.job})"
            for lease in leases
            if request.slot in ("", lease.slot) and request.tenant in ("", lease.tenant)
        )
        reply = self.stops.order(request, now=now)
        lifts = request.order is StopOrder.NONE
        caller = ", ".join(filter(None, (request.by if lifts else "", who)))
        self._stop_audit.observe(self.stops.refresh(now=now), caller=caller, now=now)
        if self._early_beats.admits(now=now):
            self.beat()
        left, known = self.stops.stops, tuple(sorted(tenants))
        return msgspec.structs.replace(reply, reached=reached, tenants=known, left=left)

    def reconfigure(self, config: AgentConfig, *, who: str = RELOADER) -> Reload:
        """Apply the fields that a running agent can change; `restart_needed` lists the others.
        Removed slots are closed and new slots opened: `slots.unopened` has those that are not open
        yet; `slots.open_more` goes on."""
        done = reload(self.slots.config, config)
        found = {slot.name: slot for slot in done.config.slots}
        kept = [
            slot for slot in self.slots if slot.name in found and slot.name not in done.reopened
        ]
        policies = [slot.policy_with(done.config.settings_of(found[slot.name])) for slot in kept]
        modes = [slot.policy.settings.mode for slot in kept]
        # The calls below raise nothing: all slots are reconfigured, or none.
        self.restart_needed = done.restart_needed
        self.refused.pop(who, None)
        self.stops.configure(done.config)
        self.interlocks.configure(done.config)
        for slot, policy in zip(kept, policies, strict=True):
            slot.exposition.name_tenants(done.config.tenants)
            slot.reconfigure(
                found[slot.name], policy, restart_needed=done.restart_needed, now=self.clock.now()
            )
        self.slots.follow(done.config, reopened=done.reopened)
        if self.slots.waiting:
            self.beat()
        done = done.without(self.slots.failed)
        if who == RELOADER:  # A slots file hides no reload that was refused.
            self.metrics.gauge("config_last_reload_successful").set(not done.restart_needed)
        if who == RELOADER or (done.changes and done.changes != self._noted):
            self.audit.note(AuditKind.CONFIG_RELOADED, who=who, changes=done.changes)
        self._noted = done.changes
        for slot, old in zip(kept, modes, strict=True):
            mode = slot.policy.settings.mode
            if mode is not old:
                self.audit.note(
                    AuditKind.MODE_CHANGED, slot=slot.name, who=who, from_state=old, to_state=mode
                )
        return done

    def _beat_if_due(self) -> None:
        """Many slots may come and go at once, and the grants of the others must not expire."""
        if self.clock.now() - self._beat_at_s >= self.beat_s:
            self.beat()

    def refuse_configuration(self, reason: str, *, who: str = RELOADER) -> None:
        """Note that a reload was refused; the old configuration stays in force."""
        self.refused[who] = reason
        self.audit.note(AuditKind.CONFIG_REFUSED, who=who, reason=reason)

    def close(self) -> None:
        for slot in self.slots:
            slot.close(now=self.clock.now(), records=not self._lock.lost)
        if not self._lock.lost:
            # The audit opens its file again by path: there it is another agent's.
            self._count_ended(detail="agent stopped")
            self.audit.note(AuditKind.AGENT_STOPPED, who=AGENT)
        self.audit.close()
        self._lock.close()

    def late_s(self) -> float:
        return self.clock.now() - self._beat_at_s

    def alive(self) -> bool:
        return self.late_s() < _LATE_BEATS * self.beat_s

    @property
    def kill_file_fault(self) -> str:
        """Why the kill file drains although it does not say so; "" where it does, or is absent."""
        return self._last_read.fault or self._last_read.unclear

    def silent_slots(self) -> list[tuple[str, str]]:
        # A probe's answer needs no token: it has no paths.
        return [(slot.name, why) for slot in self.slots if (why := slot.unready)] + [
            (name, "not open, see status") for name in self.slots.failed
        ]

    def refresh_metrics(self) -> None:
        self.metrics.gauge("unsafe_experiments").set(self.slots.config.unsafe_experiments)
        self.metrics.gauge("config_restart_needed").set(len(self.restart_needed))
        missing, self._audit_missing = self._audit_missing, self.audit.missing_total
        self.metrics.counter("audit_missing_events").inc(self._audit_missing - missing)
        engaged = self._switched is not KillSwitch.NONE
        self.metrics.gauge("kill_switch_engaged", "node").set(engaged)
        self.metrics.stops(self.stops.stops)
        self.metrics.certificates()
        for interlock, known in self.interlocks.known().items():
            self.metrics.gauge("interlock_known", interlock).set(known)
        for slot in self.slots:
            slot.refresh_metrics()

    def _count_ended(self, *, who: str = AGENT, detail: str | None = None) -> bool:
        """Whether a lease has ended. `detail` says why, where it is not the policy's reason."""
        for lease, reason in (ended := self.leases.take_ended()):
            slot = self.slots.named(lease.slot)
            slot.exposition.ended(reason.value)
            why = (slot.failed or slot.policy.reason) if detail is None else detail
            self._lease_audit.ended(lease, reason, who=who, detail=why)
        return bool(ended)
