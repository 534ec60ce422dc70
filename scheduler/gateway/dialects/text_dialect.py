"""OpenAI's two text routes as data: fields, and the replies of a renderer that are read."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from scheduler.gateway.dialects.text_fields import CHAT_FIELDS, COMPLETION_FIELDS

Body = dict[str, Any]


class _TokenText(msgspec.Struct):
    top_logprobs: tuple[Body, ...]


class _ChatLogprobs(msgspec.Struct):
    content: tuple[_TokenText, ...] | None


class _ChatChoice(msgspec.Struct):
    message: Body | None = None
    delta: Body | None = None
    logprobs: _ChatLogprobs | None = None


class _CompletionLogprobs(msgspec.Struct):
    text_offset: tuple[int, ...]
    tokens: tuple[Any, ...]
    token_logprobs: tuple[Any, ...]
    top_logprobs: tuple[Any, ...]


class _Completion(msgspec.Struct):
    text: str
    logprobs: _CompletionLogprobs | None = None


_C = TypeVar("_C")


class _Derendered(msgspec.Struct, Generic[_C]):
    choices: tuple[_C, ...]


class _Streamed(msgspec.Struct, Generic[_C]):
    chunk: _Derendered[_C]
    stream_state: Body | None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One of vLLM's text routes, and the fields of its derender request."""

    route: str
    response_field: str
    request_field: str
    many: bool
    """Whether one request has several prompts, each rendered on its own."""
    chunk_object: str
    """The `object` of a streamed chunk."""
    empty: Body
    """The least that vLLM takes for a request of the dialect."""
    fields: frozenset[str]
    """Fields of a request that the renderer reads."""
    whole: Any
    """The fields of a derendered reply that are read here."""
    part: Any
    """Fields of a streamed derendered reply that are read here."""
    texts: tuple[str, ...]
    """Names of a choice's texts in the order of the output, as vLLM's parsers part it."""


CHAT = Dialect(
    "/v1/chat/completions",
    "generate_response",
    "chat_request",
    many=False,
    chunk_object="chat.completion.chunk",
    empty={"messages": []},
    fields=CHAT_FIELDS,
    whole=_Derendered[_ChatChoice],
    part=_Streamed[_ChatChoice],
    texts=("reasoning_content", "reasoning", "content"),  # The first is the older name.
)
COMPLETION = Dialect(
    "/v1/completions",
    "generate_responses",
    "completion_request",
    many=True,
    chunk_object="text_completion",
    empty={"prompt": " "},
    fields=COMPLETION_FIELDS,
    whole=_Derendered[_Completion],
    part=_Streamed[_Completion],
    texts=("text",),
)
