"""Event streams of engines, from bytes to chunks: one decode per event, nothing per token.

A large event comes as many chunks, each of so few tokens that its reader can do something else
between two of them.
"""

from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

import msgspec

from harvester.contracts.errors import UNDECODABLE, PeerProtocolError, message_of
from harvester.contracts.wire.rollouts import MAX_OUTPUT_TOKENS, Span, TokenLogprob
from scheduler.gateway.engines.engine_faults import too_large

MAX_EVENT_BYTES = 64 << 20
"""The routed experts of a long turn come in one event."""
_LARGE_EVENT_BYTES = 1 << 16
_PIECE_BYTES = 1 << 15
_ID_BYTES = 16
"""Most bytes of a token id, encoded."""
_LOGPROBS_BYTES = 1 << 15
"""Most bytes of a token's log-probabilities: of its 128 candidates, 256 each."""
_SHOWN_BYTES = 80
_EVENT = b"data: {"
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
    """Only a gateway sends `spans`, `fault` and `immovable`."""
    fault: str = ""
    immovable: tuple[str, ...] = ()
    routed_experts: str | None = None
    sampling_mask: list[tuple[int, ...]] | None = None
    index: int = 0


class _Error(msgspec.Struct):
    code: int = 500


class _LargeChoice(_Choice[msgspec.Raw]):
    """The lists are decoded only after their sizes are checked, and each token's part later."""

    token_ids: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]
    logprobs: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]
    sampling_mask: list[msgspec.Raw] | None = None  # type: ignore[assignment]


class _LargeChunk(msgspec.Struct):
    choices: list[_LargeChoice] = []
    error: msgspec.Raw = msgspec.Raw()
    request_id: str = ""


class _Chunk(msgspec.Struct, Generic[L]):
    choices: list[_Choice[L]] = []
    error: msgspec.Raw = msgspec.Raw()
    request_id: str = ""

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


_OF_THE_END = ("finish_reason", "stop_reason", "fault", "immovable", "routed_experts")
_DECODER = msgspec.json.Decoder(EngineChunk)
_NAMELESS_DECODER = msgspec.json.Decoder(_Chunk[_NamelessLogprob])
_LARGE_DECODER = msgspec.json.Decoder(_LargeChunk)
_LOGPROBS_DECODER = msgspec.json.Decoder(_Logprobs[msgspec.Raw] | None)
_IDS_DECODER = msgspec.json.Decoder(list[int] | None)


def _named(choice: _Choice[_NamelessLogprob]) -> EngineChoice:
    """Each log-probability belongs to the token at its index."""
    content = choice.logprobs.content if choice.logprobs else None
    token_ids, named = choice.token_ids or [], None
    if content is not None:
        if len(token_ids) != len(content):
            raise PeerProtocolError(f"{len(content)} log-probabilities for {len(token_ids)} tokens")
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
        return EngineChunk(
            [_named(choice) for choice in older.choices], older.error, older.request_id
        )


def _pieces(event: memoryview, most_tokens: int) -> Iterator[EngineChunk]:
    """The chunks of a large event, each with the spans of its choice, the last with what ends it.

    Raises PeerProtocolError before the first where it has more tokens than it may have or its lists
    do not go together.
    """
    large = _LARGE_DECODER.decode(event)
    if bytes(large.error) not in (b"", b"null"):
        yield EngineChunk([], large.error)
    for choice in large.choices:
        raw = bytes(choice.token_ids) or b"null"
        may_be_right = len(raw) <= (most_tokens + 1) * _ID_BYTES
        token_ids = (_IDS_DECODER.decode(raw) if may_be_right else None) or []
        if not may_be_right or len(token_ids) > most_tokens:
            raise PeerProtocolError(f"an event of more than the {most_tokens} tokens that are left")
        raw = bytes(choice.logprobs) or b"null"
        if len(raw) > (len(token_ids) + 1) * _LOGPROBS_BYTES:
            raise PeerProtocolError(
                f"log-probabilities of {len(raw)} bytes for {len(token_ids)} tokens"
            )
        logprobs = _LOGPROBS_DECODER.decode(raw)
        content = logprobs.content if logprobs else None
        mask = choice.sampling_mask
        if content is not None and len(content) != len(token_ids):
            raise PeerProtocolError(f"{len(content)} log-probabilities for {len(token_ids)} tokens")
        if mask is not None and len(mask) != len(token_ids):
            raise PeerProtocolError(f"{len(mask)} sampling masks for {len(token_ids)} tokens")
        step = max(1, _PIECE_BYTES * len(token_ids) // len(event))
        for start in range(0, max(1, len(token_ids)), step):
            part = slice(start, start + step)
            piece = {"token_ids": token_ids[part], "index": choice.index}
            if content is not None:
                piece["logprobs"] = {"content": content[part]}
            if mask is not None:
                piece["sampling_mask"] = mask[part]
            (one,) = _chunk(memoryview(msgspec.json.encode({"choices": [piece]}))).choices
            one.spans = choice.spans
            if part.stop >= len(token_ids):
                for name in _OF_THE_END:
                    setattr(one, name, getattr(choice, name))
            yield EngineChunk([one], request_id=large.request_id)


class EventStream:
    """Feed bytes in any portions; get the chunks that became whole. `done` is the end marker."""

    def __init__(self, *, most_tokens: int = MAX_OUTPUT_TOKENS) -> None:
        """`most_tokens`: largest number of tokens in an event."""
        self._left = bytearray()
        self._most_tokens = most_tokens
        self.done = False

    @property
    def held_bytes(self) -> int:
        """Bytes of an event that is not whole yet."""
        return len(self._left)

    def feed(self, data: bytes) -> Iterator[EngineChunk]:
        """Raises PeerProtocolError for bytes that are no stream of chunks, RequestRefused for an
        event that is too large."""
        seen = max(0, len(self._left) - 1)
        self._left += data
        end = self._left.rfind(b"\n\n", seen)
        if len(self._left) - max(end, 0) > MAX_EVENT_BYTES:
            if self._left.startswith(_EVENT, 0 if end < 0 else end + 2):
                raise too_large("an event", MAX_EVENT_BYTES)
            raise PeerProtocolError(f"event of more than {MAX_EVENT_BYTES} bytes")
        if end < 0:
            return
        # Copies once instead of twice: an event may have 64 MB.
        whole, self._left = bytes(memoryview(self._left)[:end]), self._left[end + 2 :]
        for event in whole.split(b"\n\n"):
            usual = event.startswith(b"data: ")
            if not (payload := memoryview(event)[6:] if usual else _past_comments(event)):
                continue
            if payload == DONE:
                self.done = True
                return
            try:
                if len(payload) > _LARGE_EVENT_BYTES:
                    yield from map(_checked, _pieces(payload, self._most_tokens))
                else:
                    yield _checked(_chunk(payload))
            except UNDECODABLE as error:
                raise PeerProtocolError(f"unreadable chunk: {error}") from error


def _past_comments(event: bytes) -> memoryview:
    """An event's data; none of one that has comments alone, as a proxy's pings are."""
    lines = [each for each in event.splitlines() if each and each[:1] != b":"]
    if len(lines) > 1 or any(not each.startswith(b"data:") for each in lines):
        # Its tokens would be left out without a trace.
        raise PeerProtocolError(f"unreadable event: {event[:_SHOWN_BYTES]!r}")
    return memoryview(b"".join(lines).removeprefix(b"data:").strip())


def _checked(chunk: EngineChunk) -> EngineChunk:
    for place, choice in enumerate(chunk.choices):
        if place or choice.index:
            # Each turn is a request of one sample.
            raise PeerProtocolError(f"choice {choice.index or place} of a request for one")
    return chunk
