"""Pauses between repeated calls: doubling, with jitter, bounded in number and in time.

The time without progress is bounded: a transfer that progresses may take as long as it needs, one
that stalls or crawls ends.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from harvester.contracts.clock import Clock
from harvester.contracts.doubling import doubled_s
from harvester.contracts.errors import Exhausted

T = TypeVar("T")


class Interrupted(Exception):  # noqa: N818 - named for what happened to the attempt
    """A failed attempt that may be repeated. Never leaves the caller of `Backoff.persist`."""

    def __init__(self, reason: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    give_up_s: float = 60.0
    """Longest time without progress."""
    attempts_max: float = 60
    """Most consecutive attempts without progress."""
    first_wait_s: float = 0.05
    wait_max_s: float = 2.0
    """Bound on the client's own wait; a longer Retry-After of the server is obeyed."""
    progress_bytes: int = 64 << 10
    """Bytes within `give_up_s` that count as progress; about 1 KiB/s is the slowest."""


class Backoff:
    """Retry state of one call, from its first attempt. `sleep` is replaced by tests."""

    def __init__(
        self,
        limits: RetryLimits,
        clock: Clock,
        *,
        random: Random | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._random = random or Random()
        self._sleep = sleep
        self._attempts = 0
        self._counted_bytes = 0
        self._progress_s = clock.now()

    def received(self, done_bytes: int) -> None:
        """Record that a transfer has `done_bytes` in total."""
        if done_bytes - self._counted_bytes >= self._limits.progress_bytes:
            self._counted_bytes = done_bytes
            self._attempts = 0
            self._progress_s = self._clock.now()

    @property
    def is_over(self) -> bool:
        return self._clock.now() >= self._progress_s + self._limits.give_up_s

    def wait_s(self, *, retry_after_s: float = 0.0) -> float | None:
        """Seconds before the next attempt; None without a further attempt. At least
        `retry_after_s`, plus jitter.
        """
        self._attempts += 1
        limits = self._limits
        own = doubled_s(limits.first_wait_s, self._attempts - 1, most_s=limits.wait_max_s)
        wait_s = max(0.5 * own, retry_after_s) + own * self._random.random()
        left_s = self._progress_s + self._limits.give_up_s - self._clock.now()
        over = self._attempts >= self._limits.attempts_max or wait_s >= left_s
        return None if over else wait_s

    def pause(self, why: Exception, *, retry_after_s: float = 0.0) -> None:
        """Sleeps before the next attempt. Raises Exhausted without a further attempt."""
        wait_s = self.wait_s(retry_after_s=retry_after_s)
        if wait_s is None:
            raise self.exhausted(str(why)) from why
        self._sleep(wait_s)

    def check(self, why: str) -> None:
        """Raises Exhausted when the time is up."""
        if self.is_over:
            raise self.exhausted(why)

    def persist(self, attempt: Callable[[], T]) -> T:
        """Calls `attempt` until it is not Interrupted. Raises Exhausted if the limits end first."""
        while True:
            try:
                return attempt()
            except Interrupted as broken:
                self.pause(broken, retry_after_s=broken.retry_after_s)

    def exhausted(self, why: str) -> Exhausted:
        """The error of a caller that asked for a pause and got none."""
        waited_s = self._clock.now() - self._progress_s
        ended = f"; gave up after {waited_s:.3g} s, try again later"
        return Exhausted(why + ended * (self._limits.attempts_max > 1))


def retry_after_s(header: str | None, *, most_s: float) -> float:
    """Seconds that a Retry-After header asks for, at most `most_s`; 0 without one in seconds."""
    try:
        asked_s = float(header or 0)
    except ValueError:
        return 0.0
    return min(max(0.0, asked_s), most_s)
