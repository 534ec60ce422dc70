"""Memory that production and guest share: a control group's, or a GPU's, page by page."""

from pathlib import Path

from harvester.contracts.errors import Unsupported
from harvester.platform.kv_segment import KvSegment
from harvester.policy.sample import KvReading, MemoryReading

_UNLIMITED = 1 << 60


class SharedMemory:
    """`group` is the control group's directory, e.g. `/sys/fs/cgroup/serving.slice`, in either
    hierarchy of Linux. Page cache that the kernel would drop by itself does not count as used."""

    def __init__(self, group: Path) -> None:
        self._group = group

    def read(self) -> MemoryReading:
        """Use and limit in bytes; no limit if unreadable: unknown is not free."""
        for used_name, limit_name, cache_name in (
            ("memory.current", "memory.max", "inactive_file"),
            ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
        ):
            try:
                used = int((self._group / used_name).read_text())
                limit = (self._group / limit_name).read_text().strip()
                cache = _field((self._group / "memory.stat").read_text(), cache_name)
            except (OSError, ValueError):
                continue
            limit_bytes = _UNLIMITED if limit == "max" else min(int(limit), _UNLIMITED)
            return MemoryReading(used_bytes=max(0, used - cache), limit_bytes=limit_bytes)
        return MemoryReading()


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
