"""Event streams of engines, from bytes to chunks: one decode per event, nothing per token."""

from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

import msgspec

from harvester.contracts.errors import UNDECODABLE, PeerProtocolError
from harvester.contracts.wire.rollouts import Span, TokenLogprob
from harvester.platform.http_kit import message_of

MAX_EVENT_BYTES = 64 << 20
"""The routed experts of a long turn come in one event."""
DONE = b"[DONE]"


L = TypeVar("L")


class _Logprobs(msgspec.Struct, Generic[L]):
    content: list[L] | None = None


class _Choice(msgspec.Struct, Generic[L]):
    """The part of a streamed choice that is used; the engine sends more."""

    token_ids: list[int] | None = None
    logprobs: _Logprobs[L] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spans: tuple[Span, ...] = ()
    """From a gateway, as are `fault` and `immovable`; engines send none of them."""
    fault: str = ""
    immovable: tuple[str, ...] = ()
    routed_experts: str | None = None
    sampling_mask: list[tuple[int, ...]] | None = None
    index: int = 0


class _Error(msgspec.Struct):
    code: int = 500


class _Chunk(msgspec.Struct, Generic[L]):
    choices: list[_Choice[L]] = []
    error: msgspec.Raw = msgspec.Raw()

    @property
    def fault(self) -> str:
        """The error that the engine reports; empty without one."""
        raw = bytes(self.error)
        return "" if raw in (b"", b"null") else message_of(raw)[:500]

    @property
    def fault_status(self) -> int:
        """The HTTP status that the fault would have had before the stream began."""
        try:
            return msgspec.json.decode(self.error, type=_Error).code
        except UNDECODABLE:
            return 500


EngineChoice: TypeAlias = _Choice[TokenLogprob]
EngineChunk: TypeAlias = _Chunk[TokenLogprob]


class _NamelessLogprob(msgspec.Struct):
    """vLLM before 0.32 sends log-probabilities without token ids."""

    logprob: float


_DECODER = msgspec.json.Decoder(EngineChunk)
_NAMELESS_DECODER = msgspec.json.Decoder(_Chunk[_NamelessLogprob])


def _named(choice: _Choice[_NamelessLogprob]) -> EngineChoice:
    """Each log-probability is that of the token in the same place."""
    content = choice.logprobs.content if choice.logprobs else None
    token_ids, named = choice.token_ids or [], None
    if content is not None:
        if len(token_ids) != len(content):
            raise PeerProtocolError(f"{len(content)} log-probabilities, {len(token_ids)} tokens")
        pairs = zip(token_ids, content, strict=True)
        named = _Logprobs([TokenLogprob(at, each.logprob) for at, each in pairs])
    return EngineChoice(
        token_ids,
        named,
        choice.finish_reason,
        choice.stop_reason,
        routed_experts=choice.routed_experts,
        sampling_mask=choice.sampling_mask,
        index=choice.index,
    )


def _chunk(event: memoryview) -> EngineChunk:
    try:
        return _DECODER.decode(event)
    except UNDECODABLE:
        older = _NAMELESS_DECODER.decode(event)
        return EngineChunk([_named(choice) for choice in older.choices], older.error)


class EventStream:
    """Feed bytes in any portions; get the chunks that became whole. `done` is the end marker."""

    def __init__(self) -> None:
        self._left = bytearray()
        self.done = False

    def feed(self, data: bytes) -> Iterator[EngineChunk]:
        """Raises PeerProtocolError where the bytes are no event stream of chunks."""
        seen = max(0, len(self._left) - 1)
        self._left += data
        end = self._left.rfind(b"\n\n", seen)
        if len(self._left) - max(end, 0) > MAX_EVENT_BYTES:
            raise PeerProtocolError(f"event of more than {MAX_EVENT_BYTES} bytes")
        if end < 0:
            return
        whole, self._left = bytes(self._left[:end]), self._left[end + 2 :]
        for event in whole.split(b"\n\n"):
            if not event.startswith(b"data: "):
                continue
            if event == b"data: " + DONE:
                self.done = True
                return
            try:
                chunk = _chunk(memoryview(event)[6:])
            except UNDECODABLE as error:
                raise PeerProtocolError(f"unreadable chunk: {error}") from error
            for choice in chunk.choices:
                if choice.index:
                    # Each turn is a request of one sample.
                    raise PeerProtocolError(f"choice {choice.index} of a request for one")
            yield chunk
