"""How the ranks of one trainer talk during a publish: small files in the store's directory.

Each publish is one conversation. Every rank first says which step of the trainer it is at, under a
number drawn for this call; rank 0 binds those numbers, and every later word carries its listener's,
so that nothing of an earlier call or an earlier process is taken for an answer. Words alternate:
`gather` goes up to rank 0, `tell` comes down. Who fails says so in its next word; who says nothing
is named by the others when patience ends. Decides nothing about versions.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import (
    ConfigError,
    Corrupt,
    Exhausted,
    PeerProtocolError,
    RoseMuxError,
    Stale,
    Unsupported,
)
from weightsync.store_writer import refusals

RANKS_DIRECTORY = ".ranks"
MAX_WORD_BYTES = 256 << 20
POLL_S = 0.005
_T = TypeVar("_T", bound=msgspec.Struct)
_ERRORS = {e.__name__: e for e in (ConfigError, Corrupt, Exhausted, Stale, Unsupported)}


class _Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file. `error` and `reason` stand for a body where the speaker failed."""

    call: str
    step: int
    body: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    reason: str = ""


class Conversation(Protocol):
    def gather(self, word: _T) -> list[_T]:
        """On rank 0 what every rank said, in order of ranks; on the others nothing."""
        ...

    def tell(self, word: _T | None, kind: type[_T]) -> _T:
        """What rank 0 said; the other ranks pass None."""
        ...


class Ranks(Protocol):
    rank: int

    def conversation(self, step: int) -> AbstractContextManager[Conversation]:
        """An error inside reaches every rank."""
        ...


class Alone:
    """One rank, which holds everything."""

    rank = 0

    @contextmanager
    def conversation(self, step: int) -> Iterator[Conversation]:  # noqa: ARG002 - one rank
        yield _Monologue()


class _Monologue:
    def gather(self, word: _T) -> list[_T]:
        return [word]

    def tell(self, word: _T | None, kind: type[_T]) -> _T:  # noqa: ARG002 - nothing is read
        return _said(word)


class RanksByFiles:
    """`timeout_s`: how long rank 0 waits for the slowest; the others wait twice that for rank 0."""

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
        self._directory = store_dir / RANKS_DIRECTORY
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.clock = clock or MonotonicClock()
        self._pause = pause
        self._directory.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for left in (*self._directory.glob("*-*"),):
                # Another rank may be writing its next word just now.
                if left.suffix != ".tmp":
                    left.unlink(missing_ok=True)

    @contextmanager
    def conversation(self, step: int) -> Iterator[Conversation]:
        talk = _First(self, step) if self.rank == 0 else _Other(self, step)
        try:
            yield talk
        except Exception as error:
            cause = None
            with suppress(RoseMuxError):
                cause = talk.fail(error)
            if cause is not None:
                raise cause from error
            raise

    def say(self, name: str, word: _Word) -> None:
        """Replaces a file whole."""
        path = self._directory / name
        temporary = self._directory / f"{name}.{secrets.token_hex(4)}.tmp"
        with refusals(self._directory):
            temporary.write_bytes(msgspec.json.encode(word))
            temporary.rename(path)

    def heard(self, name: str) -> _Word | None:
        """The word in a file; None where there is none yet."""
        try:
            with (self._directory / name).open("rb") as file:
                raw = file.read(MAX_WORD_BYTES + 1)
            if len(raw) > MAX_WORD_BYTES:
                raise PeerProtocolError(f"{name}: a word of over {MAX_WORD_BYTES} bytes")
            return msgspec.json.decode(raw, type=_Word)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"{self._directory / name}: {error}") from error

    def forget(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)

    def polls(self, timeout_s: float) -> Iterator[None]:
        """Again and again until the time is over."""
        deadline = self.clock.now() + timeout_s
        while True:
            yield
            if self.clock.now() >= deadline:
                return
            self._pause(POLL_S)


class _First:
    """Rank 0's side."""

    def __init__(self, ranks: RanksByFiles, step: int) -> None:
        self._ranks = ranks
        self._step = step
        self._calls: dict[int, str] = {}
        """The call that each rank is in, once it said so."""
        self._refused: set[str] = set()
        self._gone: set[int] = set()
        """Ranks that failed and listen no more."""
        self._is_over = False
        self._turn = 0

    def gather(self, word: _T) -> list[_T]:
        said: dict[int, _T] = {0: word}
        for _ in self._ranks.polls(self._ranks.timeout_s):
            for rank in range(1, self._ranks.ranks):
                if rank not in said:
                    heard = self._opening(rank) if self._turn == 0 else self._answer(rank)
                    if heard is not None:
                        if heard.error:
                            self._calls.pop(rank, None)
                            self._gone.add(rank)
                        said[rank] = _body(heard, type(word), rank)
            if len(said) == self._ranks.ranks:
                return [said[rank] for rank in range(self._ranks.ranks)]
        self._is_over = True
        silent = ", ".join(str(rank) for rank in range(self._ranks.ranks) if rank not in said)
        raise Exhausted(
            f"step {self._step}: rank {silent} of {self._ranks.ranks} said nothing for "
            f"{self._ranks.timeout_s:g} s; the version before stays in force"
        )

    def tell(self, word: _T | None, kind: type[_T]) -> _T:  # noqa: ARG002 - nothing is read
        told = _said(word)
        self._down(body=msgspec.Raw(msgspec.json.encode(told)))
        self._turn += 1
        return told

    def fail(self, error: Exception) -> None:
        """Told also to ranks that have not called yet: they would wait for nothing."""
        if self._turn == 0 and not self._is_over:
            with suppress(RoseMuxError):
                self._wait_for_calls()
        self._down(error=type(error).__name__, reason=str(error))

    def _wait_for_calls(self) -> None:
        for _ in self._ranks.polls(self._ranks.timeout_s):
            uncalled = {*range(1, self._ranks.ranks)} - self._calls.keys() - self._gone
            if all(self._opening(rank) for rank in uncalled):
                return

    def _down(self, **said: object) -> None:
        for rank, call in self._calls.items():
            word = _Word(call=call, step=self._step, **said)  # type: ignore[arg-type]
            self._ranks.say(_name("down", rank, call, self._turn), word)

    def _opening(self, rank: int) -> _Word | None:
        heard = self._ranks.heard(f"call-{rank:05d}")
        if heard is None or heard.call in self._refused:
            return None
        if heard.step > self._step:
            self._is_over = True
            raise Stale(f"rank {rank} is at step {heard.step}, rank 0 at step {self._step}")
        if heard.step < self._step:
            reason = f"rank {rank} is at step {heard.step}, the others are at step {self._step}"
            refusal = _Word(call=heard.call, step=self._step, error="Stale", reason=reason)
            self._ranks.say(_name("down", rank, heard.call, 0), refusal)
            self._refused.add(heard.call)
            return None
        self._calls[rank] = heard.call
        return heard

    def _answer(self, rank: int) -> _Word | None:
        name = _name("up", rank, self._calls[rank], self._turn)
        heard = self._ranks.heard(name)
        if heard is not None:
            self._ranks.forget(name)
        return heard


class _Other:
    """Every other rank's side."""

    def __init__(self, ranks: RanksByFiles, step: int) -> None:
        self._ranks = ranks
        self._step = step
        self._call = secrets.token_hex(8)
        self._turn = 0
        self._opening: _Word | None = None
        self._is_over = False

    def gather(self, word: _T) -> list[_T]:
        self._up(body=msgspec.Raw(msgspec.json.encode(word)))
        return []

    def tell(self, word: _T | None, kind: type[_T]) -> _T:  # noqa: ARG002 - rank 0 speaks
        name = _name("down", self._ranks.rank, self._call, self._turn)
        for _ in self._ranks.polls(2 * self._ranks.timeout_s):
            heard = self._ranks.heard(name)
            if heard is not None:
                self._ranks.forget(name)
                if self._turn == 0:
                    self._ranks.forget(f"call-{self._ranks.rank:05d}")
                self._turn += 1
                self._is_over = bool(heard.error)
                return _body(heard, kind, 0)
            self._call_again()
        self._is_over = True
        raise Exhausted(
            f"step {self._step}: rank 0, which writes the manifest, said nothing for "
            f"{2 * self._ranks.timeout_s:g} s"
        )

    def fail(self, error: Exception) -> Exception | None:
        """Rank 0 hears of it where it listens next, unless it was rank 0 that ended it.

        Returns what rank 0 gave up for before: then this error is only its consequence.
        """
        if self._is_over:
            return None
        heard = self._ranks.heard(_name("down", self._ranks.rank, self._call, self._turn))
        if heard is not None and heard.error:
            return _raised(heard, 0)
        self._up(error=type(error).__name__, reason=str(error))
        return None

    def _up(self, **said: object) -> None:
        word = _Word(call=self._call, step=self._step, **said)  # type: ignore[arg-type]
        if self._turn == 0:
            self._opening = word
            self._ranks.say(f"call-{self._ranks.rank:05d}", word)
        else:
            self._ranks.say(_name("up", self._ranks.rank, self._call, self._turn), word)

    def _call_again(self) -> None:
        """A rank 0 that starts later than the others clears the directory first."""
        if self._turn == 0 and self._opening is not None:
            name = f"call-{self._ranks.rank:05d}"
            if self._ranks.heard(name) is None:
                self._ranks.say(name, self._opening)


def _said(word: _T | None) -> _T:
    if word is None:
        raise ValueError("rank 0 has to say something")
    return word


def _raised(word: _Word, rank: int) -> Exception:
    return _ERRORS.get(word.error, RoseMuxError)(f"rank {rank}: {word.reason}")


def _name(way: str, rank: int, call: str, turn: int) -> str:
    return f"{way}-{rank:05d}-{call}-{turn}"


def _body(word: _Word, kind: type[_T], rank: int) -> _T:
    """Raises what the speaker raised, saying who it was."""
    if word.error:
        raise _raised(word, rank)
    try:
        return msgspec.json.decode(word.body, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(f"rank {rank}: {error}") from error
