"""Grants that expire although the agent lives, under the limits of the shipped systemd unit.

Each one closes a gate for nothing. The agent runs in a control group with the unit's `CPUQuota` and
`MemoryMax`, beside whatever else the machine does; its page is read every 5 ms.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.agent.agent_child import clock, wait_for
from benchmarks.agent.cost import harvesting
from benchmarks.agent.evidence import GrantLog, GrantSeen
from harvester.contracts.errors import Unsupported

UNIT = Path("deploy/systemd/rosemux-agent.service")
_CGROUPS = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_DAY_S = 86_400.0
_WINDOW_S = 280.0
"""One lease's time."""


def shipped_limits(unit: str) -> tuple[float, int]:
    """Share of a core, and bytes of memory."""
    quota, memory = (
        re.search(r"^CPUQuota=(\d+)%$", unit, re.M),
        re.search(r"^MemoryMax=(\d+)M$", unit, re.M),
    )
    assert quota is not None
    assert memory is not None
    return int(quota[1]) / 100, int(memory[1]) << 20


@contextmanager
def limited(pid: int, *, share: float, memory_bytes: int) -> Iterator[None]:
    """A process under these limits, in control groups of version 2 or 1. Raises Unsupported."""
    name, quota = f"rosemux-benchmark-{pid}", round(share * _PERIOD_US)
    if (_CGROUPS / "cgroup.controllers").exists():
        limits = {
            _CGROUPS / name: {"cpu.max": f"{quota} {_PERIOD_US}", "memory.max": str(memory_bytes)}
        }
    else:
        limits = {
            _CGROUPS / "cpu" / name: {
                "cpu.cfs_period_us": str(_PERIOD_US),
                "cpu.cfs_quota_us": str(quota),
            },
            _CGROUPS / "memory" / name: {"memory.limit_in_bytes": str(memory_bytes)},
        }
    try:
        try:
            for group, values in limits.items():
                group.mkdir()
                for file, value in values.items():
                    (group / file).write_text(value)
                (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise Unsupported(f"control groups cannot be made here: {error}") from error
        yield
    finally:
        for group in limits:
            with suppress(OSError):
                (group.parent / "cgroup.procs").write_text(str(pid))
            with suppress(OSError):
                group.rmdir()


def expiries(*, window_s: float) -> dict[str, Any]:
    """Count of a measured time, and the rate with its exact Poisson interval (95 %)."""
    share, memory_bytes = shipped_limits(UNIT.read_text())
    found, ages_s, lasted_s, load = 0, [0.0], 0.0, os.getloadavg()[0]
    while lasted_s < window_s:
        with TemporaryDirectory(dir="/dev/shm") as directory:
            root = Path(directory)
            (root / "pages").mkdir()
            with (
                harvesting(root, 1) as agent,
                limited(agent.pid, share=share, memory_bytes=memory_bytes),
            ):
                log, begin_s = GrantLog([root / "pages" / "slot0"], every_s=5e-3), clock.now()
                part_s = min(_WINDOW_S, window_s - lasted_s)
                wait_for(lambda: False, seconds=part_s, every_s=1.0)
                lasted_s += clock.now() - begin_s
                log.stop()
        found += expired(log.grants)
        ages_s += [after.seen_s - before.stamp_s for before, after in pairwise(log.grants)]
    low, high = poisson_interval(found)
    per_day = _DAY_S / lasted_s
    return {
        "count": found,
        "window_s": round(lasted_s),
        "per_day": round(found * per_day, 1),
        "per_day_interval": [round(low * per_day, 1), round(high * per_day, 1)],
        "oldest_grant_ms": round(max(ages_s) * 1e3),
        "cpu_quota": share,
        "load_average": load,
    }


def expired(grants: list[GrantSeen]) -> int:
    """Grants that had expired when the next one was written."""
    return sum(after.stamp_s > before.expires_s for before, after in pairwise(grants))


def poisson_interval(count: int, *, coverage: float = 0.95) -> tuple[float, float]:
    """Exact interval of the mean of a Poisson count (Garwood, 1936)."""
    from scipy.stats import chi2

    tail = (1 - coverage) / 2
    low = float(chi2.ppf(tail, 2 * count)) / 2 if count else 0.0
    return low, float(chi2.ppf(1 - tail, 2 * count + 2)) / 2
