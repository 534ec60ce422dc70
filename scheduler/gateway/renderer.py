"""Text to token ids and back, by vLLM's own templates, tokenizer, tool and reasoning parsers.

The gateway's turns are token ids. What is text in a client's dialect is rendered and derendered by
`vllm launch render`, a process without a GPU, or by a dedicated engine, which serves the same
routes; never in the gateway's event loop. Faults that vLLM finds in a request go to its client as
vLLM words them. Streamed text needs vLLM 0.27, with a tool or reasoning parser 0.30.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from harvester.contracts.errors import Exhausted, RoseMuxError
from harvester.platform.http_kit import body_of

_MOST_BYTES = 64 << 20
_WRONG_REQUEST = (400, 413, 422)
"""Replies that every renderer would give; after any other the next one is asked."""
_ENCODER = msgspec.json.Encoder()

Body = dict[str, Any]


class RenderRefused(RoseMuxError):  # noqa: N818 - an answer, not a fault
    """vLLM refuses the request: `status` and `body` are its reply."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(body[:500].decode(errors="replace"))
        self.status = status
        self.body = body


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


CHAT = Dialect(
    "/v1/chat/completions",
    "generate_response",
    "chat_request",
    many=False,
    chunk_object="chat.completion.chunk",
)
COMPLETION = Dialect(
    "/v1/completions",
    "generate_responses",
    "completion_request",
    many=True,
    chunk_object="text_completion",
)


class Renderer:
    """`urls` gives the places to ask, in order; the next one is asked where one does not answer."""

    def __init__(
        self, session: aiohttp.ClientSession, urls: Callable[[], list[str]], *, timeout_s: float
    ) -> None:
        self._session = session
        self._urls = urls
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def render(self, dialect: Dialect, request: Body) -> list[Body]:
        """vLLM's generate requests, one for each prompt. Raises RenderRefused, Exhausted."""
        rendered = await self.post(f"{dialect.route}/render", request)
        return rendered if isinstance(rendered, list) else [rendered]

    async def derender(
        self, dialect: Dialect, request: Body, prompts: list[list[int]], responses: list[Body]
    ) -> Body:
        """The reply of the dialect. Raises RenderRefused, Exhausted."""
        lengths = [len(prompt) for prompt in prompts]
        told = (
            (prompts, lengths, responses)
            if dialect.many
            else (prompts[0], lengths[0], responses[0])
        )
        body = dict(
            zip(("prompt_token_ids", "prompt_tokens", dialect.response_field), told, strict=True)
        )
        reply: Body = await self.post(
            f"{dialect.route}/derender", body | {dialect.request_field: request}
        )
        return reply

    async def derender_chunk(
        self, dialect: Dialect, request: Body, prompt: list[int], chunk: Body, state: Body | None
    ) -> tuple[Body, Body]:
        """A chunk of the dialect's stream, and the state to send with the choice's next one."""
        reply = await self.post(
            f"{dialect.route}/derender",
            {
                "stream": True,
                "generate_chunk": chunk,
                "stream_state": state,
                "prompt_tokens": len(prompt),
                "prompt_token_ids": prompt,
                dialect.request_field: request,
            },
        )
        return reply["chunk"], reply["stream_state"]

    async def post(self, path: str, body: Body) -> Any:
        """The reply to a request that changes nothing. Raises RenderRefused, Exhausted."""
        fault = "no dedicated engine is up and no renderer is configured"
        for url in self._urls():
            try:
                async with self._session.post(
                    url + path,
                    data=_ENCODER.encode(body),
                    headers={"Content-Type": "application/json"},
                    timeout=self._timeout,
                ) as response:
                    raw = await body_of(response, most_bytes=_MOST_BYTES)
                    if response.status == 200:
                        return msgspec.json.decode(raw)
                    if response.status in _WRONG_REQUEST:
                        raise RenderRefused(response.status, raw)
                    fault = f"{url}{path}: {response.status} {raw[:200].decode(errors='replace')}"
            except (
                aiohttp.ClientError,
                TimeoutError,
                ConnectionError,
                msgspec.DecodeError,
            ) as error:
                fault = f"{url}{path}: {error!r}"
        raise Exhausted(f"text cannot be rendered: {fault}")
