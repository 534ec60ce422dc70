"""Retry policy of one read: bounded in attempts and in time without progress.

A read that progresses may take as long as it needs; one that stalls, or crawls, ends. `Patience`
decides and never sleeps; `persist` is the loop around it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Exhausted

T = TypeVar("T")


class Interrupted(Exception):  # noqa: N818 - named for what happened to the attempt
    """A failed attempt that may be repeated. Never leaves this package."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    give_up_s: float = 60.0
    """Longest time without progress."""
    attempts_max: int = 60
    """Most consecutive attempts without progress."""
    first_wait_s: float = 0.05
    wait_max_s: float = 2.0
    """Bound on the client's own wait; a longer Retry-After of the server is obeyed."""
    progress_bytes: int = 64 << 10
    """Bytes within `give_up_s` that count as progress; about 1 KiB/s is the slowest."""


class Patience:
    """Retry state of one read, from its first attempt."""

    def __init__(self, limits: RetryLimits, *, now: float, random: Random) -> None:
        self._limits = limits
        self._random = random
        self._attempts = 0
        self._counted_bytes = 0
        self._until_s = now + limits.give_up_s

    def received(self, done_bytes: int, *, now: float) -> None:
        """Record that the read has `done_bytes` in total."""
        if done_bytes - self._counted_bytes >= self._limits.progress_bytes:
            self._counted_bytes = done_bytes
            self._attempts = 0
            self._until_s = now + self._limits.give_up_s

    def is_over(self, *, now: float) -> bool:
        return now >= self._until_s

    def wait_s(self, *, now: float, retry_after_s: float = 0.0) -> float | None:
        """Seconds before the next attempt; None if there is none. At least `retry_after_s`, plus
        jitter."""
        self._attempts += 1
        doubled = self._limits.first_wait_s * 2.0 ** min(self._attempts - 1, 30)
        own = min(self._limits.wait_max_s, doubled)
        wait = max(0.5 * own, retry_after_s) + own * self._random.random()
        over = self._attempts >= self._limits.attempts_max or now + wait >= self._until_s
        return None if over else wait


def persist(
    attempt: Callable[[], T],
    patience: Patience,
    *,
    clock: Clock,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call `attempt` until it returns; raises Exhausted if patience ends first."""
    while True:
        try:
            return attempt()
        except Interrupted as broken:
            wait = patience.wait_s(now=clock.now(), retry_after_s=broken.retry_after_s)
            if wait is None:
                raise Exhausted(f"{broken}; gave up, try again later") from broken
            sleep(wait)
