"""OpenAI's routes over the gateway's turns.

GET  /v1/models
POST /v1/chat/completions   POST /v1/completions    JSON, or SSE with "stream": true
POST /tokenize              POST /detokenize        as vLLM's own

A request is rendered to prompts of token ids (renderer.py), each prompt and each of its `n` samples
is a turn of its own, and the turns' tokens are derendered to the dialect's reply, with what RL
clients ask vLLM for (`return_token_ids`, `logprobs`) and the spans of each choice's versions. A
client that leaves takes all of its turns with it.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from harvester.contracts.errors import PeerProtocolError, RoseMuxError
from harvester.contracts.ids import JobId, TrajectoryId
from harvester.contracts.wire.leases import SESSION_HEADER
from harvester.contracts.wire.rollouts import Choice, FinishReason, GenerateRequest
from harvester.platform.http_kit import decoded_body, json_reply
from scheduler.gateway.renderer import CHAT, COMPLETION, Body, Dialect
from scheduler.gateway.requests import checked_trajectory, stop_strings
from scheduler.gateway.samples import Samples, follow, samples_of
from scheduler.gateway.scheduler import Scheduler

_ENCODER = msgspec.json.Encoder()
OPENAI_ROUTES = frozenset(("/v1/models", CHAT.route, COMPLETION.route))
SESSION_HEADERS = (
    SESSION_HEADER,
    "X-SMG-Routing-Key",
    "X-Multi-Turn-Session-ID",
    "X-Session-Affinity",
)
"""Names under which RL frameworks send a trajectory's identity; the first one that is there."""
_OWN_FIELDS = ("weight_version", "session_id", "model", "stream", "stream_options", "cache_salt")
"""Fields that the gateway answers itself; the renderer is given all others."""
_RENDERER_FIELDS = ("skip_clone", "output_kind", "output_text_buffer_length")
"""Sampling fields of a rendered request that mean something within vLLM only."""

MAX_TURNS = 1 << 14
"""Turns of one request, over all of its prompts: as many as may wait in the queue."""

JobOf: TypeAlias = Callable[[web.Request], JobId]
Admit: TypeAlias = Callable[[JobId, bytes], GenerateRequest]
"""Decodes and checks the body of a generate request of the job."""


class TextRoutes:
    def __init__(self, scheduler: Scheduler, job_of: JobOf, admit: Admit) -> None:
        self._scheduler = scheduler
        self._renderer = scheduler.renderer
        self._job_of = job_of
        self._admit = admit

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self._models),
            web.post(CHAT.route, self._chat),
            web.post(COMPLETION.route, self._completion),
            web.post("/tokenize", self._passed_on),
            web.post("/detokenize", self._passed_on),
        ]

    async def _models(self, request: web.Request) -> web.Response:
        names = sorted(self._scheduler.model_names(self._job_of(request)))
        models = [{"id": name, "object": "model", "owned_by": "rosemux"} for name in names]
        return json_reply({"object": "list", "data": models})

    async def _passed_on(self, request: web.Request) -> web.Response:
        self._job_of(request)
        body = await json_object(request)
        body.pop("model", None)
        return json_reply(await self._renderer.post(request.path, body))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CHAT)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, COMPLETION)

    async def _serve(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        job = self._job_of(request)
        text = _TextRequest(dialect, job, await json_object(request))
        rendered = await self._renderer.render(dialect, text.to_render)
        check_count(len(rendered))
        prompts = [self._admit(job, text.generate(each, i)) for i, each in enumerate(rendered)]
        turns = turns_of(prompts)
        trajectory = trajectory_of(request, text.name, text.session)
        async with follow(self._scheduler, job, trajectory, turns) as samples:
            if text.stream:
                return await self._stream(request, text, samples, turns)
            await samples.results()
            return json_reply(await self._whole(text, prompts, turns, samples))

    async def _whole(
        self,
        text: "_TextRequest",
        prompts: list[GenerateRequest],
        turns: list[GenerateRequest],
        samples: Samples,
    ) -> Body:
        choices = [turn.choice() for turn in samples.turns if turn is not None]
        per_prompt = len(turns) // len(prompts)
        responses = []
        for index, prompt in enumerate(prompts):
            own = choices[index * per_prompt : (index + 1) * per_prompt]
            told = [text.engine_choice(choice, prompt, i) for i, choice in enumerate(own)]
            responses.append({"request_id": text.name, "choices": told})
        reply = await self._renderer.derender(
            text.dialect, text.to_render, [list(prompt.token_ids) for prompt in prompts], responses
        )
        reply |= {"id": text.name, "model": text.model}
        for index, told in enumerate(reply["choices"]):
            choice = msgspec.structs.replace(choices[index], index=index)
            text.end_text(told, choice, turns[index])
            text.complete(told, choice, turns[index])
        reply["usage"] = msgspec.to_builtins(samples.usage())
        if text.returns_ids and not text.dialect.many:
            reply["prompt_token_ids"] = prompts[0].token_ids
        return reply

    async def _stream(
        self,
        request: web.Request,
        text: "_TextRequest",
        samples: Samples,
        turns: list[GenerateRequest],
    ) -> web.StreamResponse:
        states: dict[int, Body | None] = {}
        texts = [StoppedText(turn) for turn in turns]
        async with event_stream(request) as send:
            async for choice in samples.chunks():
                turn = turns[choice.index]
                chunk = {
                    "request_id": text.name,
                    "choices": [text.engine_choice(choice, turn, choice.index)],
                }
                told, states[choice.index] = await self._renderer.derender_chunk(
                    text.dialect,
                    text.to_render,
                    list(turn.token_ids),
                    chunk,
                    states.get(choice.index),
                )
                told |= {"id": text.name, "model": text.model}
                told.pop("usage", None)
                for each in told["choices"]:
                    text.change_streamed(each, texts[choice.index], choice)
                    text.complete(each, choice, turn)
                await send(told)
            if wants_usage(text.stream_options):
                usage = msgspec.to_builtins(samples.usage())
                kind = text.dialect.chunk_object
                await send(
                    {
                        "id": text.name,
                        "object": kind,
                        "model": text.model,
                        "choices": [],
                        "usage": usage,
                    }
                )
        return send.response


class _TextRequest:
    """A request of one of OpenAI's dialects: what of it the renderer gets, and what is our own."""

    def __init__(self, dialect: Dialect, job: JobId, body: Body) -> None:
        prefix = "cmpl" if dialect.many else "chatcmpl"
        self.dialect = dialect
        self.name = f"{prefix}-{secrets.token_hex(16)}"
        self.model = body.get("model") or job
        self.session = body.get("session_id")
        self.stream = bool(body.get("stream"))
        self.stream_options = body.get("stream_options")
        self.returns_ids = bool(body.get("return_token_ids"))
        self._version = body.get("weight_version")
        self._salt = body.get("cache_salt")
        self._asked_model = body.get("model")
        self.to_render = {name: value for name, value in body.items() if name not in _OWN_FIELDS}

    def generate(self, rendered: Body, index: int) -> bytes:
        """The body of a generate request for a rendered prompt."""
        own: Body = {
            "request_id": f"{self.name}-{index}",
            "model": self._asked_model,
            "cache_salt": self._salt,
            "stream": False,
            "stream_options": None,
        }
        if self._version is not None:
            own["weight_version"] = self._version
        given = rendered["sampling_params"].items()
        sampling = {name: value for name, value in given if name not in _RENDERER_FIELDS}
        own["sampling_params"] = {"logprobs": None} | sampling
        return _ENCODER.encode(rendered | own)

    def engine_choice(self, choice: Choice, turn: GenerateRequest, index: int) -> Body:
        """The choice as an engine's reply has it, for the renderer.

        Without the stop token that ended it, which is not part of the text.
        """
        sampling = turn.sampling_params
        ids = choice.token_ids[: text_tokens(choice, turn)]
        content: Any = choice.logprobs.content[: len(ids)]
        if sampling.logprobs == 1:
            # The one candidate that was asked for is the sampled token itself.
            content = [msgspec.structs.replace(each, top_logprobs=(each,)) for each in content]
        whole = choice.finish_reason is not None
        return {
            "index": index,
            # vLLM derenders no choice without tokens; `end_text` takes their text away again.
            "token_ids": ids or (choice.token_ids or turn.token_ids[-1:] if whole else ids),
            "logprobs": None if sampling.logprobs is None or not ids else {"content": content},
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def change_streamed(self, told: Body, held: "StoppedText", choice: Choice) -> None:
        """Passes a chunk's text through what is held back; vLLM's last chunk may have none."""
        holder, name = (told, "text") if self.dialect.many else (_message(told), "content")
        text = holder.get(name)
        if isinstance(text, str) or held.holds:
            holder[name] = held.feed(text or "", choice)

    def change_text(self, told: Body, change: Callable[[str], str]) -> None:
        """Changes the text of a choice of the reply, where it has one."""
        holder, name = (told, "text") if self.dialect.many else (_message(told), "content")
        if isinstance(holder.get(name), str):
            holder[name] = change(holder[name])

    def end_text(self, told: Body, choice: Choice, turn: GenerateRequest) -> None:
        """Cuts the whole text of a choice at its stop string, and empties that of no tokens."""
        sampling = turn.sampling_params
        if not text_tokens(choice, turn):
            self.change_text(told, lambda _text: "")
        elif not sampling.include_stop_str_in_output:
            stops = stop_strings(sampling)
            self.change_text(
                told, partial(without_stop, stop_reason=choice.stop_reason, stops=stops)
            )

    def complete(self, told: Body, choice: Choice, turn: GenerateRequest) -> None:
        """Adds to a choice of the reply what the renderer does not know of."""
        spans = msgspec.to_builtins(choice.spans)
        told |= {"index": choice.index, "stop_reason": choice.stop_reason, "spans": spans}
        if choice.finish_reason is not None:
            told["weight_versions"] = [
                {"version": str(span["version"]), "start": span["start"], "end": span["end"]}
                for span in spans
            ]
        if choice.fault:
            told["fault"] = choice.fault
        if self.returns_ids:
            told["token_ids"] = choice.token_ids
            if self.dialect.many:
                told["prompt_token_ids"] = turn.token_ids


def _message(choice: Body) -> Body:
    """A chat choice's whole message, or a chunk's part of it."""
    message: Body = choice.get("message") or choice.get("delta") or {}
    return message


class StoppedText:
    """The text of one streamed choice, without the stop string that ends it.

    A tail as long as a stop string is held back until it is known not to begin one.
    """

    def __init__(self, turn: GenerateRequest) -> None:
        sampling = turn.sampling_params
        stops = () if sampling.include_stop_str_in_output else stop_strings(sampling)
        self._hold_chars = max(map(len, stops), default=1) - 1
        self._stops = stops
        self._held = ""

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def feed(self, text: str, choice: Choice) -> str:
        """The text that may be sent now."""
        self._held += text
        if choice.finish_reason is not None:
            text, self._held = self._held, ""
            return without_stop(text, choice.stop_reason, self._stops)
        cut = len(self._held) - self._hold_chars
        ready, self._held = self._held[: max(0, cut)], self._held[max(0, cut) :]
        return ready


def without_stop(text: str, stop_reason: int | str | None, stops: Collection[str]) -> str:
    """The text before the stop string that ended it; vLLM also names other reasons as strings."""
    if not isinstance(stop_reason, str) or stop_reason not in stops:
        return text
    found = text.find(stop_reason)
    return text if found < 0 else text[:found]


def text_tokens(choice: Choice, turn: GenerateRequest) -> int:
    """How many of its tokens are text: all but the stop token or EOS that ended it."""
    ended = choice.finish_reason is FinishReason.STOP and not isinstance(choice.stop_reason, str)
    kept = turn.sampling_params.include_stop_str_in_output
    return len(choice.token_ids) - (ended and not kept and bool(choice.token_ids))


def check_count(prompts: int) -> None:
    if not 0 < prompts <= MAX_TURNS:
        raise PeerProtocolError(f"{prompts} prompts: send 1 to {MAX_TURNS} in a request")


def turns_of(prompts: list[GenerateRequest]) -> list[GenerateRequest]:
    """The turns of all prompts. Raises PeerProtocolError for more than the queue would hold."""
    count = sum(prompt.sampling_params.n for prompt in prompts)
    if count > MAX_TURNS:
        raise PeerProtocolError(f"{count} samples: a request may ask for {MAX_TURNS}")
    return [turn for prompt in prompts for turn in samples_of(prompt)]


def trajectory_of(request: web.Request, name: str, session: object = None) -> TrajectoryId:
    """Identity from the first session header, else the `session_id`, else the request itself."""
    given = next(
        (request.headers[each] for each in SESSION_HEADERS if each in request.headers), None
    )
    if given is None and session is not None:
        if not isinstance(session, str):
            raise PeerProtocolError("session_id: send a string")
        given = session
    return checked_trajectory(given, request_id=name)


def wants_usage(stream_options: object) -> bool:
    return isinstance(stream_options, dict) and bool(stream_options.get("include_usage"))


class EventSender:
    """Server-sent events of one reply; its status is decided by what comes before the first."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._request = request

    async def __call__(self, event: object) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(b"data: " + _ENCODER.encode(event) + b"\n\n")


@asynccontextmanager
async def event_stream(request: web.Request) -> AsyncIterator[EventSender]:
    """Ends the stream by `[DONE]`, or by an error event where a fault comes after the start."""
    send = EventSender(request)
    try:
        yield send
    except (RoseMuxError, web.HTTPException) as error:
        if not send.response.prepared:
            raise
        await send({"error": {"message": str(error), "code": getattr(error, "status", 500)}})
    if not send.response.prepared:
        await send.response.prepare(request)
    await send.response.write(b"data: [DONE]\n\n")
    await send.response.write_eof()


async def json_object(request: web.Request) -> Body:
    return await decoded_body(request, dict[str, Any], name="body")
