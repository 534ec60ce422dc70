"""The routes of the comparison: what a client sends, what an engine answers, and the ids in it.

Prompts begin with the request's number, which every router passes on unchanged: by it the load
finds the stub's times. The token at place `k` of each output is `k + 1`, so that a lost, doubled or
displaced token shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from benchmarks.gateway.http_messages import ReplyReader

PROMPT_TOKENS = 128
MODEL = "policy"
_encode = msgspec.json.encode


def prompt_ids(number: int) -> list[int]:
    return [number, *range(1000, 1000 + PROMPT_TOKENS - 1)]


def prompt_text(number: int) -> str:
    return f"{number}{' word' * (PROMPT_TOKENS - 1)}"


class _SentSampling(msgspec.Struct, frozen=True):
    max_tokens: int = 0
    max_new_tokens: int = 0


class AnyRequest(msgspec.Struct):
    """A request of any of the routes, as far as the stub engine reads it."""

    token_ids: list[int] = []
    input_ids: list[int] = []
    prompt: str | list[int] = ""
    max_tokens: int = 0
    stream: bool = False
    sampling_params: _SentSampling = _SentSampling()

    @classmethod
    def of(cls, body: bytes) -> "AnyRequest":
        return _DECODER.decode(body)

    @property
    def number(self) -> int:
        if isinstance(self.prompt, str) and self.prompt:
            return int(self.prompt.partition(" ")[0])
        return (self.token_ids or self.input_ids or self.prompt)[0]  # type: ignore[return-value]

    @property
    def tokens(self) -> int:
        sampling = self.sampling_params
        return self.max_tokens or sampling.max_tokens or sampling.max_new_tokens


_DECODER = msgspec.json.Decoder(AnyRequest)


@dataclass(frozen=True, slots=True)
class TurnRoute:
    """`whole(n)` is a reply of n tokens, `event(k, n)` the stream's event with token k of n."""

    path: str
    body: Callable[[int, int, bool], dict[str, Any]]
    """From the request's number, its tokens, and whether it is streamed."""
    whole: Callable[[int], dict[str, Any]]
    event: Callable[[int, int], dict[str, Any]]
    ids: Callable[[dict[str, Any]], list[int]]
    """The ids in a reply or in an event."""
    accumulates: bool = False
    """Each event of a stream has all ids so far."""


def _finish(place: int, tokens: int) -> str | None:
    return "length" if place == tokens else None


def _logprob(token: int) -> dict[str, Any]:
    score = {"token_id": token, "logprob": -0.125 * token, "rank": 1}
    return score | {"top_logprobs": [score]}


def _engine_choice(tokens: range, finish: str | None) -> dict[str, Any]:
    return {
        "index": 0,
        "logprobs": {"content": [_logprob(token) for token in tokens]},
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": list(tokens),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
    }


def _engine_reply(tokens: range, finish: str | None) -> dict[str, Any]:
    name = "generate-tokens-0123456789abcdef"
    return {"request_id": name, "usage": None, "choices": [_engine_choice(tokens, finish)]}


def _completion(tokens: range, finish: str | None) -> dict[str, Any]:
    text = "".join(f" {token}" for token in tokens)
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    named = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1}
    return named | {"model": MODEL, "choices": [choice | {"stop_reason": None}], "usage": None}


def _sglang(upto: int, finish: str | None) -> dict[str, Any]:
    """Without `--stream-output` each event has the whole output so far."""
    sampled = [[-0.125 * token, token, None] for token in range(1, upto + 1)]
    meta = {
        "id": "0123456789abcdef",
        "finish_reason": {"type": finish, "length": upto} if finish else None,
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": upto,
        "output_token_logprobs": sampled,
    }
    return {"text": "", "output_ids": list(range(1, upto + 1)), "meta_info": meta}


def _generate_body(number: int, tokens: int, stream: bool) -> dict[str, Any]:
    return {
        "request_id": f"request-{number}",
        "token_ids": prompt_ids(number),
        "sampling_params": {"max_tokens": tokens, "temperature": 1.0, "logprobs": 1},
        "stream": stream,
    }


def _completion_body(number: int, tokens: int, stream: bool) -> dict[str, Any]:
    prompt = prompt_text(number)
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": stream}


def _sglang_body(number: int, tokens: int, stream: bool) -> dict[str, Any]:
    return {
        "input_ids": prompt_ids(number),
        "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0},
        "return_logprob": True,
        "stream": stream,
    }


def _ids_of_choices(reply: dict[str, Any]) -> list[int]:
    return [token for choice in reply["choices"] for token in choice["token_ids"]]


def _ids_of_text(reply: dict[str, Any]) -> list[int]:
    return [int(word) for choice in reply["choices"] for word in choice["text"].split()]


GENERATE = TurnRoute(
    path="/inference/v1/generate",
    body=_generate_body,
    whole=lambda n: _engine_reply(range(1, n + 1), "length"),
    event=lambda k, n: _engine_reply(range(k, k + 1), _finish(k, n)),
    ids=_ids_of_choices,
)
COMPLETIONS = TurnRoute(
    path="/v1/completions",
    body=_completion_body,
    whole=lambda n: _completion(range(1, n + 1), "length"),
    event=lambda k, n: _completion(range(k, k + 1), _finish(k, n)),
    ids=_ids_of_text,
)
SGLANG = TurnRoute(
    path="/generate",
    body=_sglang_body,
    whole=lambda n: _sglang(n, "length"),
    event=lambda k, n: _sglang(k, _finish(k, n)),
    ids=lambda reply: list(reply["output_ids"]),
    accumulates=True,
)
ROUTES = {route.path: route for route in (GENERATE, COMPLETIONS, SGLANG)}


def request_bytes(route: TurnRoute, *, number: int, tokens: int, stream: bool, port: int) -> bytes:
    body = _encode(route.body(number, tokens, stream))
    head = (
        f"POST {route.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def ids_of_reply(route: TurnRoute, reply: ReplyReader, *, stream: bool) -> list[int]:
    """Ids in the order of the reply. Raises ValueError for a reply that is none."""
    payload = reply.payload()
    if reply.status != 200:
        raise ValueError(f"HTTP {reply.status}: {payload[:300].decode(errors='replace')}")
    if not stream:
        return route.ids(msgspec.json.decode(payload))
    events = [event for event in payload.split(b"\n\n") if event.startswith(b"data: ")]
    if not events or events[-1] != b"data: [DONE]":
        raise ValueError("the stream has no end")
    parts = [route.ids(msgspec.json.decode(event[6:])) for event in events[:-1]]
    if not route.accumulates:
        return [token for part in parts for token in part]
    for before, after in pairwise(parts):
        if after[: len(before)] != before:
            raise ValueError(f"{before[-3:]} became {after[len(before) - 3 : len(before)]}")
    return parts[-1] if parts else []
