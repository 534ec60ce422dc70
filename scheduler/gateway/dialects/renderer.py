"""Text to token ids and back, by vLLM's own templates, tokenizer, tool and reasoning parsers.

The gateway's turns are token ids. Text of a client's dialect is rendered and derendered by
`vllm launch render`, a process without a GPU, or by a dedicated engine, which serves the same
routes; never in the gateway's event loop. Faults that vLLM finds in a request go to its client as
vLLM words them. Streamed text needs vLLM 0.27, with a tool or reasoning parser 0.31.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, closing, nullcontext, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from harvester.contracts.errors import (
    UNDECODABLE,
    Exhausted,
    PeerProtocolError,
    RoseMuxError,
    reason_of,
)
from harvester.contracts.event_limit import EventLimit
from harvester.platform.backoff import Interrupted
from scheduler.gateway.dialects.text_dialect import Body, Dialect
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.engines.engine_connections import ConnectionFailed, EngineConnections
from scheduler.gateway.engines.engine_faults import names_context
from scheduler.gateway.loop_share import in_shares
from scheduler.gateway.settings import RendererSettings, Timeouts
from scheduler.model import EngineKind

_MOST_BYTES = 64 << 20
_RENDERS = 64
"""Requests that are rendered, and replies that are derendered, at once. A step's thousands wait for
each other here, where their wait does not count against the time limit of a call."""
_TOKENIZED = 8
"""Texts of one request that are tokenised at once, so that thousands of them leave places to the
requests of others."""
_WRONG_REQUEST = (400, 413, 422)
"""Replies that every renderer would give; after any other the next one is tried."""
_AWAY = (429, 502, 503, 504)
"""Replies of a renderer, or of a proxy before it, that is not there or takes no more."""
_MALFORMED = (PeerProtocolError, *UNDECODABLE)
_BROKEN = (TimeoutError, ConnectionError, *_MALFORMED)
_DEFAULT_OUTPUT_TOKENS = 16
"""vLLM leaves it out of a rendered request."""
_PROBE_S = 0.1
"""Time between the calls that look whether an absent renderer is back."""
_FAILURES = 3
"""Calls that reach a renderer and fail there, by one request: it may be the request that fails."""
_DERENDERED_BYTES = 4 << 20
"""Completions of one call, encoded: its reply is decoded in one piece, in some 50 ms."""
_SEED_TOKENS = 64
"""The end of a prompt, from which text is decoded where no parser reads all of it."""
_CHARACTER_TOKENS = 4
"""Tokens that a character is made of, at most."""
_DECODING = ("skip_special_tokens", "spaces_between_special_tokens", "return_token_ids")
_ENCODER = msgspec.json.Encoder()
_log = logging.getLogger(__name__)

_CallLimit = AbstractAsyncContextManager[None]


class RenderRefused(RoseMuxError):  # noqa: N818 - an answer, not a fault
    """vLLM refuses the request: `status` and `body` are its reply."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(body[:500].decode(errors="replace"))
        self.status = status
        self.body = body


class RendererFault(RoseMuxError):  # noqa: N818 - named for the party
    """Renderers answer, and not as vLLM does: no fault of the request."""

    status = 502


class _Rendered(msgspec.Struct):
    token_ids: tuple[int, ...]
    sampling_params: Body


class _Tokenized(msgspec.Struct):
    tokens: tuple[int, ...]


class RenderEndpoint(NamedTuple):
    """A process that renders."""

    connections: EngineConnections
    short_tokens: int = 0
    """The renderer's context if another's is longer, for requests too long for it; else 0."""


class RenderEndpoints:
    """The processes that render: those that are configured, else the dedicated engines."""

    def __init__(
        self, renderers: Sequence[RendererSettings], registry: EngineRegistry, *, connect_s: float
    ) -> None:
        self._configured = [
            EngineConnections(given.url, connect_s=connect_s, credentials=given)
            for given in renderers
        ]
        self._registry = registry

    def in_order(self) -> list[RenderEndpoint]:
        """The configured renderers; without any, the dedicated engines that are up, the longest
        context first. Raises Exhausted without an engine."""
        if self._configured:
            return [*map(RenderEndpoint, self._configured)]
        members = self._registry.members.values()
        engines = [each for each in members if each.engine.kind is EngineKind.DEDICATED]
        if not engines:
            raise Exhausted(
                "text cannot be rendered: no renderer or dedicated engine is configured"
            )
        engines.sort(key=lambda each: -each.context_tokens)
        longest = engines[0].context_tokens
        return [
            RenderEndpoint(
                each.client.connections,
                short_tokens=each.context_tokens if each.context_tokens < longest else 0,
            )
            for each in engines
            if each.up
        ]

    def close(self) -> None:
        for connections in self._configured:
            connections.close()


class _Away(Interrupted):
    """No renderer can be reached for now."""


class _Malformed(Interrupted):
    """Every renderer that answers sends replies unlike vLLM's."""


class _TooLong(Interrupted):
    """The context of every reachable renderer is too short for the request."""


class Renderer:
    """A call goes on to the next endpoint where one does not answer.

    A call whose renderers are away waits for them for `queue_s`. One waiting call probes for all,
    so that a renderer that is back is found at once and is not flooded. A request that is too long
    for the reachable renderers waits for one with a longer context.
    """

    def __init__(self, endpoints: RenderEndpoints, times: Timeouts) -> None:
        self._endpoints = endpoints
        self._render_s = times.render_s
        self._patience_s = times.queue_s
        self._renders, self._derenders = (asyncio.Semaphore(_RENDERS) for _ in range(2))
        self._away, self._returns, self._fault = False, 0, ""
        self._looking = asyncio.Lock()
        self._malformed = EventLimit.of_lines()

    async def render(self, dialect: Dialect, request: Body) -> list[Body]:
        """A generate request for each prompt. Raises RenderRefused, RendererFault, Exhausted."""
        of, path = _Rendered | tuple[_Rendered, ...], f"{dialect.route}/render"
        rendered = await self.post(path, request, of=of, limit=self._renders)
        return rendered if isinstance(rendered, list) else [rendered]

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text. Raises RenderRefused, Exhausted."""
        own = asyncio.Semaphore(_TOKENIZED)

        async def tokens(text: str) -> list[int]:
            async with own:
                body = {"prompt": text}
                tokenized = await self.post("/tokenize", body, of=_Tokenized, limit=self._renders)
                found: list[int] = tokenized["tokens"]
                return found

        return await asyncio.gather(*map(tokens, texts))

    async def derender(
        self,
        dialect: Dialect,
        request: Body,
        prompts: Sequence[Sequence[int]],
        responses: Iterable[Body],
    ) -> Body:
        """The reply of the dialect; `responses` are made as they are encoded, one for each prompt.
        Many large ones are several calls. Raises RenderRefused, Exhausted."""
        counts: list[int] = []

        def encode(response: Body) -> msgspec.Raw:
            counts.append(len(response["choices"]))
            return msgspec.Raw(_ENCODER.encode(response))

        encoded = await in_shares(map(encode, responses))
        if not dialect.many:
            (prompt,), count = prompts, counts[0]
            return await self._derender(dialect, request, prompt, len(prompt), encoded[0], count)
        parts, size_bytes = [0], 0
        for at, each in enumerate(encoded):
            size_bytes += len(bytes(each))
            if size_bytes > _DERENDERED_BYTES and at > parts[-1]:
                parts.append(at)
                size_bytes = len(bytes(each))
        if len(parts) > 1:
            # No parser reads a completion's text, and its request may have thousands of prompts.
            request = request | dialect.empty
        reply, choices = {}, []
        for start, end in pairwise((*parts, len(encoded))):
            part = prompts[start:end]
            seeds, lengths = [each[-_SEED_TOKENS:] for each in part], list(map(len, part))
            own, count = encoded[start:end], sum(counts[start:end])
            reply = await self._derender(dialect, request, seeds, lengths, own, count)
            choices += reply["choices"]
        return reply | {"choices": choices}

    async def _derender(
        self, dialect: Dialect, request: Any, prompts: Any, lengths: Any, responses: Any, count: int
    ) -> Body:
        body = {"prompt_token_ids": prompts, "prompt_tokens": lengths}
        body |= {dialect.response_field: responses, dialect.request_field: request}
        path, limit = f"{dialect.route}/derender", self._derenders
        reply: Body = await self.post(path, body, of=dialect.whole, limit=limit)
        if len(reply["choices"]) != count:
            raise self._fault_of(f"{path}: {len(reply['choices'])} choices, not {count}")
        return reply

    async def derender_chunk(
        self, text: "StreamedText", prompt: Sequence[int], chunk: Body, state: Body | None
    ) -> tuple[Body, Body]:
        """A chunk of the dialect's stream, and the state to send with the choice's next one."""
        body = {"stream": True, "generate_chunk": chunk, "stream_state": state}
        body, path = body | text.beside(prompt, state), f"{text.dialect.route}/derender"
        reply = await self.post(path, body, of=text.dialect.part)
        rendered: Body = reply["chunk"]
        for each, choice in zip(rendered["choices"], chunk["choices"], strict=False):
            content = (choice.get("logprobs") or {}).get("content")
            left_out = each.get("logprobs") is None and not text.dialect.many
            if content and left_out and text.shows_reasoning:
                each["logprobs"] = await self._logprobs(text, choice, state)
        return rendered, reply["stream_state"]

    async def _logprobs(
        self, text: "StreamedText", choice: Body, state: Body | None
    ) -> Body | None:
        """Log-probabilities of a chunk, which vLLM omits where a parser reads a stream: rendered as
        for a whole reply, after the tokens in which a character may have begun. Prompt and tools
        are not sent: no parser needs them here, and one may refuse part of a tool call."""
        before = ((state or {}).get("output_token_ids") or [])[-_CHARACTER_TOKENS:]
        content = [
            {"token_id": one, "token": "", "logprob": 0.0, "top_logprobs": []} for one in before
        ]
        content += choice["logprobs"]["content"]
        whole = choice | {"token_ids": [*before, *choice["token_ids"]]}
        response = {"request_id": "", "choices": [whole | {"logprobs": {"content": content}}]}
        reply = await self._derender(text.dialect, text.least, text.seed, 0, response, 1)
        logprobs: Body | None = reply["choices"][0].get("logprobs")
        return logprobs and logprobs | {"content": (logprobs["content"] or ())[len(before) :]}

    async def post(
        self, path: str, body: Body, *, of: Any = Any, limit: _CallLimit = nullcontext()
    ) -> Any:
        """The reply to a request that changes nothing, with the fields that the type `of` has.
        Raises RenderRefused, RendererFault, Exhausted."""
        data, failures, back, fault, malformed = _ENCODER.encode(body), 0, -1, "", False
        now, too_long = asyncio.get_running_loop().time, False
        # A call that no renderer got while one was back starts its wait again.
        while failures < _FAILURES and back != self._returns:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as patience:
                    while failures < _FAILURES:
                        try:
                            if not self._away:
                                patience.reschedule(patience.when() if too_long else None)
                                return await self._ask(path, data, of, limit)
                            if patience.when() is None:
                                back = self._returns
                                patience.reschedule(now() + self._patience_s)
                            async with self._looking:
                                if self._away:
                                    await asyncio.sleep(_PROBE_S)
                                    return await self._ask(path, data, of, limit)
                        except _TooLong as error:
                            fault, too_long, back = str(error), True, self._returns
                            if patience.when() is None:
                                patience.reschedule(now() + self._patience_s)
                            await asyncio.sleep(_PROBE_S)
                        except Interrupted as error:
                            failures += not isinstance(error, _Away)
                            fault, malformed = str(error), isinstance(error, _Malformed)
                            self._fault = fault
        if malformed:
            raise self._fault_of(fault)
        raise Exhausted(f"text cannot be rendered: {fault or self._fault}")

    def _fault_of(self, fault: str) -> RendererFault:
        if self._malformed.admits(now=asyncio.get_running_loop().time()):
            more = f"; {n} such replies before it" if (n := self._malformed.taken()) else ""
            _log.warning("text cannot be rendered: malformed reply: %s%s", fault, more)
        return RendererFault(f"text cannot be rendered: malformed reply: {fault}")

    async def _ask(self, path: str, data: bytes, of: Any, limit: _CallLimit) -> Any:
        """Asks each renderer once. Raises RenderRefused, Interrupted."""
        fault, away = "no dedicated engine is up and no renderer is configured", True
        too_long = malformed = False
        async with limit:
            for peer, short_tokens in self._endpoints.in_order():
                try:
                    async with asyncio.timeout(self._render_s):
                        response = await peer.post(path, data, {})
                        with closing(response):
                            raw = await response.read_most(_MOST_BYTES + 1)
                    if response.status in (200, *_WRONG_REQUEST):
                        self._found(away=False)
                    shown = raw[:200].decode(errors="replace")
                    if response.status == 200 and len(raw) > _MOST_BYTES:
                        more = f"a reply of more than {_MOST_BYTES} bytes; request less at once"
                        raise RendererFault(f"text cannot be rendered: {peer.url}{path}: {more}")
                    if response.status == 200:
                        reply = msgspec.json.decode(raw)
                        msgspec.convert(reply, of)
                        if not (short_tokens and _fills(reply, short_tokens)):
                            return reply
                        too_long, shown = True, f"its context of {short_tokens} tokens is full"
                    if response.status in _WRONG_REQUEST:
                        if not (short_tokens and names_context(raw.decode(errors="replace"))):
                            raise RenderRefused(response.status, raw)
                        too_long = True
                    away &= response.status in _AWAY
                    fault = f"{peer.url}{path}: {response.status} {shown}"
                except _BROKEN as error:
                    fault = f"{peer.url}{path}: {reason_of(error)[:200]}"
                    away &= isinstance(error, ConnectionFailed)
                    malformed |= isinstance(error, _MALFORMED)
        self._found(away=away)
        kind = _Away if away else _TooLong if too_long else _Malformed if malformed else Interrupted
        raise kind(fault)

    def _found(self, *, away: bool) -> None:
        self._returns += self._away and not away
        self._away = away


def _fills(rendered: Any, context_tokens: int) -> bool:
    """Whether a prompt's output fills the rest of the context, to which vLLM cuts `max_tokens`."""
    for each in rendered if isinstance(rendered, list) else [rendered]:
        if isinstance(each, dict) and "token_ids" in each:
            output_tokens = each["sampling_params"].get("max_tokens") or _DEFAULT_OUTPUT_TOKENS
            if len(each["token_ids"]) + output_tokens >= context_tokens:
                return True
    return False


class StreamedText:
    """The part of a request that goes with the chunks of its stream: the fields for decoding."""

    def __init__(self, dialect: Dialect, request: Body, prompt: Sequence[int]) -> None:
        """`prompt`: the first one; a dialect whose text is parsed has no other."""
        self.dialect = dialect
        self._whole = msgspec.Raw(_ENCODER.encode(request))
        self.shows_reasoning = request.get("include_reasoning") is not False
        self.seed = prompt[-_SEED_TOKENS:]
        self._prompt = msgspec.Raw(_ENCODER.encode(prompt))
        self.least = dialect.empty | {n: request[n] for n in _DECODING if n in request}

    def beside(self, prompt: Sequence[int], state: Body | None) -> Body:
        """A chunk's fields. A parser needs the whole request and prompt with each chunk, and the
        state holds the output; without one only the first chunk needs the prompt."""
        field = self.dialect.request_field
        if self.dialect.many:
            # No parser reads a completion's text, and its request may have thousands of prompts.
            seed = {} if state is not None else {"prompt_token_ids": prompt[-_SEED_TOKENS:]}
            return {field: self.least} | seed
        if state is not None and state.get("prev_tokens") and not state.get("output_token_ids"):
            return {field: self.least}
        return {"prompt_token_ids": self._prompt, field: self._whole}
