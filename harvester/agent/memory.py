"""Memory of the control group that production and guest share: in use, and its limit.

Both hierarchies of Linux. Page cache that the kernel would drop by itself does not count as used.
"""

from pathlib import Path

from harvester.policy.sample import MemoryReading

_UNLIMITED = 1 << 60


class SharedMemory:
    """`group` is the control group's directory, e.g. `/sys/fs/cgroup/serving.slice`."""

    def __init__(self, group: Path) -> None:
        self._group = group

    def read(self) -> MemoryReading:
        """Use and limit of the group, in bytes. No limit if the files are unreadable: unknown is
        not free."""
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
