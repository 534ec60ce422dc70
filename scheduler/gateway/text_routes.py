"""OpenAI's routes over the gateway's turns.

GET  /v1/models    /v1/models/{model}
POST /v1/chat/completions   POST /v1/completions    JSON, or SSE with "stream": true
POST .../render    POST /tokenize    POST /detokenize    as vLLM's own

A request is rendered to prompts of token ids (renderer.py), each prompt and each of its `n` samples
is a turn of its own, and the turns' tokens are derendered to the dialect's reply, with what RL
clients ask vLLM for (`return_token_ids`, `logprobs`) and the spans of each choice's versions. A
client that leaves takes all of its turns with it.
"""

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import JobId, TrajectoryId
from harvester.contracts.wire.leases import SESSION_HEADER
from harvester.contracts.wire.rollouts import (
    Choice,
    FinishReason,
    GenerateRequest,
    Logprobs,
    TokenLogprob,
)
from harvester.platform.http_kit import decoded_body, json_reply
from scheduler.gateway.event_stream import event_stream
from scheduler.gateway.job_paths import route_of
from scheduler.gateway.loop_share import LoopShare, in_shares
from scheduler.gateway.renderer import CHAT, COMPLETION, Body, Dialect, StreamedText
from scheduler.gateway.requests import checked_trajectory
from scheduler.gateway.samples import Samples, follow, samples_of
from scheduler.gateway.scheduler import Scheduler
from scheduler.gateway.stopped_text import (
    StoppedText,
    StoppedTexts,
    early_parts,
    in_parts,
    text_tokens,
    without_stop,
)
from scheduler.gateway.text_fields import (
    MEDIA_SETTINGS,
    OWN_FIELDS,
    PIN_FIELDS,
    SESSION_FIELDS,
    check_fields,
    check_media,
)
from scheduler.gateway.text_logprobs import (
    name_by_id,
    of_prompt,
    prompt_logprobs,
    renderer_logprob,
)

_ENCODER = msgspec.json.Encoder()
MODEL_ROUTE = "/v1/models/{model:.+}"
OPENAI_ROUTES = frozenset(("/v1/models", "/v1/models/{model}", CHAT.route, COMPLETION.route))
RENDERER_ROUTES = (
    *(f"{dialect.route}/render" for dialect in (CHAT, COMPLETION)),
    *("/tokenize", "/detokenize"),
)
"""vLLM's own, which the renderer answers."""
REQUEST_ID_HEADER = "X-Request-Id"
SESSION_HEADERS = (
    SESSION_HEADER,
    "X-SMG-Routing-Key",
    "X-Multi-Turn-Session-ID",
    "X-Session-Affinity",
    "X-Claude-Code-Session-ID",
    "Session-ID",
    "Modal-Session-ID",
)
"""Headers under which RL frameworks, routers and harnesses name a trajectory, the first that is
there: SkyRL, verifiers, prime-rl and vllm-router; slime, miles and sglang-router; Fireworks (two);
harnesses that vllm-router knows (two); Modal's stitch. Names of users, tenants and single requests
are no trajectories."""
_RENDERER_FIELDS = ("skip_clone", "output_kind", "output_text_buffer_length")
"""Sampling fields of a rendered request that mean something within vLLM only."""
_RENDERED_DEFAULTS = {"logprobs": None, "max_tokens": 16}
"""vLLM leaves out of a rendered request what equals its own default; these are not ours."""

CHUNK_PERIOD_S = 0.05
"""Between the chunks of a choice's streamed text: each costs a call to the renderer, and a reader
of text sees no difference. The first chunk and the last one do not wait."""
_NAME_CHARS = 128
"""The part of a request's id that its turns' names have: proxies set long ones."""
_MAX_NAME_CHARS = 1 << 13
"""The length of the largest header: every chunk of the reply repeats the id."""
MAX_TURNS = 1 << 14
"""Turns of one request, over all of its prompts: as many as may wait in the queue."""

_MESSAGE_TEXTS = ("reasoning_content", "reasoning", "content")
"""Texts of a chat message, as vLLM's parsers part the output; the first is the older name."""
_NO_PROMPT: Body = {"token_ids": (0,), "sampling_params": {"max_tokens": 1}}
_OVER = Choice(finish_reason=FinishReason.LENGTH)
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
            web.get(MODEL_ROUTE, self._model),
            web.post(CHAT.route, self._chat),
            web.post(COMPLETION.route, self._completion),
            *(web.post(route, self._passed_on) for route in RENDERER_ROUTES),
        ]

    async def _models(self, request: web.Request) -> web.Response:
        return json_reply({"object": "list", "data": self._cards(request)})

    async def _model(self, request: web.Request) -> web.Response:
        for card in self._cards(request):
            if card["id"] == request.match_info["model"]:
                return json_reply(card)
        raise web.HTTPNotFound(reason="no such model; GET /v1/models names them")

    def _cards(self, request: web.Request) -> list[Body]:
        names = sorted(self._scheduler.model_names(self._job_of(request)))
        card: Body = {"object": "model", "owned_by": "rosemux"}
        # vLLM's name for it; a turn that fits one engine is served.
        if context_tokens := self._scheduler.fleet.context_tokens():
            card["max_model_len"] = context_tokens
        return [{"id": name} | card for name in names]

    async def _passed_on(self, request: web.Request) -> web.Response:
        self._job_of(request)
        body = await json_object(request)
        check_media(body)
        for name in ("model", *MEDIA_SETTINGS):
            body.pop(name, None)
        return json_reply(await self._renderer.post(route_of(request), body))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CHAT)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, COMPLETION)

    async def _serve(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        job = self._job_of(request)
        body, named = await json_object(request), request.headers.get(REQUEST_ID_HEADER)
        text = _TextRequest(dialect, job, body, named)
        with suppress(Exhausted):
            # Refused at once for what needs no prompt; an engine to come may have the model.
            self._admit(job, text.generate(_NO_PROMPT, 0))
        rendered = await self._renderer.render(dialect, text.to_render)
        check_count(len(rendered))
        prompts = await in_shares(
            self._admit(job, text.generate(each, i)) for i, each in enumerate(rendered)
        )
        turns = await turns_of(prompts)
        trajectory = trajectory_of(request, text.turn_name, text.session)
        async with follow(self._scheduler, job, trajectory, turns, name=text.name) as samples:
            if text.stream:
                return await self._stream(request, text, samples, turns)
            await samples.results()
            with samples.rendering():
                return json_reply(await self._whole(text, prompts, turns, samples))

    async def _whole(
        self,
        text: "_TextRequest",
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
        for index, told in enumerate(reply["choices"]):
            choice = msgspec.structs.replace(choices[index], index=index)
            part = before["choices"][index] if early[index] else None
            text.end_text(told, choice, turns[index], before=part)
            text.complete(told, choice, turns[index])
            first = index - index % per_prompt
            if text.dialect.many:
                told.update(samples.prompt_scores(first))
            if text.echoes:
                await self._echo(text, told, turns[index], samples.prompt_scores(first))
            # Thousands of them would be encoded at once.
            made.append(msgspec.Raw(_ENCODER.encode(told)))
            await share.rest()
        reply |= {"id": text.name, "model": text.model, "choices": made}
        reply |= {"usage": msgspec.to_builtins(samples.usage()), **samples.versions()}
        if not text.dialect.many:
            reply |= samples.prompt_scores(0)
            if text.returns_ids:
                reply["prompt_token_ids"] = prompts[0].token_ids
        return reply

    async def _derendered(
        self, text: "_TextRequest", prompts: list[GenerateRequest], choices: list[Choice]
    ) -> Body:
        per_prompt = len(choices) // len(prompts)

        def responses() -> Iterator[Body]:
            for index, prompt in enumerate(prompts):
                own = choices[index * per_prompt : (index + 1) * per_prompt]
                told = [text.engine_choice(choice, prompt, i) for i, choice in enumerate(own)]
                yield {"request_id": text.name, "choices": told}

        ids = [prompt.token_ids for prompt in prompts]
        return await self._renderer.derender(text.dialect, text.to_render, ids, responses())

    async def _echo(
        self, text: "_TextRequest", told: Body, turn: GenerateRequest, scores: Body
    ) -> None:
        """Puts the prompt before a completion, as OpenAI's `echo`: its text, and its tokens'
        log-probabilities, of which the first one has none."""
        sampling, content = turn.sampling_params, []
        if sampling.logprobs is not None and scores:
            scored = await prompt_logprobs(scores, turn.token_ids)
            content = await in_shares(map(of_prompt, turn.token_ids, scored))
        choice = Choice(token_ids=turn.token_ids, logprobs=Logprobs(tuple(content)))
        response = {"request_id": text.name, "choices": [text.engine_choice(choice, turn, 0)]}
        reply = await self._renderer.derender(text.dialect, text.to_render, [[]], [response])
        (echo,) = reply["choices"]
        own = told.get("logprobs") if text.generates else None
        told["text"] = echo["text"] + (told["text"] if text.generates else "")
        if content and (logprobs := echo["logprobs"]):
            if text.tokens_as_ids:
                name_by_id(logprobs, content)
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
            for name, values in (own or {}).items():
                shift = len(echo["text"]) if name == "text_offset" else 0
                logprobs[name] += [value + shift for value in values] if shift else values
            told["logprobs"] = logprobs

    async def _stream(
        self,
        request: web.Request,
        text: "_TextRequest",
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
                chunk = {
                    "request_id": text.name,
                    "choices": [text.engine_choice(choice, turn, choice.index)],
                }
                with samples.rendering(choice.index):
                    told, states[choice.index] = await self._renderer.derender_chunk(
                        streamed, turn.token_ids, chunk, states.get(choice.index)
                    )
                told |= {"id": text.name, "model": text.model}
                created = told.get("created", created)
                told |= {} if choice.finish_reason is None else samples.versions(choice.index)
                told.pop("usage", None)
                if wants_usage(options, "include_usage", "continuous_usage_stats"):
                    told["usage"] = msgspec.to_builtins(samples.usage(choice.index))
                if first and text.returns_ids and not text.dialect.many:
                    told["prompt_token_ids"] = turn.token_ids
                for each in told["choices"]:
                    if not text_tokens(choice, turn):
                        # Rendered from a token that is no text of it, since vLLM needs one.
                        text.end_text(each, choice, turn)
                    text.change_streamed(each, texts[choice.index], choice)
                    text.complete(each, choice, turn)
                    if not first:
                        each.pop("prompt_token_ids", None)
                await send(told)
            if wants_usage(options):
                last = {"id": text.name, "object": text.dialect.chunk_object, "model": text.model}
                last["created"] = created
                await send(last | {"choices": [], "usage": msgspec.to_builtins(samples.usage())})
        return send.response


class _TextRequest:
    """A request of one of OpenAI's dialects: what of it the renderer gets, and what is our own."""

    def __init__(self, dialect: Dialect, job: JobId, body: Body, named: str | None = None) -> None:
        """`named`: the id that the client gives the request, unique or not; as vLLM's, it is part
        of the reply's id."""
        prefix = "cmpl" if dialect.many else "chatcmpl"
        unique, named = secrets.token_hex(16), named or body.get("request_id")
        self.dialect = dialect
        if len(str(named or "")) > _MAX_NAME_CHARS:
            raise PeerProtocolError(f"request_id: use at most {_MAX_NAME_CHARS} characters")
        # Bytes of a header that are no UTF-8 cannot be told in the reply.
        self.name = f"{prefix}-{named or unique}".encode(errors="replace").decode()
        shown = "".join(filter(str.isprintable, self.name[:_NAME_CHARS]))
        self.turn_name = f"{shown}-{unique}" if named else self.name
        self.model = body.get("model") or job
        self.session = session_of(body)
        self.stream = bool(body.get("stream"))
        self.stream_options = body.get("stream_options")
        self.returns_ids = bool(body.get("return_token_ids"))
        self._on_interrupt = body.get("on_interrupt")
        self._pins = given(body, PIN_FIELDS)
        self._names_tool = isinstance(body.get("tool_choice"), dict)
        self.tokens_as_ids = bool(body.get("return_tokens_as_token_ids"))
        self.echoes = bool(body.get("echo"))
        self.generates = body.get("max_tokens") != 0
        """Whether an `echo` is followed by what was sampled; the prompt alone is scored without."""
        self._check(body)
        self._salt = body.get("cache_salt")
        self._asked_model = body.get("model")
        not_rendered = OWN_FIELDS | MEDIA_SETTINGS
        self.to_render = {name: value for name, value in body.items() if name not in not_rendered}

    def _check(self, body: Body) -> None:
        """Raises PeerProtocolError for what vLLM's renderer would ignore, or fetch for nothing."""
        check_fields(body, self.dialect.fields)
        check_media(body)
        if self.echoes and (self.stream or not self.dialect.many):
            raise PeerProtocolError("echo: of completions without stream")
        if self.stream and body.get("prompt_logprobs") is not None:
            raise PeerProtocolError("prompt_logprobs: without stream, as in vLLM")
        if body.get("best_of") not in (None, body.get("n") or 1):
            raise PeerProtocolError("best_of: vLLM has none; send n, and choose among its choices")

    def generate(self, rendered: Body, index: int) -> bytes:
        """The body of a generate request for a rendered prompt."""
        own: Body = {
            "request_id": f"{self.turn_name}-{index}",
            "model": self._asked_model,
            "cache_salt": self._salt,
            "on_interrupt": self._on_interrupt,
            "stream": False,
            "stream_options": None,
        }
        own |= self._pins
        given = rendered["sampling_params"].items()
        sampling = {name: value for name, value in given if name not in _RENDERER_FIELDS}
        own["sampling_params"] = _RENDERED_DEFAULTS | sampling
        return _ENCODER.encode(rendered | own)

    def engine_choice(self, choice: Choice, turn: GenerateRequest, index: int) -> Body:
        """The choice as an engine's reply has it, for the renderer.

        Without the stop token that ended it, which is not part of the text; its log-probability
        is part of the reply all the same, as vLLM's own.
        """
        sampling = turn.sampling_params
        ids = choice.token_ids[: text_tokens(choice, turn)]
        content = [renderer_logprob(each) for each in self.candidates(choice, turn)]
        whole = choice.finish_reason is not None
        return {
            "index": index,
            # vLLM derenders no choice without tokens; `end_text` takes their text away again.
            "token_ids": ids or (choice.token_ids or turn.token_ids[-1:] if whole else ids),
            "logprobs": {"content": content} if sampling.lists_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def candidates(self, choice: Choice, turn: GenerateRequest) -> Sequence[TokenLogprob]:
        """Log-probabilities of the choice's tokens, with the candidates that were asked for."""
        content = choice.logprobs.content
        if turn.sampling_params.logprobs != 1:
            return content
        # The one candidate that was asked for is the sampled token itself.
        return [
            each if each.top_logprobs else msgspec.structs.replace(each, top_logprobs=(each,))
            for each in content
        ]

    def _texts(self, told: Body) -> tuple[Body, tuple[str, ...]]:
        """The object that has a choice's texts, and their names in the order of the output."""
        return (told, ("text",)) if self.dialect.many else (_message(told), _MESSAGE_TEXTS)

    def stopped_texts(self, turn: GenerateRequest) -> "StoppedTexts":
        names = ("text",) if self.dialect.many else _MESSAGE_TEXTS
        return {name: StoppedText(turn) for name in names}

    def change_streamed(self, told: Body, held: "StoppedTexts", choice: Choice) -> None:
        """Passes a chunk's texts through what is held back; vLLM's last chunk may have none."""
        holder, names = self._texts(told)
        newest = max((place for place, name in enumerate(names) if holder.get(name)), default=-1)
        for place, name in enumerate(names):
            text = holder.get(name)
            if isinstance(text, str) or held[name].holds:
                # Reasoning is over where content begins, whatever ends that.
                end = _OVER if place < newest else choice
                holder[name] = held[name].feed(text or "", end)

    def end_text(
        self, told: Body, choice: Choice, turn: GenerateRequest, *, before: Body | None = None
    ) -> None:
        """Cuts the whole text of a choice at its stop string, and empties that of no tokens.
        `before`: the choice of its `early_parts`, where it has one."""
        holder, names = self._texts(told)
        name = next((each for each in reversed(names) if holder.get(each)), None)
        if name is None or not isinstance(text := holder[name], str):
            return
        early = self._texts(before)[0].get(name) if before else None
        holder[name] = (
            without_stop(text, choice, turn.sampling_params, before_chars=len(early or ""))
            if text_tokens(choice, turn)
            else ""
        )

    def complete(self, told: Body, choice: Choice, turn: GenerateRequest) -> None:
        """Adds to a choice of the reply what the renderer does not know of."""
        spans = msgspec.to_builtins(choice.spans)
        told |= {"index": choice.index, "stop_reason": choice.stop_reason, "spans": spans}
        if choice.finish_reason not in (None, FinishReason.STOP):
            # vLLM's derenderer takes a call that was cut off for a whole one,
            told["finish_reason"] = choice.finish_reason
        elif choice.finish_reason and not self._names_tool and _message(told).get("tool_calls"):
            # and a whole reply's call for text.
            told["finish_reason"] = "tool_calls"
        if choice.weight_versions is not None:
            told["weight_versions"] = msgspec.to_builtins(choice.weight_versions)
        for name in ("fault", "immovable", "routed_experts", "sampling_mask"):
            if value := getattr(choice, name):
                told[name] = value
        if self.tokens_as_ids and told.get("logprobs"):
            name_by_id(told["logprobs"], self.candidates(choice, turn))
        if self.returns_ids:
            told["token_ids"] = choice.token_ids
            if self.dialect.many:
                told["prompt_token_ids"] = turn.token_ids


def _message(choice: Body) -> Body:
    """A chat choice's whole message, or a chunk's part of it."""
    message: Body = choice.get("message") or choice.get("delta") or {}
    return message


def check_count(prompts: int) -> None:
    if not 0 < prompts <= MAX_TURNS:
        raise PeerProtocolError(f"{prompts} prompts: send 1 to {MAX_TURNS} in a request")


async def turns_of(prompts: list[GenerateRequest]) -> list[GenerateRequest]:
    """The turns of all prompts. Raises PeerProtocolError for more than the queue would hold."""
    count = sum(prompt.sampling_params.n for prompt in prompts)
    if count > MAX_TURNS:
        raise PeerProtocolError(f"{count} samples: a request may ask for {MAX_TURNS}")
    return await in_shares(turn for prompt in prompts for turn in samples_of(prompt))


def session_header(request: web.Request) -> str | None:
    """The session that the first header with a name of one gives."""
    given = (request.headers.get(name) for name in SESSION_HEADERS)
    return next(filter(None, given), None)


def session_of(body: Body) -> str | None:
    """The session that the body's first field of those names. Raises PeerProtocolError."""
    for field in SESSION_FIELDS:
        outer, _, inner = field.partition(".")
        given = body.get(outer)
        if inner:
            given = given.get(inner) if isinstance(given, dict) else None
        if given is not None:
            if not isinstance(given, str):
                raise PeerProtocolError(f"{field}: send a string")
            return given
    return None


def trajectory_of(request: web.Request, name: str, session: str | None = None) -> TrajectoryId:
    """Identity from the first session header, else the body's `session`, else the name."""
    return checked_trajectory(session_header(request) or session, request_id=name)


def given(body: Body, names: Collection[str]) -> Body:
    """The fields of these names that have a value."""
    return {name: body[name] for name in names if body.get(name) is not None}


def wants_usage(stream_options: object, *names: str) -> bool:
    """Whether a stream ends with the usage, or the options of these names are all set."""
    names = names or ("include_usage",)
    return isinstance(stream_options, dict) and all(map(stream_options.get, names))


async def json_object(request: web.Request, *, most_bytes: int | None = None) -> Body:
    return await decoded_body(request, dict[str, Any], most_bytes=most_bytes, name="body")
