"""Isolation backends by name, as configurations, guest pages and metrics have them."""

from enum import StrEnum


class IsolationBackend(StrEnum):
    """Bounds of the delay from a running guest step; `coserve.guest.isolation` describes each."""

    IDLE_GROUP = "idle-group"
    IDLE = "idle"
    TIME_SLICING = "time-slicing"
    MPS = "mps"
    NONE = "none"


PREEMPTING = frozenset({IsolationBackend.IDLE_GROUP, IsolationBackend.IDLE})
"""Backends under which production preempts a guest step. They rely on the kernel's priorities of
threads, which other processes may change: the guest checks them itself."""
