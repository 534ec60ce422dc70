"""Isolation backends by name, as configurations, guest pages and metrics have them."""

from enum import StrEnum


class IsolationBackend(StrEnum):
    """Bounds of the delay from a running guest step; `coserve.guest.isolation` describes each."""

    IDLE_GROUP = "idle-group"
    IDLE = "idle"
    TIME_SLICING = "time-slicing"
    MPS = "mps"
    NONE = "none"


IDLE_GROUP_PREEMPTION_S, PREEMPTION_S = 1e-4, 5e-4
"""Cost of a running guest step to production that preempts it, however short the step: in an idle
group, where `benchmarks.preemption` finds 0.01 ms in the mean and less than 0.1 ms at P99; and
elsewhere, where nothing is measured or idle threads have turns of their own."""

PREEMPTING = frozenset({IsolationBackend.IDLE_GROUP, IsolationBackend.IDLE})
"""Backends under which production preempts a guest step. They rely on the kernel's priorities of
threads, which other processes may change: the guest checks them itself."""
