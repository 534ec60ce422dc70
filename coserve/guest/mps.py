"""A guest's share of a GPU under NVIDIA's Multi-Process Service: consent level `mps`.

Production and guest are then clients of one server and run at the same time. What that costs, and
why it is never chosen by itself:

    shared fate   a fault of one client ends the server and every client of it
    one user      clients of another user than the server's wait until it is gone
    no lifting    share and priority are read when a client starts; they cannot change later
    no signals    a client that is killed in the middle of a kernel may leave the server undefined

A share of the GPU bounds its multiprocessors, not its memory bandwidth.
"""

from dataclasses import dataclass, field

from harvester.contracts.errors import ConfigError
from harvester.platform.mps import (
    PIPE_VARIABLE,
    PRIORITY_VARIABLE,
    THREADS_VARIABLE,
    MpsControl,
)

_NORMAL, _BELOW_NORMAL = "0", "1"


@dataclass(frozen=True, slots=True)
class MpsShare:
    control: MpsControl = field(default_factory=MpsControl)
    active_thread_percentage: float = 100.0
    """Most of the GPU's multiprocessors that the guest may use, above 0 to 100."""
    below_normal: bool = True
    """Production's kernels go first where both wait."""
    blocking_ratio: float = 1.0
    """No other ratio has been measured on a GPU yet: configure your own measurement."""

    def __post_init__(self) -> None:
        if not 0 < self.active_thread_percentage <= 100:
            raise ConfigError("mps: active_thread_percentage must be above 0 and at most 100")
        if not 0 <= self.blocking_ratio <= 1:
            raise ConfigError("mps: blocking_ratio must lie between 0 and 1")

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        return (
            (PIPE_VARIABLE, str(self.control.pipe_directory)),
            (THREADS_VARIABLE, f"{self.active_thread_percentage:g}"),
            (PRIORITY_VARIABLE, _BELOW_NORMAL if self.below_normal else _NORMAL),
        )
