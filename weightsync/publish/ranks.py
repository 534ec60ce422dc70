"""The publishing ranks: one process alone, or the ranks of a trainer, which agree through files.

Each publish is one conversation in the `.ranks` directory of the store, which every rank must reach
anyway. Every rank first sends the trainer's step, under a number drawn for this call. Rank 0 binds
those numbers, and every later message carries its reader's, so that no message of an earlier call
or process is taken for an answer. Messages alternate: `gather` sends to rank 0, `tell` sends back.
A rank that fails sends its error as the next message; a silent one is named after the timeout.
Decides nothing about versions.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import (
    UNDECODABLE,
    ConfigError,
    Corrupt,
    Exhausted,
    PeerProtocolError,
    RoseMuxError,
    Stale,
    Unsupported,
)
from harvester.platform.file_lock import FileLock, locked
from weightsync.layout.durable import read_plain, refusals

RANKS_DIRECTORY = ".ranks"
MAX_MESSAGE_BYTES = 256 << 20
POLL_S = 0.005
MAX_POLL_S = 0.25
_POLL_RATIO = 0.02
"""Poll interval as a share of the time already waited."""
_CALL = re.compile("[0-9a-f]{16}")
_T = TypeVar("_T", bound=msgspec.Struct)
_ERRORS = {e.__name__: e for e in (ConfigError, Corrupt, Exhausted, Stale, Unsupported)}


class RankExchange(Protocol):
    def gather(self, message: _T) -> list[_T]:
        """The messages of all ranks in rank order on rank 0; an empty list on other ranks."""

    def tell(self, message: _T | None, kind: type[_T]) -> _T:
        """Rank 0's message; the other ranks pass None."""


class RankMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file. `error` and `reason` replace the body if the sender failed."""

    call: str
    step: int
    body: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    reason: str = ""


class Mailbox:
    """`pause` waits between polls; tests replace it."""

    def __init__(self, directory: Path, clock: Clock, pause: Callable[[float], None]) -> None:
        self._directory = directory
        self._clock = clock
        self._pause = pause
        with refusals(directory):
            directory.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Delete an earlier process's messages."""
        for left in (*self._directory.glob("*-*"),):
            # Another rank may be writing its next message now.
            if left.suffix != ".tmp":
                left.unlink(missing_ok=True)

    def post(self, name: str, message: RankMessage) -> None:
        """Replace a file atomically; raises Exhausted if the disk is full."""
        temporary = self._directory / f"{name}.{secrets.token_hex(4)}.tmp"
        with refusals(self._directory):
            temporary.write_bytes(msgspec.json.encode(message))
            temporary.rename(self._directory / name)

    def read(self, name: str) -> RankMessage | None:
        """The message in a file; None if it does not exist yet. Raises PeerProtocolError, and
        Corrupt for anything else than a plain file."""
        try:
            raw = read_plain(self._directory / name, MAX_MESSAGE_BYTES)
            return msgspec.json.decode(raw, type=RankMessage)
        except FileNotFoundError:
            return None
        except UNDECODABLE as error:
            raise PeerProtocolError(f"{self._directory / name}: {error}") from error

    def discard(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def polls(self, timeout_s: float) -> Iterator[None]:
        """Yield repeatedly, with growing pauses, until the timeout."""
        started = self._clock.now()
        while True:
            yield
            waited_s = self._clock.now() - started
            if waited_s >= timeout_s:
                return
            self._pause(min(MAX_POLL_S, max(POLL_S, _POLL_RATIO * waited_s)))


class RankZero:
    """Rank 0's side."""

    def __init__(self, mailbox: Mailbox, step: int, *, ranks: int, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._step = step
        self._calls: dict[int, str] = {}
        """The call that each rank has reported."""
        self._refused: set[str] = set()
        self._gone: set[int] = set()
        """Ranks that failed and listen no more."""
        self._is_over = False
        self._exchange = 0

    def gather(self, message: _T) -> list[_T]:
        answers: dict[int, _T] = {0: message}
        for _ in self._mailbox.polls(self._timeout_s):
            for rank in range(1, self._ranks):
                if rank not in answers:
                    received = self._opening(rank) if self._exchange == 0 else self._answer(rank)
                    if received is not None:
                        if received.error:
                            self._calls.pop(rank, None)
                            self._gone.add(rank)
                        answers[rank] = _body(received, type(message), rank)
            if len(answers) == self._ranks:
                return [answers[rank] for rank in range(self._ranks)]
        self._is_over = True
        silent = ", ".join(str(rank) for rank in range(self._ranks) if rank not in answers)
        raise Exhausted(
            f"step {self._step}: rank {silent} of {self._ranks} did not report for "
            f"{self._timeout_s:g} s; the version before stays in force"
        )

    def tell(self, message: _T | None, kind: type[_T]) -> _T:  # noqa: ARG002 - nothing is read
        reply = given(message)
        self._down(body=msgspec.Raw(msgspec.json.encode(reply)))
        self._exchange += 1
        return reply

    def fail(self, error: Exception) -> Exception | None:
        """Sent also to ranks that have not called yet: they would wait in vain."""
        if self._exchange == 0 and not self._is_over:
            with suppress(RoseMuxError):
                self._wait_for_calls()
        self._down(error=type(error).__name__, reason=str(error))
        return None

    def _wait_for_calls(self) -> None:
        for _ in self._mailbox.polls(self._timeout_s):
            uncalled = {*range(1, self._ranks)} - self._calls.keys() - self._gone
            if all(self._opening(rank) for rank in uncalled):
                return

    def _down(self, **content: object) -> None:
        for rank, call in self._calls.items():
            message = RankMessage(call=call, step=self._step, **content)  # type: ignore[arg-type]
            self._mailbox.post(_name("down", rank, call, self._exchange), message)

    def _opening(self, rank: int) -> RankMessage | None:
        received = self._mailbox.read(f"call-{rank:05d}")
        if received is None or received.call in self._refused:
            return None
        if not _CALL.fullmatch(received.call):
            # The call's number becomes part of file names.
            raise PeerProtocolError(f"rank {rank}: the call {received.call[:80]!r} is no number")
        if received.step > self._step:
            self._is_over = True
            raise Stale(f"rank {rank} is at step {received.step}, rank 0 at step {self._step}")
        if received.step < self._step:
            reason = f"rank {rank} is at step {received.step}, the others are at step {self._step}"
            refusal = RankMessage(call=received.call, step=self._step, error="Stale", reason=reason)
            self._mailbox.post(_name("down", rank, received.call, 0), refusal)
            self._refused.add(received.call)
            return None
        if received.error:
            # Its rank listens no more, and may retry at this step before rank 0 does.
            self._mailbox.discard(f"call-{rank:05d}")
        self._calls[rank] = received.call
        return received

    def _answer(self, rank: int) -> RankMessage | None:
        name = _name("up", rank, self._calls[rank], self._exchange)
        received = self._mailbox.read(name)
        if received is not None:
            self._mailbox.discard(name)
        return received


class OtherRank:
    """Every other rank's side."""

    def __init__(self, mailbox: Mailbox, step: int, *, rank: int, timeout_s: float) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._timeout_s = timeout_s
        self._step = step
        self._call = secrets.token_hex(8)
        self._exchange = 0
        self._opening: RankMessage | None = None
        self._is_over = False
        # A file of an earlier call that rank 0 did not take does not belong to this one.
        mailbox.discard(f"call-{rank:05d}")

    def gather(self, message: _T) -> list[_T]:
        self._up(body=msgspec.Raw(msgspec.json.encode(message)))
        return []

    def tell(self, message: _T | None, kind: type[_T]) -> _T:  # noqa: ARG002 - rank 0 speaks
        name = _name("down", self._rank, self._call, self._exchange)
        for _ in self._mailbox.polls(2 * self._timeout_s):
            received = self._mailbox.read(name)
            if received is not None:
                self._mailbox.discard(name)
                if self._exchange == 0:
                    self._mailbox.discard(f"call-{self._rank:05d}")
                self._exchange += 1
                self._is_over = bool(received.error)
                return _body(received, kind, 0)
            self._call_again()
        self._is_over = True
        raise Exhausted(
            f"step {self._step}: rank 0, which writes the manifest, did not report for "
            f"{2 * self._timeout_s:g} s"
        )

    def fail(self, error: Exception) -> Exception | None:
        """Sends the error to rank 0, unless rank 0 has failed.

        Returns the error with which rank 0 gave up before: `error` is then its consequence.
        """
        if self._is_over:
            return None
        received = self._mailbox.read(_name("down", self._rank, self._call, self._exchange))
        if received is not None and received.error:
            return _raised(received, 0)
        self._up(error=type(error).__name__, reason=str(error))
        return None

    def _up(self, **content: object) -> None:
        message = RankMessage(call=self._call, step=self._step, **content)  # type: ignore[arg-type]
        if self._exchange == 0:
            self._opening = message
            self._mailbox.post(f"call-{self._rank:05d}", message)
        else:
            self._mailbox.post(_name("up", self._rank, self._call, self._exchange), message)

    def _call_again(self) -> None:
        """A rank 0 that starts later than the others clears the directory first."""
        if self._exchange == 0 and self._opening is not None:
            name = f"call-{self._rank:05d}"
            if self._mailbox.read(name) is None:
                self._mailbox.post(name, self._opening)


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


def given(message: _T | None) -> _T:
    if message is None:
        raise ValueError("rank 0 must send a message")
    return message


def _raised(message: RankMessage, rank: int) -> Exception:
    return _ERRORS.get(message.error, RoseMuxError)(f"rank {rank}: {message.reason}")


def _name(way: str, rank: int, call: str, exchange: int) -> str:
    return f"{way}-{rank:05d}-{call}-{exchange}"


def _body(message: RankMessage, kind: type[_T], rank: int) -> _T:
    """The message's body; raises the speaker's error, naming the rank."""
    if message.error:
        raise _raised(message, rank)
    try:
        return msgspec.json.decode(message.body, type=kind)
    except UNDECODABLE as error:
        raise PeerProtocolError(f"rank {rank}: {error}") from error
