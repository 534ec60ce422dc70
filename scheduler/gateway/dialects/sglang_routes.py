"""SGLang's `/generate` over the gateway's turns, for RL frameworks that speak to SGLang's router.

Token ids or text in; one prompt or a list of them; JSON or SSE. Sampling parameters are translated
to vLLM's names; others are refused by name.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
from aiohttp import web

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import JobId
from harvester.contracts.wire.rollouts import Choice, GenerateRequest
from harvester.platform.http_kit import json_reply
from harvester.platform.route_table import Callers, Route
from scheduler.gateway.dialects.event_stream import event_stream
from scheduler.gateway.dialects.session_names import trajectory_of
from scheduler.gateway.dialects.sglang_request import SglangRequest
from scheduler.gateway.dialects.stopped_text import early_parts, text_tokens, without_stop
from scheduler.gateway.dialects.text_dialect import COMPLETION, Body
from scheduler.gateway.dialects.text_routes import CHUNK_PERIOD_S, Admit, turns_of
from scheduler.gateway.loop_share import LoopShare, in_shares
from scheduler.gateway.openapi import SAMPLES, TURN
from scheduler.gateway.samples import Samples, follow
from scheduler.gateway.scheduler import Scheduler

_health = partial(
    Route,
    summary="200 while an engine is up",
    kinds=(),
    refuses=(503,),
    fails=(),
    callers=Callers.ANYONE,
)


class SglangRoutes:
    def __init__(self, scheduler: Scheduler, admit: Admit) -> None:
        self._scheduler = scheduler
        self._admit = admit

    @_health("GET /health")
    @_health("GET /health_generate")
    @_health("GET /ping")
    @_health("POST /ping")
    async def _is_up(self) -> web.Response:
        up = any(member.up for member in self._scheduler.fleet.members.values())
        return web.Response(status=200 if up else 503)

    @Route("GET /version", "vLLM's: the version of an engine", callers=Callers.ANYONE)
    async def _version(self) -> Body:
        """An engine's vLLM, as clients of vLLM choose by it what they send."""
        found = (each.vllm_version for each in self._scheduler.fleet.members.values())
        return {"version": next(filter(None, found), "")}

    @Route("GET /get_model_info", "SGLang's: model and version")
    @Route("GET /model_info", "SGLang's: model and version")
    @Route("GET /server_info", "SGLang's, and vLLM's `vllm_config`")
    @Route("GET /get_server_info", "SGLang's, and vLLM's `vllm_config`")
    async def _info(self, job: JobId) -> Body:
        names = self._scheduler.registry.model_names(job)
        version = self._scheduler.versions.newest(job)
        return {
            "model_path": sorted(names)[0],
            "served_model_name": job,
            "is_generation": True,
            "weight_version": str(version),
            "engines": len(self._scheduler.fleet.members),
            # slime takes no engine that says otherwise or nothing.
            "enable_memory_saver": False,
            "vllm_config": self._vllm_config(),
        }

    @Route("GET /get_weight_version", "SGLang's: the job's newest version")
    async def _weight_version(self, job: JobId) -> Body:
        return {"weight_version": str(self._scheduler.versions.newest(job))}

    def _vllm_config(self) -> Body:
        """The part of vLLM's `/server_info` that TRL reads. With no transfer engine named, TRL
        pushes no weights; else it would wait for ever for a group of ranks."""
        members = self._scheduler.fleet.members.values()
        known = next((member.description for member in members if member.description), None)
        return {
            "model_config": {
                "model": known.model if known else "",
                "dtype": known.dtype if known else "",
                "logprobs_mode": known.logprobs_mode if known else "",
                "max_model_len": self._scheduler.registry.context_tokens(),
            },
            "lora_config": None,
            "parallel_config": {"data_parallel_size": 1, "world_size": 1},
            "weight_transfer_config": None,
        }

    @Route("POST /generate", "SGLang's", answers=Body | list[Body], refuses=(*SAMPLES, 502), **TURN)
    async def _generate(self, job: JobId, request: web.Request, body: Body) -> web.StreamResponse:
        if self._scheduler.jobs[job].adapter and not body.get("lora_path", job):
            raise PeerProtocolError(f"lora_path: job {job} serves its adapter, not the base")
        sent = SglangRequest(body)
        ids = sent.input_ids or await self._scheduler.renderer.tokenize(sent.texts)
        turns = await turns_of(
            await in_shares(self._admit(job, sent.generate(each, i)) for i, each in enumerate(ids))
        )
        trajectory = trajectory_of(request, sent.name, sent.session)
        async with follow(self._scheduler.turns[job], trajectory, turns, name=sent.name) as samples:
            if sent.stream:
                return await self._stream(request, sent, samples)
            await samples.results()
            choices = await in_shares(
                sent.shown(turn.choice()) for turn in filter(None, samples.turns)
            )
            with samples.rendering():
                texts = await self._texts(choices, turns)
            share, replies = LoopShare(), []
            for place, (choice, turn, text) in enumerate(zip(choices, turns, texts, strict=True)):
                reply = sent.reply(choice, turn, text)
                if scores := samples.prompt_scores(place - place % (len(turns) // len(ids))):
                    reply["meta_info"] |= await sent.input_logprobs(turn.token_ids, scores)
                # Thousands of them would be encoded at once.
                replies.append(msgspec.Raw(msgspec.json.encode(reply)))
                await share.rest()
            return json_reply(replies if sent.many or len(replies) > 1 else replies[0])

    async def _stream(
        self, request: web.Request, sent: SglangRequest, samples: Samples
    ) -> web.StreamResponse:
        """Streams events that hold the choice so far, as SGLang's events do."""
        async with event_stream(request) as send:
            async for chunk in samples.chunks(every_s=CHUNK_PERIOD_S):
                turn = samples.turns[chunk.index]
                assert turn is not None
                choice = turn.choice()
                with samples.rendering(chunk.index):
                    (text,) = await self._texts([choice], [turn.request])
                await send(sent.reply(choice, turn.request, text) | {"index": chunk.index})
        return send.response

    async def _texts(
        self, choices: Sequence[Choice], turns: Sequence[GenerateRequest]
    ) -> list[str]:
        """Texts of the choices without their stop strings, as SGLang's: clients that send token ids
        grade them too."""
        texts, early = await self._decoded(choices, turns), early_parts(choices, turns)
        befores = [""] * len(texts)
        if any(early):
            befores = await self._decoded([part or Choice() for part in early], turns)
        return await in_shares(
            without_stop(text, choice, turn.sampling_params, before_chars=len(before))
            for text, choice, turn, before in zip(texts, choices, turns, befores, strict=True)
        )

    async def _decoded(
        self, choices: Sequence[Choice], turns: Sequence[GenerateRequest]
    ) -> list[str]:
        """Decodes all choices of a request in one call."""
        texts, sampling = [""] * len(choices), turns[0].sampling_params
        pairs = tuple(zip(choices, turns, strict=True))
        places = [at for at, each in enumerate(pairs) if text_tokens(*each)]
        if not places:
            return texts

        def responses() -> Iterator[Body]:
            for choice, turn in map(pairs.__getitem__, places):
                ids = choice.token_ids[: text_tokens(choice, turn)]
                ended = {"index": 0, "token_ids": ids, "finish_reason": choice.finish_reason}
                yield {"request_id": turn.request_id, "choices": [ended]}

        reply = await self._scheduler.renderer.derender(
            COMPLETION,
            COMPLETION.empty | {"skip_special_tokens": sampling.skip_special_tokens},
            [turns[place].token_ids for place in places],
            responses(),
        )
        for place, each in zip(places, reply["choices"], strict=True):
            texts[place] = each["text"]
        return texts
