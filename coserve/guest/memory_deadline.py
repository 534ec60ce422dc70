"""The guest's own deadline for KV above its budget, and how it ends itself.

Normally the agent ends it at the deadline (harvester.policy.reclaim) and records the reason. This
is the fallback if no agent can: it is gone, or the guest is in another pid namespace or another
user's. The engine loop may be the stuck part, so another thread asks.
"""

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from harvester.contracts.process import ProcessId, start_ticks

MARGIN_S = 1.0
"""Margin over the agent, whose beats and orderly end of an MPS client take less."""


@dataclass(slots=True)
class MemoryDeadline:
    _since_s: float | None = None

    def missed(
        self, *, usable_tokens: int, budget_tokens: int | None, deadline_s: float, now: float
    ) -> bool:
        """Whether the guest has held more than the budget (None: no limit) for too long."""
        if budget_tokens is None or usable_tokens <= budget_tokens:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now
        return now - self._since_s >= deadline_s + MARGIN_S


def end_guest(processes: Iterable[ProcessId]) -> None:
    """Kill the guest's visible processes, this one last. Does not return."""
    own = os.getpid()
    for process in processes:
        if process.pid != own and start_ticks(process.pid) == process.start_ticks:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except OSError:
                continue  # The process has just ended, and its memory with it.
    os.kill(own, signal.SIGKILL)
