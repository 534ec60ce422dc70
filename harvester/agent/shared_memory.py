"""Memory that production and guest share: a control group's, or a GPU's, page by page."""

from contextlib import suppress
from pathlib import Path

from harvester.config import SlotConfig
from harvester.contracts.errors import Unsupported
from harvester.contracts.page.owners import PageOwners, trusted_uids
from harvester.platform.kv_segment import KvSegment
from harvester.policy.sample import KvReading, MemoryReading

_UNLIMITED = 1 << 60
_HIERARCHIES = (
    # Production is slowed at `memory.high`, long before it is ended at `memory.max`.
    ("memory.current", ("memory.max", "memory.high"), "inactive_file"),
    ("memory.usage_in_bytes", ("memory.limit_in_bytes",), "total_inactive_file"),
)


class SharedMemory:
    """`group` is the control group's directory, e.g. `/sys/fs/cgroup/serving.slice`, in either
    hierarchy of Linux. Page cache that the kernel would drop by itself does not count as used."""

    def __init__(self, group: Path) -> None:
        self._levels = (group, *group.parents)

    def read(self) -> MemoryReading:
        """Use and limit in bytes of the fullest of the group and its ancestors, whose limits bind
        it too; no limit if unreadable: unknown is not free."""
        found: list[MemoryReading] = []
        with suppress(OSError, ValueError):
            for level in self._levels:
                if (reading := _reading(level)) is None:
                    return max(found, key=lambda one: one.used_ratio, default=MemoryReading())
                found.append(reading)
        return MemoryReading()

    @property
    def note(self) -> str:
        """Why the group warns of no shortage, or always does; "" if it has a limit."""
        limit_bytes = self.read().limit_bytes
        if limit_bytes == 0:
            return f"memory_group {self._levels[0]} cannot be read: it counts as full"
        unlimited = "neither it nor a group above it has memory.max or memory.high"
        bound = limit_bytes < _UNLIMITED
        return "" if bound else f"memory_group {self._levels[0]} never counts as full: {unlimited}"


def _reading(group: Path) -> MemoryReading | None:
    """A group's memory; None above the highest group."""
    for used_name, limit_names, cache_name in _HIERARCHIES:
        try:
            used_bytes = int((group / used_name).read_text())
        except FileNotFoundError:
            continue
        limits = [_UNLIMITED]
        for name in limit_names:
            with suppress(FileNotFoundError):
                text = (group / name).read_text().strip()
                limits += [] if text == "max" else [int(text)]
        if min(limits) < _UNLIMITED:  # The kernel takes long to sum a large group's statistics up.
            used_bytes -= _field((group / "memory.stat").read_text(), cache_name)
        return MemoryReading(used_bytes=max(0, used_bytes), limit_bytes=min(limits))
    return None


def _field(text: str, name: str) -> int:
    return next((int(v) for k, v in map(str.split, text.splitlines()) if k == name), 0)


class SegmentPair:
    """The kvcached segments of both; `total_bytes` bounds them together on one GPU."""

    def __init__(
        self, production: tuple[KvSegment, ...], guest: KvSegment, *, total_bytes: int
    ) -> None:
        self._production, self._guest = production, guest
        self._total_bytes = total_bytes

    def read(self) -> MemoryReading:
        """KV mapped and its limit; no limit if a production segment is unreadable."""
        try:
            uses = [segment.read() for segment in self._production]
        except Unsupported:
            return MemoryReading()
        mapped = [use.mapped_bytes for use in uses if use is not None]
        if len(mapped) < len(uses):
            return MemoryReading()
        used_bytes = sum(mapped) + self.read_guest().mapped_bytes
        return MemoryReading(used_bytes=used_bytes, limit_bytes=self._total_bytes)

    def read_guest(self) -> KvReading:
        """KV bytes that the guest has mapped, and the limit that it has set itself."""
        try:
            use = self._guest.read()
        except Unsupported as error:
            return KvReading(fault=str(error))
        if use is None:
            return KvReading(fault="no segment")
        return KvReading(mapped_bytes=use.mapped_bytes, limit_bytes=use.limit_bytes)


def shared_memory_of(slot: SlotConfig, owners: PageOwners) -> SharedMemory | SegmentPair | None:
    """The memory that production and guest share by consent; None if they share none."""
    if slot.kvcached is not None:
        shared = slot.kvcached
        production, guest = trusted_uids(owners.production), trusted_uids(owners.guest)
        return SegmentPair(
            tuple(KvSegment(name, owners=production) for name in shared.production),
            KvSegment(shared.guest, owners=guest),
            total_bytes=shared.total_bytes,
        )
    return None if slot.memory_group is None else SharedMemory(slot.memory_group)
