"""Input of the slot policy at every beat: raw facts with no verdict in them."""

from enum import StrEnum

import msgspec

from harvester.contracts.ids import Epoch
from harvester.contracts.page import Guest, PageFault, Pulse, engine_of, pulse_page
from harvester.contracts.process import ProcessId
from harvester.contracts.wire.error_budget import Allotment
from harvester.contracts.wire.stops import Stop

MAX_PULSES = 32
"""Largest number of pulses: their names fit into the grant page."""
FOREIGN_PULSE = "pulse.foreign.0"
"""Stands for pulses that are too many to be believed."""
SCRAPED_PULSE = "pulse.metrics.0"
"""Written by the agent itself from production's metrics page: seconds old, without arrivals."""

_GONE = frozenset((PageFault.EXPIRED, PageFault.MISSING))


class KillSwitch(StrEnum):
    NONE = "none"
    HOLD = "hold"
    """No grant and no new lease; leases stay, so that harvesting can resume."""
    DRAIN = "drain"
    """Like `hold`, and leases end."""


class PulseReading(msgspec.Struct, frozen=True, kw_only=True):
    """An expected pulse: its record, or the fault in its place."""

    name: str
    record: Pulse | None = None
    fault: PageFault | None = None


class GuestReading(msgspec.Struct, frozen=True, kw_only=True):
    record: Guest | None = None
    fault: PageFault | None = None
    runs_below_production: bool = msgspec.field(default=False, name="lives_below")
    """Whether a process of a guest without a record still runs, in the idle class or an idle
    control group, and so ranks below production wherever they share cores."""
    lives: bool = False
    """Whether a process that the last record named, or that starts the guest, still runs although
    there is no record."""


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """The slot's entry in the lease table."""

    epoch: Epoch
    lease: str | None = None
    """Name of the lease. The lease's id is the holder's secret and is never journaled."""
    ending: bool = False
    tenant: str = ""
    job: str = ""
    allotment: Allotment | None = None
    """The slot's part of its service's error budget, in force while the lease is."""


NO_LEASE = LeaseView(epoch=Epoch(0))


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the control group that production and guest share. A limit of 0 was not read."""

    used_bytes: int = 0
    limit_bytes: int = 0

    @property
    def used_ratio(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes > 0 else 1.0


class KvReading(msgspec.Struct, frozen=True, kw_only=True):
    """KV of a guest that shares a GPU's pages with production: bytes mapped and their limit."""

    mapped_bytes: int = 0
    limit_bytes: int = 0
    fault: str = ""
    """Why the segment cannot be read."""

    @property
    def over_bytes(self) -> int:
        return 0 if self.fault else max(0, self.mapped_bytes - self.limit_bytes)


class MpsReading(msgspec.Struct, frozen=True, kw_only=True):
    """Last report of the daemon of NVIDIA's Multi-Process Service."""

    clients: tuple[tuple[int, ...], ...] = ()
    """Process ids per server."""
    server_fault: bool = False
    """Whether a client's fault took a server down."""
    fault: str = ""
    """Why the daemon cannot be read."""

    def shared_by(self, guest: tuple[ProcessId, ...]) -> bool:
        """Whether the guest runs on a server that another process uses too."""
        pids = {process.pid for process in guest}
        return any(pids & set(group) and set(group) - pids for group in self.clients)


class GuestAction(StrEnum):
    """An action of the agent on a guest's processes."""

    LIFT = "lift"
    SETTLE = "settle"
    KILL = "kill"


class ActionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an earlier beat's effect on the guest's processes."""

    action: GuestAction
    processes: tuple[ProcessId, ...] = ()
    """Processes that the effect was applied to; for a kill, the processes that have ended."""
    fault: str = ""
    """Why it failed, wholly or for some processes."""


class SlotSample(msgspec.Struct, frozen=True, kw_only=True, tag="slot"):
    pulses: tuple[PulseReading, ...]
    """One reading for each expected name, in order of names. An empty tuple is a fault."""
    guest: GuestReading
    lease: LeaseView
    kill_switch: KillSwitch = KillSwitch.NONE
    stop: Stop | None = None
    """The strongest order that binds the slot and the tenant of its lease."""
    memory: MemoryReading | None = None
    """The shared control group's memory; None if neither a group nor KV is shared."""
    mps: MpsReading | None = None
    """State of MPS; None without the operator's consent to it."""
    guest_kv: KvReading | None = None
    """The guest's shared KV; None if its KV is not shared."""
    outcomes: tuple[ActionOutcome, ...] = ()
    """Outcomes that became known since the last beat."""
    record_fault: str = ""
    """Why the journal or the state file cannot be written."""
    release: str = ""
    """An operator's reason to lift the quarantine; "" without a request."""


def expected(
    present: tuple[PulseReading, ...],
    configured: frozenset[str] = frozenset(),
    ended: frozenset[str] = frozenset(),
) -> tuple[PulseReading, ...]:
    """Pulses that must be present: present ones, siblings that they announce, and the configured.

    Each pulse says how many API servers its engine has. An announced server that never showed
    itself is missing, not idle; a page beyond the announced number is a leftover. A configured list
    adds to that: it never hides an engine that runs or hangs beside the listed ones, but the pages
    `ended`, whose engines are known to run no more, are leftovers too. Both in the order of names.
    """
    processes: dict[str, int] = {}
    for reading in present:
        if reading.record is not None:
            engine = engine_of(reading.name)
            processes[engine] = max(processes.get(engine, 0), reading.record.processes)
    if sum(processes.values()) > MAX_PULSES:
        return (PulseReading(name=FOREIGN_PULSE, fault=PageFault.FOREIGN),)
    named = {pulse_page(engine, at) for engine, most in processes.items() for at in range(most)}
    faults = [reading.fault for reading in present]
    if _GONE.isdisjoint(faults) and named.issubset([reading.name for reading in present]):
        return present
    kept = {
        reading.name: reading
        for reading in present
        if reading.name in named
        or reading.name in configured
        or reading.fault not in _GONE
        or not (processes.get(engine_of(reading.name)) or (configured and _left(reading, ended)))
    }
    for name in named - kept.keys():
        kept[name] = PulseReading(name=name, fault=PageFault.MISSING)
    return tuple(kept[name] for name in sorted(kept))


def _left(reading: PulseReading, ended: frozenset[str]) -> bool:
    return reading.fault is PageFault.MISSING or reading.name in ended
