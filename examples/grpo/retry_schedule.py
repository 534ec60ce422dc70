"""Waits before repeated requests to the gateway, and the end of the attempts.

Decides waits only; never sleeps and never asks.
"""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySchedule:
    """Doubling waits, jittered so that two hundred refused turns do not come back at once."""

    first_wait_s: float = 0.05
    wait_max_s: float = 1.0
    attempts_max: int = 60
    """With the waits above about a minute: longer than an engine's version switch or restart."""

    def wait_s(
        self, attempt: int, *, retry_after_s: float | None = None, random: Random
    ) -> float | None:
        """Wait after failed attempt number `attempt` (from 1); None where it was the last.

        `retry_after_s` is what the gateway asked for; it counts where it is longer, up to the
        longest wait.
        """
        if attempt >= self.attempts_max:
            return None
        doubled = self.first_wait_s * 2.0 ** min(attempt - 1, 30)
        wait_s = max(doubled, retry_after_s or 0.0)
        return min(self.wait_max_s, wait_s) * (0.5 + 0.5 * random.random())
