"""SGLang's `/generate` over the gateway's turns, for RL frameworks that speak to SGLang's router.

POST /generate          token ids or text in; one prompt or a list of them; JSON or SSE
GET  /health  /health_generate  /get_model_info  /model_info  /server_info  /get_server_info
GET  /get_weight_version
GET  /ping  /version    vLLM's

Sampling parameters are translated to vLLM's names; others are refused by name.
"""

import secrets
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from aiohttp import web

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.wire.rollouts import Choice, FinishReason, GenerateRequest
from harvester.platform.http_kit import json_reply
from scheduler.gateway.dialects.event_stream import event_stream
from scheduler.gateway.dialects.renderer import COMPLETION, Body
from scheduler.gateway.dialects.session_names import session_of, trajectory_of
from scheduler.gateway.dialects.stopped_text import early_parts, text_tokens, without_stop
from scheduler.gateway.dialects.text_fields import NO_MEDIA, PIN_FIELDS, SESSION_FIELDS, given
from scheduler.gateway.dialects.text_logprobs import MOST_LIKELIEST, likeliest, prompt_logprobs
from scheduler.gateway.dialects.text_routes import (
    CHUNK_PERIOD_S,
    Admit,
    JobOf,
    json_object,
    turns_of,
)
from scheduler.gateway.loop_share import LoopShare, in_shares
from scheduler.gateway.requests import MAX_LOGPROBS
from scheduler.gateway.samples import Samples, follow
from scheduler.gateway.scheduler import Scheduler

MAX_PROMPTS = 4096
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""SGLang's names of parameters that vLLM calls otherwise."""
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "n",
)
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
"""SGLang's names of grammars, and vLLM's within `structured_outputs`."""
_FIELDS = frozenset(
    (
        *("text", "input_ids", "sampling_params", "rid", "return_logprob", "top_logprobs_num"),
        *("logprob_start_len", "stream", *SESSION_FIELDS),
        *("model", "lora_path", "extra_key", "priority", "on_interrupt", *PIN_FIELDS),
    )
)
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, -1, 0, "")
_MEDIA = ("image_data", "audio_data", "video_data")
_TOP_P_IDS = {"return_top_p_token_ids": True}
"""slime's `custom_params` where `top_p` is below 1."""
_DEFAULT_MAX_TOKENS = 128
"""SGLang's."""


class SglangRoutes:
    def __init__(self, scheduler: Scheduler, job_of: JobOf, admit: Admit) -> None:
        self._scheduler = scheduler
        self._job_of = job_of
        self._admit = admit

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.get("/health", self._health),
            web.get("/health_generate", self._health),
            web.get("/ping", self._health),
            web.post("/ping", self._health),
            web.get("/version", self._version),
            *(
                web.get(path, self._info)
                for path in ("/get_model_info", "/model_info", "/server_info", "/get_server_info")
            ),
            web.get("/get_weight_version", self._weight_version),
        ]

    async def _health(self, _request: web.Request) -> web.Response:
        up = any(member.up for member in self._scheduler.fleet.members.values())
        return web.Response(status=200 if up else 503)

    async def _version(self, _request: web.Request) -> web.Response:
        """An engine's vLLM, as clients of vLLM choose by it what they send."""
        found = (each.vllm_version for each in self._scheduler.fleet.members.values())
        return json_reply({"version": next(filter(None, found), "")})

    async def _info(self, request: web.Request) -> web.Response:
        job = self._job_of(request)
        names = self._scheduler.model_names(job)
        version = self._scheduler.versions.newest(job)
        return json_reply(
            {
                "model_path": sorted(names)[0],
                "served_model_name": job,
                "is_generation": True,
                "weight_version": str(version),
                "engines": len(self._scheduler.fleet.members),
                # slime takes no engine that says otherwise or nothing.
                "enable_memory_saver": False,
                "vllm_config": self._vllm_config(),
            }
        )

    async def _weight_version(self, request: web.Request) -> web.Response:
        version = self._scheduler.versions.newest(self._job_of(request))
        return json_reply({"weight_version": str(version)})

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
                "max_model_len": self._scheduler.fleet.context_tokens(),
            },
            "lora_config": None,
            "parallel_config": {"data_parallel_size": 1, "world_size": 1},
            "weight_transfer_config": None,
        }

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        job = self._job_of(request)
        body = await json_object(request)
        if self._scheduler.jobs[job].adapter and not body.get("lora_path", job):
            raise PeerProtocolError(f"lora_path: job {job} serves its adapter, not the base")
        sent = _SGLangRequest(body)
        ids = sent.input_ids or await self._scheduler.renderer.tokenize(sent.texts)
        turns = await turns_of(
            await in_shares(self._admit(job, sent.generate(each, i)) for i, each in enumerate(ids))
        )
        trajectory = trajectory_of(request, sent.name, sent.session)
        async with follow(self._scheduler, job, trajectory, turns, name=sent.name) as samples:
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
                reply = _reply(sent, choice, turn, text)
                if scores := samples.prompt_scores(place - place % (len(turns) // len(ids))):
                    reply["meta_info"] |= await sent.input_logprobs(turn.token_ids, scores)
                # Thousands of them would be encoded at once.
                replies.append(msgspec.Raw(msgspec.json.encode(reply)))
                await share.rest()
            return json_reply(replies if sent.many or len(replies) > 1 else replies[0])

    async def _stream(
        self, request: web.Request, sent: "_SGLangRequest", samples: Samples
    ) -> web.StreamResponse:
        """Streams events that hold the choice so far, as SGLang's events do."""
        async with event_stream(request) as send:
            async for chunk in samples.chunks(every_s=CHUNK_PERIOD_S):
                turn = samples.turns[chunk.index]
                assert turn is not None
                choice = turn.choice()
                with samples.rendering(chunk.index):
                    (text,) = await self._texts([choice], [turn.request])
                await send(_reply(sent, choice, turn.request, text) | {"index": chunk.index})
        return send.response

    async def _texts(
        self, choices: Sequence[Choice], turns: Sequence[GenerateRequest]
    ) -> list[str]:
        """Each choice's text, without what ended it, as SGLang's: clients that send token ids grade
        it too."""
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


class _SGLangRequest:
    """A request of SGLang's, checked. Raises PeerProtocolError, naming the field."""

    def __init__(self, body: Body) -> None:
        for name, value in body.items():
            if name not in _FIELDS and value not in _NEUTRAL:
                known = name in (*_NAMES, *_SAME, *_GRAMMARS)
                what = "send it in sampling_params" if known else "not offered; leave it out"
                what = NO_MEDIA if name in _MEDIA else what
                raise PeerProtocolError(f"{name}: {what}")
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise PeerProtocolError("send either text or input_ids")
        self.many = _many(ids) if text is None else isinstance(text, list)
        self.texts: list[str] = [] if text is None else text if self.many else [text]
        self.input_ids: list[list[int]] = [] if ids is None else ids if self.many else [ids]
        count = len(self.texts) + len(self.input_ids)
        proper = all(isinstance(each, str) for each in self.texts)
        proper = proper and all(isinstance(each, list) for each in self.input_ids)
        if not 0 < count <= MAX_PROMPTS or not proper:
            raise PeerProtocolError(f"text, input_ids: send 1 to {MAX_PROMPTS} prompts")
        sampling = body.get("sampling_params")
        if sampling is None:
            sampling = {}
        if not isinstance(sampling, dict):
            raise PeerProtocolError("sampling_params: send one object for all prompts")
        self.top_p_ids = sampling.get("custom_params") == _TOP_P_IDS
        self._sampling = _translated(sampling)
        start = body.get("logprob_start_len") if body.get("return_logprob") else None
        self._scores_from = start = None if start == -1 else start
        """First prompt token whose log-probability is requested; None: no scores."""
        if start is not None and (type(start) is not int or start < 0 or body.get("stream")):
            raise PeerProtocolError("logprob_start_len: send one number, and no stream")
        self._scores_only = self._sampling["max_tokens"] == 0
        if self._scores_only and self._scores_from is None:
            raise PeerProtocolError("max_new_tokens: 0 scores prompts; send logprob_start_len too")
        rid, candidates = body.get("rid"), body.get("top_logprobs_num") or 0
        most = MAX_LOGPROBS if self._scores_only else MOST_LIKELIEST
        if rid is not None and not isinstance(rid, str):
            raise PeerProtocolError("rid: send one string for the request")
        if type(candidates) is not int or not 0 <= candidates <= most:
            raise PeerProtocolError(f"top_logprobs_num: send one number for all, at most {most}")
        self.name: str = secrets.token_hex(16) if rid is None else rid
        self.session = session_of(body)
        self.stream = bool(body.get("stream"))
        self.logprobs = bool(body.get("return_logprob"))
        self.candidates = candidates
        self._more = given(body, (*PIN_FIELDS, "priority", "model", "on_interrupt"))
        # vLLM names an adapter as a model, and a namespace of cached prefixes a salt.
        for name, same in (("lora_path", "model"), ("extra_key", "cache_salt")):
            self._more |= {same: body[name]} if body.get(name) else {}

    def generate(self, token_ids: list[int], index: int) -> bytes:
        """The body of a generate request for a prompt."""
        name = f"{self.name}-{index}" if self.many else self.name
        # The sampled token takes a place among vLLM's candidates.
        sampling = self._sampling | {"logprobs": 1 if self._scores_only else self.candidates + 1}
        if self._scores_from is not None:
            if self._scores_from >= len(token_ids):
                raise PeerProtocolError("logprob_start_len: beyond the prompt")
            sampling["prompt_logprobs"] = self.candidates
            # vLLM scores a prompt where it makes a token, which `shown` takes away again.
            sampling["max_tokens"] = sampling["max_tokens"] or 1
        return msgspec.json.encode(
            {"request_id": name, "token_ids": token_ids, "sampling_params": sampling} | self._more
        )

    def shown(self, choice: Choice) -> Choice:
        """The part of a choice that the client asked for."""
        if not self._scores_only or choice.finish_reason is FinishReason.ABORT:
            return choice
        return Choice(
            index=choice.index,
            finish_reason=FinishReason.LENGTH,
            # The version that scored it.
            spans=tuple(msgspec.structs.replace(each, end=0) for each in choice.spans[:1]),
        )

    async def input_logprobs(self, token_ids: Sequence[int], scores: Body) -> Body:
        """Log-probabilities of the prompt from the first token that is asked for, which itself has
        none, as SGLang's."""
        start, scored = self._scores_from or 0, await prompt_logprobs(scores, token_ids)
        own: list[Any] = [[None, token_ids[start], None]]
        top: list[Any] = [None]
        share = LoopShare()
        for token_id, each in zip(token_ids[start + 1 :], scored[start + 1 :], strict=True):
            await share.rest()
            found = each or {}
            own.append([found[token_id].logprob, token_id, None])
            if self.candidates:
                best = sorted(found.items(), key=lambda item: -item[1].logprob)[: self.candidates]
                top.append([[candidate.logprob, one, None] for one, candidate in best])
        logprobs: Body = {"input_token_logprobs": own}
        return logprobs | ({"input_top_logprobs": top} if self.candidates else {})


def _reply(sent: _SGLangRequest, choice: Choice, turn: GenerateRequest, text: str) -> Body:
    reason: Body | None = None
    if choice.finish_reason is not None:
        reason = {"type": str(choice.finish_reason)}
        if choice.finish_reason == "length":
            reason["length"] = len(choice.token_ids)
        elif choice.finish_reason == "abort":
            reason["message"] = choice.fault or "aborted"
        elif choice.stop_reason is not None or choice.token_ids:
            stop = choice.stop_reason
            reason["matched"] = choice.token_ids[-1] if stop is None else stop
    meta: Body = {
        "id": turn.request_id,
        "finish_reason": reason,
        "prompt_tokens": len(turn.token_ids),
        "completion_tokens": len(choice.token_ids),
        "spans": msgspec.to_builtins(choice.spans),
    }
    if choice.immovable:
        meta["immovable"] = choice.immovable
    if choice.spans:
        start, end = choice.spans[0].version, choice.spans[-1].version
        # The oldest version: a filter for stale samples must not underestimate their age.
        meta["weight_version"] = str(start)
        meta |= {"weight_version_start": start, "weight_version_end": end}
    if sent.top_p_ids and choice.sampling_mask is not None:
        masks = choice.sampling_mask
        meta["top_p_token_ids"] = [token_id for mask in masks for token_id in mask]
        meta["top_p_token_offsets"] = [0, *accumulate(map(len, masks))]
    if choice.weight_versions is not None:
        meta["weight_versions"] = msgspec.to_builtins(choice.weight_versions)
    if sent.logprobs:
        content = choice.logprobs.content
        meta["output_token_logprobs"] = [[t.logprob, t.token_id, None] for t in content]
        if sent.candidates:
            meta["output_top_logprobs"] = [
                [[each.logprob, each.token_id, None] for each in likeliest(token, sent.candidates)]
                for token in content
            ]
    return {"text": text, "output_ids": choice.token_ids, "meta_info": meta}


def _many(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)


def _translated(sampling: Body) -> Body:
    settings: Body = {"max_tokens": _DEFAULT_MAX_TOKENS}
    for name, value in sampling.items():
        if value is None:
            continue
        if name in _NAMES:
            settings[_NAMES[name]] = value
        elif name in _SAME:
            settings[name] = value
        elif name in _GRAMMARS:
            if "structured_outputs" in settings:
                grammars = ", ".join(each for each in sampling if each in _GRAMMARS)
                raise PeerProtocolError(f"sampling_params.{name}: send one of {grammars}")
            settings["structured_outputs"] = {_GRAMMARS[name]: value}
        elif name == "no_stop_trim":
            settings["include_stop_str_in_output"] = value
        elif value not in _NEUTRAL and (name, value) != ("custom_params", _TOP_P_IDS):
            named = next((ours for ours, its in _NAMES.items() if its == name), None)
            what = f"SGLang's name is {named}" if named else "not offered; leave it out"
            raise PeerProtocolError(f"sampling_params.{name}: {what}")
    return settings
