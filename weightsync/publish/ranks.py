"""The publishing ranks: one process alone, or the ranks of a trainer, which agree through files.

Each publish is one conversation in the `.ranks` directory of the store, which every rank must reach
anyway. Decides nothing about versions.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import RoseMuxError
from harvester.platform.file_lock import FileLock, locked
from weightsync.layout.durable import refusals
from weightsync.publish.rank_exchange import Mailbox, OtherRank, RankZero, given

RANKS_DIRECTORY = ".ranks"
_T = TypeVar("_T", bound=msgspec.Struct)


class RankExchange(Protocol):
    def gather(self, message: _T) -> list[_T]:
        """The messages of all ranks in rank order on rank 0; an empty list on other ranks."""

    def tell(self, message: _T | None, kind: type[_T]) -> _T:
        """Rank 0's message; the other ranks pass None."""


class SingleRank:
    """The single rank of an unsharded trainer, which talks to itself."""

    rank = 0

    def close(self) -> None: ...

    @contextmanager
    def exchange(self, step: int) -> Iterator[RankExchange]:  # noqa: ARG002 - one rank
        yield self

    def gather(self, message: _T) -> list[_T]:
        return [message]

    def tell(self, message: _T | None, kind: type[_T]) -> _T:  # noqa: ARG002 - nothing is read
        return given(message)


class RanksByFiles:
    """Rank 0 waits `timeout_s` for the slowest rank; the others wait twice that for rank 0.

    Raises ConfigError where a living process has the same rank above 0.
    """

    def __init__(
        self,
        store_dir: Path,
        *,
        rank: int,
        ranks: int,
        timeout_s: float,
        clock: Clock | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        directory = store_dir / RANKS_DIRECTORY
        self._mailbox = Mailbox(directory, clock or MonotonicClock(), pause)
        self._lock: FileLock | None = None
        if rank == 0:
            # The store's lock or owner is rank 0's.
            self._mailbox.clear()
        else:
            # Parts of two trainers must not meet in one version.
            taken = f"rank {rank} of another trainer still publishes by {directory}: end it first"
            with refusals(directory):
                self._lock = locked(directory / f"rank{rank:05d}.lock", taken=taken)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    @contextmanager
    def exchange(self, step: int) -> Iterator[RankExchange]:
        """Context of one publish; an error inside reaches every rank."""
        talk = (
            RankZero(self._mailbox, step, ranks=self._ranks, timeout_s=self._timeout_s)
            if self.rank == 0
            else OtherRank(self._mailbox, step, rank=self.rank, timeout_s=self._timeout_s)
        )
        try:
            yield talk
        except Exception as error:
            cause = None
            with suppress(RoseMuxError):
                cause = talk.fail(error)
            if cause is not None:
                raise cause from error
            raise
