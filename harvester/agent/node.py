"""All slots of one node on one beat: the agent without its sockets."""

import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from harvester.agent.audit.audit_file import AuditFile
from harvester.agent.audit.audit_log import AGENT, AuditLog
from harvester.agent.audit.lease_audit import LeaseAudit
from harvester.agent.audit.stop_audit import StopAudit
from harvester.agent.exposition import SlotExposition
from harvester.agent.interlock_watch import InterlockWatch
from harvester.agent.metrics import AgentMetrics
from harvester.agent.operator_files import LastRead, kill_switch_setter, read_kill_switch
from harvester.agent.reload import Reload, reload
from harvester.agent.slot_loop import Slot
from harvester.agent.state_lock import lock_state
from harvester.agent.stop_orders import StopRegistry
from harvester.config import AgentConfig, SlotConfig
from harvester.contracts.audit import AuditKind
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import LeaseId, NodeId, SlotId
from harvester.contracts.page.directory import LAUNCH_DIRECTORY, make_directory
from harvester.contracts.wire.leases import (
    EndReason,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotState,
)
from harvester.contracts.wire.stops import Stop, StopOrder, StopReply, StopRequest
from harvester.policy.lease_table import LeaseTable
from harvester.policy.sample import KillSwitch
from harvester.policy.settings import SlotSettings
from harvester.policy.stop_table import binding

_log = logging.getLogger(__name__)

_SECRET_BYTES = 16
RELOADER = "operator, by SIGHUP"
_OPENING_S = 1.0
"""Time for slots that come and go at once: a tenth of the unit's watchdog."""
_WAITS = "waits for its turn"
_BEAT_S = SlotSettings().beat_s
_LATE_BEATS = 20
"""Beats without completion after which the loop counts as hung."""


class NodeAgent:
    def __init__(self, config: AgentConfig, *, clock: Clock, version: str) -> None:
        self.clock = clock
        self.metrics = AgentMetrics(version=version)
        self._config, self._kill_file = config, config.kill_switch
        started = clock.now()
        self.leases = LeaseTable(
            node=NodeId(config.node),
            ttl_s=config.lease_ttl_s,
        )
        _make_root(config)
        self._lock = lock_state(config.state_dir)
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
        self.slots = tuple[Slot, ...]()
        self.unopened: dict[str, str] = {}
        """Why a slot of the configuration is not open yet, or one that is gone not closed."""
        self._target = config
        self._reopening: frozenset[str] = frozenset()
        self._noted: tuple[str, ...] = ()
        """Changes that the audit has noted last."""
        self._faults: dict[SlotId, str] = {}
        """Fault text of each slot whose last beat raised."""
        self._beat_at_s = started
        self.restart_needed: tuple[str, ...] = ()
        """Fields of the configuration file that await a restart."""
        self.refused: dict[str, str] = {}
        """Why a reload was refused, by its origin, until one is taken over."""
        self.slots_file_age_s = 0.0
        self._audit_missing = 0
        self._open_all(config)
        modes = ", ".join(f"{slot.name} {slot.policy.settings.mode}" for slot in self.slots)
        self.audit.note(
            AuditKind.AGENT_STARTED, who=AGENT, reason=f"version {version}; modes: {modes}"
        )

    def _open_all(self, config: AgentConfig) -> None:
        """Raises the first slot's fault where no slot can be opened."""
        faults = [self._open(config, each, {}) for each in config.slots]
        if not self.slots and faults and faults[0]:
            self._lock.close()
            raise faults[0]
        self._config = config.model_copy(update={"slots": self._open_slots})

    def _open(
        self, config: AgentConfig, slot: SlotConfig, known: Mapping[str, str]
    ) -> Exception | None:
        """Open a slot, or say why not, in the log too where that is not `known`: a slot that cannot
        be opened harms no other."""
        try:
            _make_root(config)
            self.slots += (self._slot(config, slot, self.clock.now()),)
        except Exception as error:
            self.unopened[slot.name] = str(error)
            if str(error) != known.get(slot.name):
                _log.error("slot %s cannot be opened; the agent tries again: %s", slot.name, error)
            self._forget(SlotId(slot.name))
            return error
        return None

    def _slot(self, config: AgentConfig, slot: SlotConfig, now: float) -> Slot:
        exposition = SlotExposition(slot.name, self.metrics, tenants=config.tenants)
        try:
            return Slot(
                config, slot, leases=self.leases, exposition=exposition, audit=self.audit, now=now
            )
        except OSError as error:
            raise ConfigError(
                f"slot {slot.name}: cannot use {error.filename}: {error.strerror}; "
                "check pages, page_root and state_dir"
            ) from error

    @property
    def beat_s(self) -> float:
        return min((slot.policy.settings.beat_s for slot in self.slots), default=_BEAT_S)

    def beat(self) -> None:
        now = self.clock.now()
        switch = read_kill_switch(self._kill_file, self._last_read)
        self.stops.interlocks = self.interlocks.stops(self._evicted(), now=now)
        stops = self.stops.refresh(now=now)
        self._stop_audit.observe(stops, caller="", now=now)
        self.leases.expire(now=now)
        for slot in self.slots:
            # One that waits to be closed is drained meanwhile.
            leaving = slot.name in self.unopened
            self._beat_slot(slot, KillSwitch.DRAIN if leaving else switch, stops, now)
        if switch is not self._switched:
            fault = self._last_read.fault
            self.audit.note(
                AuditKind.KILL_SWITCH,
                who=AGENT if fault else kill_switch_setter(self._kill_file),
                reason=fault,
                from_state=self._switched,
                to_state=switch,
            )
            self._switched = switch
        self._count_ended()
        self.audit.check(now=now)
        self._beat_at_s = now

    def _beat_slot(
        self, slot: Slot, switch: KillSwitch, stops: tuple[Stop, ...], now: float
    ) -> None:
        """If it raises, the slot's grant is over at once; other slots go on."""
        try:
            slot.beat(switch, stops, now=now)
        except Exception as error:
            fault = f"agent fault: {type(error).__name__}"
            with suppress(Exception):  # The slot's page may be at fault; the grant then expires.
                slot.shut(fault)
            if self._faults.get(slot.name) != fault:
                _log.exception("slot %s: its beat failed; no grant until one succeeds", slot.name)
                slot.audit.fail(fault, now=now)
            self._faults[slot.name] = fault
            self.leases.offer(slot.name, SlotState.OFF, fault)
        else:
            if self._faults.pop(slot.name, None) is not None:
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
        # The guest must know the epoch before the holder's first request carries it.
        self.beat()
        return answer

    def _take(self, request: LeaseRequest, *, now: float) -> LeaseGranted | LeaseRefused:
        secret = secrets.token_hex(_SECRET_BYTES)
        # Checked here too: the slot's state dates from the last beat and knows no tenant.
        stop = binding(self.stops.stops, slot=request.slot, tenant=request.tenant)
        text, absent = "" if stop is None else stop.text, self.unopened.get(request.slot, "")
        answer = self.leases.take(request, secret=secret, stop=text, absent=absent, now=now)
        if not isinstance(answer, LeaseGranted):
            return answer
        slot = next(slot for slot in self.slots if slot.name == answer.slot)
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
        slot = next(slot for slot in self.slots if slot.name == answer.slot)
        return msgspec.structs.replace(answer, forecasts=slot.forecasts())

    def release(self, lease: LeaseId, *, who: str = "") -> LeaseEnded:
        answer = self.leases.release(lease, now=self.clock.now())
        self._count_ended(who=who)
        if answer.reason is not EndReason.UNKNOWN:
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
        """Place or lift an order; it is in force when this returns. `who` is the caller, for the
        audit. Raises as `StopRegistry.order`, and Exhausted."""
        now = self.clock.now()
        reply = self.stops.order(request, now=now)
        lifts = request.order is StopOrder.NONE
        caller = ", ".join(filter(None, (request.by if lifts else "", who)))
        self._stop_audit.observe(self.stops.refresh(now=now), caller=caller, now=now)
        self.beat()
        return reply

    def reconfigure(self, config: AgentConfig, *, who: str = RELOADER) -> Reload:
        """Apply the fields that a running agent can change; `restart_needed` lists the others.
        Removed slots are closed and new slots opened: `unopened` has the slots that are not open
        yet; `open_more` goes on."""
        done = reload(self._config, config)
        self._target = done.config
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
                found[slot.name],
                policy,
                restart_needed=done.restart_needed,
                now=self.clock.now(),
            )
        self._reopening = done.reopened
        self.open_more()
        if self.waiting:
            self.beat()
        done = done.without(name for name, why in self.unopened.items() if why != _WAITS)
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

    def open_more(self) -> None:
        """Close slots that left the configuration, and open slots that do not run yet, for about a
        second."""
        began_s, target = self.clock.now(), self._target
        before, self.unopened = self.unopened, {}
        found = {slot.name: slot for slot in target.slots}
        for slot in self.slots:
            if slot.name not in found or slot.name in self._reopening:
                if self.clock.now() - began_s > _OPENING_S:
                    self.unopened[slot.name] = _WAITS
                else:
                    self._remove(slot)
        self._reopening &= {slot.name for slot in self.slots}
        running = {slot.name for slot in self.slots}
        for name, each in found.items():
            if name in running:
                continue
            if self.clock.now() - began_s > _OPENING_S:
                self.unopened[name] = _WAITS
                continue
            self._open(target, each, before)
            self._beat_if_due()
        order = {name: number for number, name in enumerate(found)}
        self.slots = tuple(sorted(self.slots, key=lambda slot: order.get(slot.name, -1)))
        self._config = target.model_copy(update={"slots": self._open_slots})

    @property
    def _open_slots(self) -> tuple[SlotConfig, ...]:
        return tuple(slot.config for slot in self.slots)

    @property
    def waiting(self) -> bool:
        """Whether a slot waits for `open_more` without a fault."""
        return _WAITS in self.unopened.values()

    def _remove(self, slot: Slot) -> None:
        """End lease and grant of a slot that is configured no more, and forget it."""
        if not slot.saved(now=self.clock.now()):
            # The slot lends nothing meanwhile; without its state a quarantine would be forgotten.
            self.unopened[slot.name] = f"not closed before its state is on disk: {slot.fault}"
            return
        try:
            slot.close(now=self.clock.now(), wait=False)
        except Exception:  # The slot's page may be at fault; the grant then expires.
            _log.exception("slot %s: closing it failed", slot.name)
        self._count_ended(detail="slot removed")
        self.slots = tuple(each for each in self.slots if each is not slot)
        self._forget(slot.name)
        self._beat_if_due()

    def _forget(self, slot: SlotId) -> None:
        self.leases.remove_slot(slot)
        self.metrics.forget_slot(slot)
        self._faults.pop(slot, None)

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
            slot.close(now=self.clock.now())
        self._count_ended(detail="agent stopped")
        self.audit.note(AuditKind.AGENT_STOPPED, who=AGENT)
        self.audit.close()
        self._lock.close()

    def late_s(self) -> float:
        return self.clock.now() - self._beat_at_s

    def alive(self) -> bool:
        return self.late_s() < _LATE_BEATS * self.beat_s

    def silent_slots(self) -> list[tuple[str, str]]:
        # A probe's answer needs no token: it has no paths.
        return [
            (slot.name, self._faults.get(slot.name, slot.unready))
            for slot in self.slots
            if slot.name in self._faults or slot.unready
        ] + [(name, "not open, see status") for name, why in self.unopened.items() if why != _WAITS]

    def refresh_metrics(self) -> None:
        self.metrics.gauge("unsafe_experiments").set(self._config.unsafe_experiments)
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

    def _count_ended(self, *, who: str = AGENT, detail: str | None = None) -> None:
        """`detail` says why, where it is not the policy's reason."""
        for lease, reason in self.leases.news():
            slot = next(slot for slot in self.slots if slot.name == lease.slot)
            slot.exposition.ended(reason.value)
            why = slot.policy.reason if detail is None else detail
            self._lease_audit.ended(lease, reason, who=who, detail=why)


def _make_root(config: AgentConfig) -> None:
    """Make the directory of kill switch and slots. Raises ConfigError if another user owns it."""
    root = config.page_root
    if config.slots_file is None and all(slot.pages for slot in config.slots) and not root.exists():
        return
    own = frozenset((os.geteuid(),))
    try:
        make_directory(root, owners=own, group=None)
        if config.page_gid is not None:
            # Guests of all slots wait there for their turn on a GPU.
            make_directory(root / LAUNCH_DIRECTORY, owners=own, group=config.page_gid)
    except OSError as error:
        raise ConfigError(f"cannot make page_root {root}: {error.strerror}") from error
