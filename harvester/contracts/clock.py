"""The only place that reads a clock.

Policies take `now` as an argument; shells hold a `Clock` and pass what it says.
`CLOCK_MONOTONIC` is one clock for all processes of a machine, so its nanoseconds may be compared
between the agent, the production engine and the guest.
"""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC."""

    def now(self) -> float:
        return time.monotonic()


def monotonic_ns() -> int:
    """CLOCK_MONOTONIC in nanoseconds, the stamp of every shared-memory page."""
    return time.monotonic_ns()


def wall_time_utc() -> str:
    """ISO 8601 wall time for people; no decision uses it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def wall_seconds() -> float:
    """Seconds since the epoch, for a forecast's time of day and a file's age, and nothing else."""
    return time.time()


def monotonic_origin() -> str:
    """Names what `now` counts from: times of another origin do not compare. Empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
