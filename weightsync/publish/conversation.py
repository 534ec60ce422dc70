"""The two sides of a conversation between the ranks of one trainer.

Every rank first says which step of the trainer it is at, under a number drawn for this call; rank 0
binds those numbers, and every later word carries its listener's, so that nothing of an earlier call
or an earlier process is taken for an answer. Words alternate: `gather` goes up to rank 0, `tell`
comes down. Who fails says so in its next word; who says nothing is named when patience ends.
"""

import secrets
from contextlib import suppress
from typing import TypeVar

import msgspec

from harvester.contracts.errors import (
    ConfigError,
    Corrupt,
    Exhausted,
    PeerProtocolError,
    RoseMuxError,
    Stale,
    Unsupported,
)
from weightsync.publish.mailbox import RankMessage, WordFiles

_T = TypeVar("_T", bound=msgspec.Struct)
_ERRORS = {e.__name__: e for e in (ConfigError, Corrupt, Exhausted, Stale, Unsupported)}


class First:
    """Rank 0's side."""

    def __init__(self, words: WordFiles, step: int, *, ranks: int, timeout_s: float) -> None:
        self._words = words
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._step = step
        self._calls: dict[int, str] = {}
        """The call that each rank has reported."""
        self._refused: set[str] = set()
        self._gone: set[int] = set()
        """Ranks that failed and listen no more."""
        self._is_over = False
        self._turn = 0

    def gather(self, word: _T) -> list[_T]:
        said: dict[int, _T] = {0: word}
        for _ in self._words.polls(self._timeout_s):
            for rank in range(1, self._ranks):
                if rank not in said:
                    heard = self._opening(rank) if self._turn == 0 else self._answer(rank)
                    if heard is not None:
                        if heard.error:
                            self._calls.pop(rank, None)
                            self._gone.add(rank)
                        said[rank] = _body(heard, type(word), rank)
            if len(said) == self._ranks:
                return [said[rank] for rank in range(self._ranks)]
        self._is_over = True
        silent = ", ".join(str(rank) for rank in range(self._ranks) if rank not in said)
        raise Exhausted(
            f"step {self._step}: rank {silent} of {self._ranks} said nothing for "
            f"{self._timeout_s:g} s; the version before stays in force"
        )

    def tell(self, word: _T | None, kind: type[_T]) -> _T:  # noqa: ARG002 - nothing is read
        told = said(word)
        self._down(body=msgspec.Raw(msgspec.json.encode(told)))
        self._turn += 1
        return told

    def fail(self, error: Exception) -> Exception | None:
        """Sent also to ranks that have not called yet: they would wait in vain."""
        if self._turn == 0 and not self._is_over:
            with suppress(RoseMuxError):
                self._wait_for_calls()
        self._down(error=type(error).__name__, reason=str(error))
        return None

    def _wait_for_calls(self) -> None:
        for _ in self._words.polls(self._timeout_s):
            uncalled = {*range(1, self._ranks)} - self._calls.keys() - self._gone
            if all(self._opening(rank) for rank in uncalled):
                return

    def _down(self, **said: object) -> None:
        for rank, call in self._calls.items():
            word = RankMessage(call=call, step=self._step, **said)  # type: ignore[arg-type]
            self._words.say(_name("down", rank, call, self._turn), word)

    def _opening(self, rank: int) -> RankMessage | None:
        heard = self._words.heard(f"call-{rank:05d}")
        if heard is None or heard.call in self._refused:
            return None
        if heard.step > self._step:
            self._is_over = True
            raise Stale(f"rank {rank} is at step {heard.step}, rank 0 at step {self._step}")
        if heard.step < self._step:
            reason = f"rank {rank} is at step {heard.step}, the others are at step {self._step}"
            refusal = RankMessage(call=heard.call, step=self._step, error="Stale", reason=reason)
            self._words.say(_name("down", rank, heard.call, 0), refusal)
            self._refused.add(heard.call)
            return None
        self._calls[rank] = heard.call
        return heard

    def _answer(self, rank: int) -> RankMessage | None:
        name = _name("up", rank, self._calls[rank], self._turn)
        heard = self._words.heard(name)
        if heard is not None:
            self._words.forget(name)
        return heard


class Other:
    """Every other rank's side."""

    def __init__(self, words: WordFiles, step: int, *, rank: int, timeout_s: float) -> None:
        self._words = words
        self._rank = rank
        self._timeout_s = timeout_s
        self._step = step
        self._call = secrets.token_hex(8)
        self._turn = 0
        self._opening: RankMessage | None = None
        self._is_over = False

    def gather(self, word: _T) -> list[_T]:
        self._up(body=msgspec.Raw(msgspec.json.encode(word)))
        return []

    def tell(self, word: _T | None, kind: type[_T]) -> _T:  # noqa: ARG002 - rank 0 speaks
        name = _name("down", self._rank, self._call, self._turn)
        for _ in self._words.polls(2 * self._timeout_s):
            heard = self._words.heard(name)
            if heard is not None:
                self._words.forget(name)
                if self._turn == 0:
                    self._words.forget(f"call-{self._rank:05d}")
                self._turn += 1
                self._is_over = bool(heard.error)
                return _body(heard, kind, 0)
            self._call_again()
        self._is_over = True
        raise Exhausted(
            f"step {self._step}: rank 0, which writes the manifest, did not report for "
            f"{2 * self._timeout_s:g} s"
        )

    def fail(self, error: Exception) -> Exception | None:
        """Rank 0 hears of it where it listens next, unless it was rank 0 that ended it.

        Returns what rank 0 gave up for before: then this error is only its consequence.
        """
        if self._is_over:
            return None
        heard = self._words.heard(_name("down", self._rank, self._call, self._turn))
        if heard is not None and heard.error:
            return _raised(heard, 0)
        self._up(error=type(error).__name__, reason=str(error))
        return None

    def _up(self, **said: object) -> None:
        word = RankMessage(call=self._call, step=self._step, **said)  # type: ignore[arg-type]
        if self._turn == 0:
            self._opening = word
            self._words.say(f"call-{self._rank:05d}", word)
        else:
            self._words.say(_name("up", self._rank, self._call, self._turn), word)

    def _call_again(self) -> None:
        """A rank 0 that starts later than the others clears the directory first."""
        if self._turn == 0 and self._opening is not None:
            name = f"call-{self._rank:05d}"
            if self._words.heard(name) is None:
                self._words.say(name, self._opening)


def said(word: _T | None) -> _T:
    if word is None:
        raise ValueError("rank 0 must send a message")
    return word


def _raised(word: RankMessage, rank: int) -> Exception:
    return _ERRORS.get(word.error, RoseMuxError)(f"rank {rank}: {word.reason}")


def _name(way: str, rank: int, call: str, turn: int) -> str:
    return f"{way}-{rank:05d}-{call}-{turn}"


def _body(word: RankMessage, kind: type[_T], rank: int) -> _T:
    """The word's body; raises the speaker's error, naming the rank."""
    if word.error:
        raise _raised(word, rank)
    try:
        return msgspec.json.decode(word.body, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(f"rank {rank}: {error}") from error
