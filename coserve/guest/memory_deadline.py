"""When a guest that holds more KV than its budget is ended by itself, and how.

The agent ends it at the deadline (harvester.policy.reclaim) and can say why. Here is what is left
where no agent can: it is gone, or the guest is in another pid namespace or another user's. The
engine loop may be what is stuck, so another thread asks.
"""

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from harvester.contracts.process import ProcessId, start_ticks

MARGIN_S = 1.0
"""Later than the agent, whose beats, and whose orderly end of a client of MPS, take less."""


@dataclass(slots=True)
class MemoryDeadline:
    _since_s: float | None = None

    def missed(
        self, *, usable_tokens: int, budget_tokens: int | None, deadline_s: float, now: float
    ) -> bool:
        """Whether more than the budget (None: there is none) has been held for too long."""
        if budget_tokens is None or usable_tokens <= budget_tokens:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now
        return now - self._since_s >= deadline_s + MARGIN_S


def end_guest(processes: Iterable[ProcessId]) -> None:
    """End the guest's processes as this one sees them, itself last. Does not return."""
    own = os.getpid()
    for process in processes:
        if process.pid != own and start_ticks(process.pid) == process.start_ticks:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except OSError:
                continue  # It has just gone; its memory with it.
    os.kill(own, signal.SIGKILL)
