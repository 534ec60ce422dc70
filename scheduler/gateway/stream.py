"""An engine's event stream, from bytes to chunks: one decode per event, nothing per token."""

from collections.abc import Iterator

import msgspec

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.wire.rollouts import TokenLogprob

MAX_EVENT_BYTES = 4 << 20
DONE = b"[DONE]"


class _Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class EngineChoice(msgspec.Struct):
    """The part of a streamed choice that is used; the engine sends more."""

    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Error(msgspec.Struct):
    code: int = 500


class EngineChunk(msgspec.Struct):
    choices: list[EngineChoice] = []
    error: msgspec.Raw = msgspec.Raw()

    @property
    def fault(self) -> str:
        """The error that the engine reports; empty without one."""
        said = bytes(self.error)
        return "" if said in (b"", b"null") else said[:500].decode(errors="replace")

    @property
    def fault_status(self) -> int:
        """The HTTP status that the fault would have had before the stream began."""
        try:
            return msgspec.json.decode(self.error, type=_Error).code
        except msgspec.MsgspecError:
            return 500


class _NamelessLogprob(msgspec.Struct):
    logprob: float


class _NamelessLogprobs(msgspec.Struct):
    content: list[_NamelessLogprob] | None = None


class _NamelessChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _NamelessLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def named(self) -> EngineChoice:
        """Each log-probability is that of the token in the same place."""
        content = self.logprobs.content if self.logprobs else None
        if content is None:
            return EngineChoice(self.token_ids, None, self.finish_reason, self.stop_reason)
        token_ids = self.token_ids or []
        if len(token_ids) != len(content):
            raise PeerProtocolError(f"{len(content)} log-probabilities, {len(token_ids)} tokens")
        named = [
            TokenLogprob(token_id, each.logprob)
            for token_id, each in zip(token_ids, content, strict=True)
        ]
        return EngineChoice(token_ids, _Logprobs(named), self.finish_reason, self.stop_reason)


class _NamelessChunk(msgspec.Struct):
    choices: list[_NamelessChoice] = []
    error: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(EngineChunk)
_NAMELESS_DECODER = msgspec.json.Decoder(_NamelessChunk)
"""For vLLM before 0.32, whose log-probabilities carry no token ids."""


def _chunk(event: memoryview) -> EngineChunk:
    try:
        return _DECODER.decode(event)
    except msgspec.ValidationError:
        older = _NAMELESS_DECODER.decode(event)
        return EngineChunk([choice.named() for choice in older.choices], older.error)


class EventStream:
    """Feed bytes in any portions; get the chunks that became whole. `done` is the end marker."""

    def __init__(self) -> None:
        self._left = b""
        self.done = False

    def feed(self, data: bytes) -> Iterator[EngineChunk]:
        """Raises PeerProtocolError where the bytes are no event stream of chunks."""
        *events, self._left = (self._left + data).split(b"\n\n")
        if len(self._left) > MAX_EVENT_BYTES:
            raise PeerProtocolError(f"event of more than {MAX_EVENT_BYTES} bytes")
        for event in events:
            if not event.startswith(b"data: "):
                continue
            if event == b"data: " + DONE:
                self.done = True
                return
            try:
                yield _chunk(memoryview(event)[6:])
            except msgspec.MsgspecError as error:
                raise PeerProtocolError(f"unreadable chunk: {error}") from error
