"""Messages ("words") between processes in one directory: small files, written atomically.

Decides how a word is written and bounded, not its meaning.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from harvester.contracts.clock import Clock
from harvester.contracts.errors import PeerProtocolError
from weightsync.layout.durable import refusals

MAX_WORD_BYTES = 256 << 20
POLL_S = 0.005
MAX_POLL_S = 0.25
_POLL_RATIO = 0.02
"""Poll interval as a share of the time already waited."""


class RankMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file. `error` and `reason` replace the body if the sender failed."""

    call: str
    step: int
    body: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    reason: str = ""


class WordFiles:
    """`pause` waits between polls; tests replace it."""

    def __init__(
        self, directory: Path, clock: Clock, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._pause = pause
        directory.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        """Delete an earlier process's words."""
        for left in (*self._directory.glob("*-*"),):
            # Another rank may be writing its next word now.
            if left.suffix != ".tmp":
                left.unlink(missing_ok=True)

    def say(self, name: str, word: RankMessage) -> None:
        """Replace a file atomically; raises Exhausted if the disk is full."""
        temporary = self._directory / f"{name}.{secrets.token_hex(4)}.tmp"
        with refusals(self._directory):
            temporary.write_bytes(msgspec.json.encode(word))
            temporary.rename(self._directory / name)

    def heard(self, name: str) -> RankMessage | None:
        """The word in a file; None if it does not exist yet. Raises PeerProtocolError."""
        try:
            with (self._directory / name).open("rb") as file:
                raw = file.read(MAX_WORD_BYTES + 1)
            if len(raw) > MAX_WORD_BYTES:
                raise PeerProtocolError(f"{name}: a message of over {MAX_WORD_BYTES} bytes")
            return msgspec.json.decode(raw, type=RankMessage)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise PeerProtocolError(f"{self._directory / name}: {error}") from error

    def forget(self, name: str) -> None:
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
