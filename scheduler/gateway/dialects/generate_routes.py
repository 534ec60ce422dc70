"""vLLM's generate route: token ids in and out, one choice or several, whole or as a stream."""

import secrets
from typing import Any

import msgspec
from aiohttp import web

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId
from harvester.contracts.wire.rollouts import GENERATE_ROUTE, GenerateReply, GenerateRequest
from harvester.platform.http_kit import json_reply, whole_body
from harvester.platform.route_table import Route
from scheduler.gateway.dialects.event_stream import event_stream
from scheduler.gateway.dialects.session_names import trajectory_of
from scheduler.gateway.dialects.text_logprobs import named_in_parts
from scheduler.gateway.dialects.text_routes import wants_usage
from scheduler.gateway.job_paths import SHOWN_CHARS
from scheduler.gateway.loop_share import LoopShare
from scheduler.gateway.openapi import SAMPLES, TURN
from scheduler.gateway.policy.turn import SHUTTING_DOWN
from scheduler.gateway.requests import decode_generate
from scheduler.gateway.samples import Samples, follow, samples_of
from scheduler.gateway.scheduler import Scheduler

_ENCODER = msgspec.json.Encoder()


class GenerateRoutes:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.closing = False
        """Whether the gateway ends: no turn begins."""

    @Route(
        f"POST {GENERATE_ROUTE}",
        "One turn, token ids in and out",
        GenerateRequest,
        GenerateReply,
        refuses=SAMPLES,
        **TURN,
    )
    async def _generate(self, job: JobId, request: web.Request) -> web.StreamResponse:
        checked = self._checked(job, await whole_body(request))
        asked, can_ask_again = _with_id(checked), bool(checked.request_id)
        trajectory = trajectory_of(request, asked.request_id)
        parts, name = samples_of(asked), asked.request_id
        async with follow(
            self._scheduler.turns[job], trajectory, parts, name=name, named=can_ask_again
        ) as samples:
            if asked.stream:
                return await _streamed(request, asked, samples)
            turns = await samples.results()
            share, choices = LoopShare(), list[Any]()
            for index, turn in enumerate(turns):
                choice = await named_in_parts(msgspec.structs.replace(turn.choice(), index=index))
                # Thousands of them would be encoded at once.
                choices.append(msgspec.Raw(_ENCODER.encode(choice)) if len(turns) > 1 else choice)
                await share.rest()
            return json_reply(
                GenerateReply(
                    request_id=asked.request_id,
                    choices=tuple(choices),
                    model=asked.model or job,
                    usage=samples.usage(),
                    **_of_prompt(asked, samples) | samples.versions(),
                )
            )

    def admitted(self, job: JobId, body: bytes) -> GenerateRequest:
        """The checked request, with an id. Raises as `_checked`."""
        return _with_id(self._checked(job, body))

    def _checked(self, job: JobId, body: bytes) -> GenerateRequest:
        """Raises Exhausted at the end of the gateway, PeerProtocolError."""
        if self.closing:
            raise Exhausted(SHUTTING_DOWN)
        registry = self._scheduler.registry
        turn_request = decode_generate(
            body,
            vocabulary_tokens=registry.vocabulary_tokens(),
            context_tokens=registry.context_tokens(),
        )
        self._check_model(job, turn_request.model)
        return turn_request

    def _check_model(self, job: JobId, model: str | None) -> None:
        """Raises HTTPNotFound, as vLLM does, and Exhausted where an engine that has never been up
        or offered may have the model."""
        if model is None or model in (names := self._scheduler.registry.model_names(job)):
            return
        trains = "the adapter that" if self._scheduler.jobs[job].adapter else "what"
        why = f"model: {model[:SHOWN_CHARS]!r} is not {trains} job {job} trains; "
        if self._scheduler.registry.may_meet_other_models(job):
            raise Exhausted(f"{why}retry: no engine's model is known yet")
        raise web.HTTPNotFound(reason=f"{why}leave it out or name {' or '.join(sorted(names))}")


def _with_id(asked: GenerateRequest) -> GenerateRequest:
    if asked.request_id:
        return asked
    return msgspec.structs.replace(asked, request_id=secrets.token_hex(16))


async def _streamed(
    request: web.Request, turn_request: GenerateRequest, samples: Samples
) -> web.StreamResponse:
    """The choices' tokens as server-sent events, as fast as the client reads."""
    reply = GenerateReply(request_id=turn_request.request_id, choices=())
    options, unsent = turn_request.stream_options, True
    async with event_stream(request) as send:
        async for choice in samples.chunks():
            more: dict[str, Any] = {}
            if choice.finish_reason is not None:
                more |= samples.versions(choice.index)
            if unsent and choice.index == 0:
                more |= _of_prompt(turn_request, samples)
                unsent = False
            if wants_usage(options, "include_usage", "continuous_usage_stats"):
                more["usage"] = samples.usage(choice.index)
            named = await named_in_parts(choice)
            await send(msgspec.structs.replace(reply, choices=(named,), **more))
        if wants_usage(options):
            await send(msgspec.structs.replace(reply, usage=samples.usage()))
    return send.response


def _of_prompt(asked: GenerateRequest, samples: Samples) -> dict[str, Any]:
    """The reply's fields about the prompt, in a stream with the first choice's first event."""
    scores = samples.prompt_scores(0)
    return scores | ({"prompt_token_ids": asked.token_ids} if asked.return_token_ids else {})
