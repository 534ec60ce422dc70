"""What the slot policy is told at every beat: raw facts with no verdict in them."""

from enum import StrEnum

import msgspec

from harvester.contracts.ids import Epoch
from harvester.contracts.page.records import Guest, Pulse
from harvester.contracts.page.seal import PageFault
from harvester.contracts.process import ProcessId


class KillSwitch(StrEnum):
    NONE = "none"
    HOLD = "hold"
    """No grant and no new lease; leases stay, so that harvesting can go on where it stopped."""
    DRAIN = "drain"
    """As hold, and leases end."""


class PulseReading(msgspec.Struct, frozen=True, kw_only=True):
    """An expected pulse: its record, or the fault that stands in its place."""

    name: str
    record: Pulse | None = None
    fault: PageFault | None = None


class GuestReading(msgspec.Struct, frozen=True, kw_only=True):
    record: Guest | None = None
    fault: PageFault | None = None
    lives_below: bool = False
    """Without a record: whether a process that the last one named is there, and in the idle class
    or an idle control group: below production wherever they share cores."""


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """What the lease book says about the slot."""

    epoch: Epoch
    lease: str | None = None
    """Its name. Its id is the holder's secret and stands in no journal."""
    ending: bool = False
    tenant: str = ""
    job: str = ""


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """Of the control group that production and guest share. No limit is no reading."""

    used_bytes: int = 0
    limit_bytes: int = 0

    @property
    def used_ratio(self) -> float:
        return self.used_bytes / self.limit_bytes if self.limit_bytes > 0 else 1.0


class KvReading(msgspec.Struct, frozen=True, kw_only=True):
    """Of a guest that shares a GPU's pages with production: what it maps, beside its own limit."""

    mapped_bytes: int = 0
    limit_bytes: int = 0
    fault: str = ""
    """Why there is nothing to read."""

    @property
    def over_bytes(self) -> int:
        return 0 if self.fault else max(0, self.mapped_bytes - self.limit_bytes)


class MpsReading(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon of NVIDIA's Multi-Process Service said last."""

    clients: tuple[tuple[int, ...], ...] = ()
    """Process ids, server by server."""
    server_fault: bool = False
    """A server was taken by a fault of one of its clients."""
    fault: str = ""
    """Why there is nothing to read."""

    def shared_by(self, guest: tuple[ProcessId, ...]) -> bool:
        """Whether the guest runs on a server, and somebody else on the same one."""
        pids = {process.pid for process in guest}
        return any(pids & set(group) and set(group) - pids for group in self.clients)


class GuestAction(StrEnum):
    """What the agent does to a guest's processes."""

    LIFT = "lift"
    SETTLE = "settle"
    KILL = "kill"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an effect of an earlier beat on the guest's processes."""

    action: GuestAction
    processes: tuple[ProcessId, ...] = ()
    """To which it was done: of a kill, those that have ended."""
    fault: str = ""
    """Why it was not done, or not to all of them."""


class SlotSample(msgspec.Struct, frozen=True, kw_only=True, tag="slot"):
    pulses: tuple[PulseReading, ...]
    """One for each expected name, in the order of names. None expected is itself a fault."""
    guest: GuestReading
    lease: LeaseView
    kill_switch: KillSwitch = KillSwitch.NONE
    memory: MemoryReading | None = None
    """None where no group and no KV is shared."""
    mps: MpsReading | None = None
    """None without an operator's consent to it."""
    guest_kv: KvReading | None = None
    """None where the guest's KV is its own."""
    outcomes: tuple[Outcome, ...] = ()
    """Known since the last beat."""
    record_fault: str = ""
    """Why the journal or the state file cannot be written."""
    release: str = ""
    """An operator's reason to lift the quarantine; "" is nobody asks for it."""
