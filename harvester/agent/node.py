"""All slots of one node on one beat: the agent without its sockets."""

import logging
import os
import secrets

from harvester.agent.exposition import SlotExposition
from harvester.agent.interlock_watch import InterlockWatch
from harvester.agent.metrics import AgentMetrics
from harvester.agent.operator_files import read_kill_switch
from harvester.agent.reload import Reload, reload
from harvester.agent.slot_loop import Slot
from harvester.agent.stop_orders import StopOrders
from harvester.config import AgentConfig, SlotConfig
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import NodeId, SlotId
from harvester.contracts.page.directory import LAUNCH_DIRECTORY, make_directory
from harvester.contracts.wire.leases import LeaseGranted, LeaseRefused, LeaseRequest, SlotState
from harvester.contracts.wire.stops import Stop, StopReply, StopRequest
from harvester.policy.lease_table import LeaseTable
from harvester.policy.sample import KillSwitch
from harvester.policy.states import Condition
from harvester.policy.stop_table import binding

_log = logging.getLogger(__name__)

_SECRET_BYTES = 16
_LATE_BEATS = 20
"""Beats without completion after which the loop counts as hung."""


class NodeAgent:
    def __init__(self, config: AgentConfig, *, clock: Clock, version: str) -> None:
        self.clock = clock
        self.metrics = AgentMetrics(version=version)
        self._config = config
        started = clock.now()
        self.leases = LeaseTable(
            node=NodeId(config.node),
            ttl_s=config.lease_ttl_s,
        )
        _make_root(config)
        self._switched = KillSwitch.NONE
        self.stops = StopOrders(config)
        self.interlocks = InterlockWatch(config, clock=clock)
        self.slots = tuple(self._slot(config, slot, started) for slot in config.slots)
        self._faults: dict[SlotId, str] = {}
        """Fault text of each slot whose last beat raised."""
        self._beat_at_s = started
        self.restart_needed: tuple[str, ...] = ()
        """Fields of the configuration file that await a restart."""
        self._export_configuration()

    def _slot(self, config: AgentConfig, slot: SlotConfig, now: float) -> Slot:
        exposition = SlotExposition(slot.name, self.metrics, tenants=config.tenants)
        try:
            return Slot(config, slot, leases=self.leases, exposition=exposition, now=now)
        except OSError as error:
            raise ConfigError(
                f"slot {slot.name}: cannot use {error.filename}: {error.strerror}; "
                "check pages, page_root and state_dir"
            ) from error

    @property
    def beat_s(self) -> float:
        return min(slot.policy.settings.beat_s for slot in self.slots)

    def beat(self) -> None:
        now = self.clock.now()
        switch = read_kill_switch(self._config.kill_switch)
        if switch is not self._switched:
            _log.warning("kill switch: %s", switch)
            self._switched = switch
        self.metrics.gauge("kill_switch_engaged", "node").set(switch is not KillSwitch.NONE)
        self.stops.interlocks = self.interlocks.stops(self._evicted(), now=now)
        stops = self.stops.look(now=now)
        for slot in self.slots:
            self._beat_slot(slot, switch, stops, now)
        self._count_ended()
        self._beat_at_s = now

    def _beat_slot(
        self, slot: Slot, switch: KillSwitch, stops: tuple[Stop, ...], now: float
    ) -> None:
        """If it raises, the slot's grant is not written and expires; other slots go on."""
        try:
            slot.beat(switch, stops, now=now)
        except Exception as error:
            fault = f"agent fault: {type(error).__name__}"
            if self._faults.get(slot.name) != fault:
                _log.exception("slot %s: no grant while this lasts", slot.name)
            self._faults[slot.name] = fault
            self.leases.offer(slot.name, SlotState.OFF, fault)
        else:
            if self._faults.pop(slot.name, None) is not None:
                _log.warning("slot %s: the agent decides again", slot.name)

    def take(self, request: LeaseRequest) -> LeaseGranted | LeaseRefused:
        """A lease is granted only once it is on disk for a restarted agent."""
        secret = secrets.token_hex(_SECRET_BYTES)
        # Asked here too: the slot's state is as of the last beat, and knows no tenant.
        stop = binding(self.stops.stops, slot=request.slot, tenant=request.tenant)
        answer = self.leases.take(
            request, secret=secret, stop="" if stop is None else stop.text, now=self.clock.now()
        )
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
        # The guest must know the epoch before the holder's first request carries it.
        self.beat()
        return answer

    def _evicted(self) -> dict[str, int]:
        """Slots with more evictions an hour than may be, and how many may be."""
        return {
            slot.name: slot.policy.settings.evictions_per_hour_max
            for slot in self.slots
            if slot.policy.evictions.exceeded
        }

    def order(self, request: StopRequest) -> StopReply:
        """Place or lift an order; it is in force when this returns. Raises as `StopOrders.order`,
        and Exhausted."""
        reply = self.stops.order(request, now=self.clock.now())
        self.beat()
        return reply

    def reconfigure(self, config: AgentConfig) -> Reload:
        """Apply the fields that a running agent can change; `restart_needed` lists the others."""
        done = reload(self._config, config)
        slots = tuple(zip(self.slots, done.config.slots, strict=True))
        policies = [slot.policy_with(done.config.settings_of(new)) for slot, new in slots]
        # Nothing below raises: all slots are reconfigured, or none.
        self._config, self.restart_needed = done.config, done.restart_needed
        self.stops.configure(done.config)
        for (slot, new), policy in zip(slots, policies, strict=True):
            slot.exposition.name_tenants(done.config.tenants)
            slot.reconfigure(new, policy, restart_needed=done.restart_needed)
        self._export_configuration()
        return done

    def _export_configuration(self) -> None:
        self.metrics.gauge("unsafe_experiments").set(self._config.unsafe_experiments)
        self.metrics.gauge("config_restart_needed").set(len(self.restart_needed))
        self.metrics.gauge("config_last_reload_successful").set(not self.restart_needed)

    def close(self) -> None:
        for slot in self.slots:
            slot.close(now=self.clock.now())
        self._count_ended()

    def late_s(self) -> float:
        return self.clock.now() - self._beat_at_s

    def alive(self) -> bool:
        return self.late_s() < _LATE_BEATS * self.beat_s

    def silent_slots(self) -> list[tuple[str, str]]:
        return [
            (slot.name, self._faults.get(slot.name, slot.policy.reason))
            for slot in self.slots
            if slot.name in self._faults or slot.policy.condition is Condition.SILENT
        ]

    def refresh_metrics(self) -> None:
        self.metrics.stops(self.stops.stops)
        for interlock, known in self.interlocks.known().items():
            self.metrics.gauge("interlock_known", interlock).set(known)
        for slot in self.slots:
            slot.exposition.refresh(slot.policy, slot.sensor.seen_ns)

    def _count_ended(self) -> None:
        slots = {slot.name: slot for slot in self.slots}
        for name, reason in self.leases.news():
            slots[name].exposition.ended(reason.value)


def _make_root(config: AgentConfig) -> None:
    """Make the directory of kill switch and slots. Raises ConfigError if another user owns it."""
    root = config.page_root
    if all(slot.pages is not None for slot in config.slots) and not root.exists():
        return
    own = frozenset((os.geteuid(),))
    try:
        make_directory(root, owners=own, group=None)
        if config.page_gid is not None:
            # Guests of all slots wait there for their turn on a GPU.
            make_directory(root / LAUNCH_DIRECTORY, owners=own, group=config.page_gid)
    except OSError as error:
        raise ConfigError(f"cannot make page_root {root}: {error.strerror}") from error
