"""OpenAI's routes over the gateway's turns, and vLLM's own for the text of their prompts.

A request is rendered to prompts of token ids (renderer.py), each prompt and each of its `n` samples
is a turn of its own, and the turns' tokens are derendered to the dialect's reply, with what RL
clients ask vLLM for (`return_token_ids`, `logprobs`) and the spans of each choice's versions. A
client that leaves takes all of its turns with it.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias

import msgspec
from aiohttp import web

from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import JobId
from harvester.contracts.wire.rollouts import Choice, GenerateRequest, Logprobs, TokenLogprob
from harvester.platform.http_kit import json_reply
from harvester.platform.route_table import Route, several
from scheduler.gateway.dialects.event_stream import event_stream
from scheduler.gateway.dialects.renderer import RendererFault, StreamedText
from scheduler.gateway.dialects.session_names import REQUEST_ID_HEADER, trajectory_of
from scheduler.gateway.dialects.stopped_text import early_parts, in_parts, text_tokens
from scheduler.gateway.dialects.text_dialect import CHAT, COMPLETION, Body
from scheduler.gateway.dialects.text_fields import MEDIA_SETTINGS, check_media
from scheduler.gateway.dialects.text_logprobs import name_by_id, prompt_logprobs
from scheduler.gateway.dialects.text_request import TextRequest
from scheduler.gateway.job_paths import route_of
from scheduler.gateway.loop_share import LoopShare, in_shares
from scheduler.gateway.openapi import TURN
from scheduler.gateway.samples import Samples, follow, samples_of
from scheduler.gateway.scheduler import Scheduler

_ENCODER = msgspec.json.Encoder()
_DIALECTS = {dialect.route: dialect for dialect in (CHAT, COMPLETION)}
OPENAI_ROUTES = frozenset(("/v1/models", "/v1/models/{model}", *_DIALECTS))
RENDERER_ROUTES = (*(f"{route}/render" for route in _DIALECTS), *("/tokenize", "/detokenize"))
"""vLLM's own, which the renderer answers."""
_SAMPLES = (404, 409, 410, 422, 502, 503)
CHUNK_PERIOD_S = 0.05
"""Least time between chunks of a choice's streamed text: each chunk costs a call to the renderer,
and readers see no difference. The first chunk and the last one do not wait."""
MAX_TURNS = 1 << 14
"""Turns of one request, over all of its prompts: as many as may wait in the queue."""

_NO_PROMPT: Body = {"token_ids": (0,), "sampling_params": {"max_tokens": 1}}
Admit: TypeAlias = Callable[[JobId, bytes], GenerateRequest]
"""Decodes and checks the body of a generate request of the job."""


class TextRoutes:
    def __init__(self, scheduler: Scheduler, admit: Admit) -> None:
        self._scheduler = scheduler
        self._renderer = scheduler.renderer
        self._admit = admit

    @Route("GET /v1/models", "Names that `model` may have")
    async def _models(self, job: JobId) -> Body:
        return {"object": "list", "data": self._cards(job)}

    @Route("GET /v1/models/{model:.+}", "One of them; 404 for another name", refuses=(404,))
    async def _model(self, job: JobId, request: web.Request) -> Body:
        for card in self._cards(job):
            if card["id"] == request.match_info["model"]:
                return card
        raise web.HTTPNotFound(reason="no such model; GET /v1/models lists the models")

    def _cards(self, job: JobId) -> list[Body]:
        names = sorted(self._scheduler.registry.model_names(job))
        card: Body = {"object": "model", "owned_by": "rosemux"}
        # vLLM's name for it; a turn that fits one engine is served.
        if context_tokens := self._scheduler.registry.context_tokens():
            card["max_model_len"] = context_tokens
        return [{"id": name} | card for name in names]

    @several(
        Route(
            f"POST {route}",
            "vLLM's, by the renderer",
            answers=Body | list[Body] if route.startswith(COMPLETION.route) else Body,
            refuses=(422, 429, 502, 503),
            body_bytes=None,
        )
        for route in RENDERER_ROUTES
    )
    async def _passed_on(self, request: web.Request, body: Body) -> web.Response:
        check_media(body)
        for name in ("model", *MEDIA_SETTINGS):
            body.pop(name, None)
        return json_reply(await self._renderer.post(route_of(request), body))

    @several(Route(f"POST {route}", "OpenAI's", refuses=_SAMPLES, **TURN) for route in _DIALECTS)
    async def _serve(self, job: JobId, request: web.Request, body: Body) -> web.StreamResponse:
        dialect = _DIALECTS[route_of(request)]
        text = TextRequest(dialect, job, body, request.headers.get(REQUEST_ID_HEADER))
        with suppress(Exhausted):
            # Checks all fields that need no prompt. Exhausted: an engine may join with the model.
            self._admit(job, text.generate(_NO_PROMPT, 0))
        rendered = await self._renderer.render(dialect, text.to_render)
        check_count(len(rendered))
        prompts = await in_shares(
            self._admit(job, text.generate(each, i)) for i, each in enumerate(rendered)
        )
        turns = await turns_of(prompts)
        trajectory = trajectory_of(request, text.turn_name, text.session)
        async with follow(self._scheduler.turns[job], trajectory, turns, name=text.name) as samples:
            if text.stream:
                return await self._stream(request, text, samples, turns)
            await samples.results()
            with samples.rendering():
                return json_reply(await self._whole(text, prompts, turns, samples))

    async def _whole(
        self,
        text: TextRequest,
        prompts: list[GenerateRequest],
        turns: list[GenerateRequest],
        samples: Samples,
    ) -> Body:
        choices = await in_shares(turn.choice() for turn in samples.turns if turn is not None)
        per_prompt = len(turns) // len(prompts)
        reply = await self._derendered(text, prompts, choices)
        early, before = early_parts(choices, turns), reply
        if any(early):
            parts = [part or choice for part, choice in zip(early, choices, strict=True)]
            before = await self._derendered(text, prompts, parts)
        share, made = LoopShare(), []
        for index, reply_choice in enumerate(reply["choices"]):
            choice = msgspec.structs.replace(choices[index], index=index)
            part = before["choices"][index] if early[index] else None
            text.end_text(reply_choice, choice, turns[index], before=part)
            text.complete(reply_choice, choice, turns[index])
            first = index - index % per_prompt
            if text.dialect.many:
                reply_choice.update(samples.prompt_scores(first))
            if text.echoes:
                await self._echo(text, reply_choice, turns[index], samples.prompt_scores(first))
            # Thousands of them would be encoded at once.
            made.append(msgspec.Raw(_ENCODER.encode(reply_choice)))
            await share.rest()
        reply |= {"id": text.name, "model": text.model, "choices": made}
        reply |= {"usage": msgspec.to_builtins(samples.usage()), **samples.versions()}
        if not text.dialect.many:
            reply |= samples.prompt_scores(0)
            if text.returns_ids:
                reply["prompt_token_ids"] = prompts[0].token_ids
        return reply

    async def _derendered(
        self, text: TextRequest, prompts: list[GenerateRequest], choices: list[Choice]
    ) -> Body:
        per_prompt = len(choices) // len(prompts)

        def responses() -> Iterator[Body]:
            for index, prompt in enumerate(prompts):
                own = choices[index * per_prompt : (index + 1) * per_prompt]
                numbered = [text.engine_choice(choice, prompt, i) for i, choice in enumerate(own)]
                yield {"request_id": text.name, "choices": numbered}

        ids = [prompt.token_ids for prompt in prompts]
        return await self._renderer.derender(text.dialect, text.to_render, ids, responses())

    async def _echo(
        self, text: TextRequest, reply_choice: Body, turn: GenerateRequest, scores: Body
    ) -> None:
        """Puts the prompt before a completion, as OpenAI's `echo`: its text, and its tokens'
        log-probabilities, of which the first one has none."""
        content: list[TokenLogprob] = []
        if turn.sampling_params.logprobs is not None and scores:
            content = await prompt_logprobs(scores, turn.token_ids)
        choice = Choice(token_ids=turn.token_ids, logprobs=Logprobs(tuple(content)))
        response = {"request_id": text.name, "choices": [text.engine_choice(choice, turn, 0)]}
        reply = await self._renderer.derender(text.dialect, text.to_render, [[]], [response])
        (echo,) = reply["choices"]
        own = reply_choice.get("logprobs") if text.generates else None
        reply_choice["text"] = echo["text"] + (reply_choice["text"] if text.generates else "")
        if content and (logprobs := echo.get("logprobs")):
            if not (logprobs["token_logprobs"] and logprobs["top_logprobs"]):
                raise RendererFault("a renderer's log-probabilities: none of the prompt's tokens")
            if text.tokens_as_ids:
                name_by_id(logprobs, content)
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
            if own is not None:
                offsets = [len(echo["text"]) + offset for offset in own["text_offset"]]
                logprobs["text_offset"] += offsets
                for name in ("tokens", "token_logprobs", "top_logprobs"):
                    logprobs[name] += own[name]
            reply_choice["logprobs"] = logprobs

    async def _stream(
        self,
        request: web.Request,
        text: TextRequest,
        samples: Samples,
        turns: list[GenerateRequest],
    ) -> web.StreamResponse:
        states: dict[int, Body | None] = {}
        texts = [text.stopped_texts(turn) for turn in turns]
        streamed = StreamedText(text.dialect, text.to_render, turns[0].token_ids)
        options = text.stream_options
        created = 0
        async with event_stream(request) as send:
            async for choice in in_parts(samples.chunks(every_s=CHUNK_PERIOD_S), turns):
                turn, first = turns[choice.index], choice.index not in states
                chunk: Body = {
                    "request_id": text.name,
                    "choices": [text.engine_choice(choice, turn, choice.index)],
                }
                with samples.rendering(choice.index):
                    chunk, states[choice.index] = await self._renderer.derender_chunk(
                        streamed, turn.token_ids, chunk, states.get(choice.index)
                    )
                chunk |= {"id": text.name, "model": text.model}
                created = chunk.get("created", created)
                chunk |= {} if choice.finish_reason is None else samples.versions(choice.index)
                chunk.pop("usage", None)
                if wants_usage(options, "include_usage", "continuous_usage_stats"):
                    chunk["usage"] = msgspec.to_builtins(samples.usage(choice.index))
                if first and text.returns_ids and not text.dialect.many:
                    chunk["prompt_token_ids"] = turn.token_ids
                for each in chunk["choices"]:
                    if not text_tokens(choice, turn):
                        # vLLM needs a token to render: this one is not part of the text.
                        text.end_text(each, choice, turn)
                    text.change_streamed(each, texts[choice.index], choice)
                    text.complete(each, choice, turn)
                    if not first:
                        each.pop("prompt_token_ids", None)
                await send(chunk)
            if wants_usage(options):
                last = {"id": text.name, "object": text.dialect.chunk_object, "model": text.model}
                last["created"] = created
                await send(last | {"choices": [], "usage": msgspec.to_builtins(samples.usage())})
        return send.response


def check_count(prompts: int) -> None:
    if not 0 < prompts <= MAX_TURNS:
        raise PeerProtocolError(f"{prompts} prompts: send 1 to {MAX_TURNS} in a request")


async def turns_of(prompts: list[GenerateRequest]) -> list[GenerateRequest]:
    """The turns of all prompts. Raises PeerProtocolError for more than the queue would hold."""
    count = sum(prompt.sampling_params.n for prompt in prompts)
    if count > MAX_TURNS:
        raise PeerProtocolError(f"{count} samples: a request may ask for {MAX_TURNS}")
    return await in_shares(turn for prompt in prompts for turn in samples_of(prompt))


def wants_usage(stream_options: object, *names: str) -> bool:
    """Whether a stream ends with the usage, or the options of these names are all set."""
    names = names or ("include_usage",)
    return isinstance(stream_options, dict) and all(map(stream_options.get, names))
