"""Tinker's sampling routes over the gateway's turns.

`asample` begins the samples and returns a promise; `retrieve_future` waits for it. A sampler's name
says all about it: nothing of it is kept, so that it outlives the gateway. Other reports of a client
are accepted. Training is not offered: a trainer publishes to the store.
"""

import asyncio
import math
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
from aiohttp import web

from harvester.contracts.errors import Exhausted, PeerProtocolError, RoseMuxError
from harvester.contracts.ids import JobId
from harvester.contracts.wire.rollouts import Choice, FinishReason, GenerateRequest, TokenLogprob
from harvester.platform.http_kit import json_reply
from harvester.platform.route_table import JSON, Route, several
from harvester.platform.tenant_shares import TenantShares
from scheduler.gateway.dialects.session_names import trajectory_of
from scheduler.gateway.dialects.text_dialect import Body
from scheduler.gateway.dialects.text_fields import number_of
from scheduler.gateway.dialects.text_logprobs import (
    MOST_LIKELIEST,
    likeliest,
    prompt_logprobs,
)
from scheduler.gateway.dialects.text_routes import Admit
from scheduler.gateway.job_paths import route_of
from scheduler.gateway.job_turns import IdInUse
from scheduler.gateway.loop_share import in_shares
from scheduler.gateway.pressure import HELD_BODY
from scheduler.gateway.requests import MAX_LOGPROBS
from scheduler.gateway.samples import follow, samples_of
from scheduler.gateway.scheduler import Scheduler

SAMPLE_ROUTE = "/api/v1/asample"
ABANDONED_S = 60.0
"""A promise that no call has waited for in this time is dropped, and its turns end."""
WAIT_S = 20.0
"""Longest wait of one call for a promise; the client calls again."""
MAX_PROMISES = 1 << 14
PROTOBUF = "application/x-protobuf"

ACCEPTED: dict[str, Body] = {
    "client/config": {"sample_cancel_enabled": True},
    "client/dynamic_config": {"sample_cancel_enabled": True},
    "session_heartbeat": {},
    "sessions/{session}/finish": {},
    "telemetry": {"status": "accepted"},
}
_NEUTRAL: tuple[Any, ...] = (None, False, 0)
_SAMPLE_FIELDS = frozenset(
    (
        *("num_samples", "prompt", "sampling_params", "sampling_session_id", "seq_id", "type"),
        *("topk_sample_logprobs", "prompt_logprobs", "topk_prompt_logprobs"),
    )
)
_NO_CANDIDATE = (0, -99999.0)
"""Token and log-probability in rows of candidates that are not full, as the client reads them."""
_SAMPLER = re.compile(r"(?P<session>[0-9a-f]{16})\.(?P<number>\d{1,9})\.(?P<version>\d{0,18})")
_MODEL_PATH = re.compile(r"tinker://(?P<job>[^/]+)/(?P<version>\d{1,18})")

_tinker = partial(Route, summary="Tinker's")


class TinkerRoutes:
    def __init__(self, scheduler: Scheduler, admit: Admit, open_bodies: TenantShares) -> None:
        self._scheduler = scheduler
        self._open_bodies = open_bodies
        self._promise_shares = TenantShares(MAX_PROMISES, name="promises not yet retrieved")
        self._admit = admit
        self._promises: dict[tuple[JobId, str], _Promise] = {}

    @several(_tinker(f"POST /api/v1/{path}", takes=Body) for path in ACCEPTED)
    async def _accepted(self, request: web.Request) -> Body:
        return ACCEPTED[route_of(request).removeprefix("/api/v1/")]

    @_tinker("GET /api/v1/healthz")
    async def _healthz(self) -> Body:
        return {"status": "ok"}

    @_tinker("GET /api/v1/get_server_capabilities")
    async def _models(self, job: JobId) -> Body:
        names = sorted(self._scheduler.registry.model_names(job))
        models = [{"model_name": name, "trainable": False, "sampleable": True} for name in names]
        return {"supported_models": models}

    @_tinker("POST /api/v1/create_session", takes=Body)
    async def _session(self) -> Body:
        return {"type": "create_session", "session_id": secrets.token_hex(8)}

    @_tinker("POST /api/v1/create_sampling_session")
    async def _create_sampler(self, job: JobId, body: Body) -> Body:
        version = ""
        if (path := body.get("model_path")) is not None:
            found = _MODEL_PATH.fullmatch(str(path))
            if found is None or found["job"] != job:
                raise PeerProtocolError(f"model_path: tinker://{job}/VERSION pins a version")
            version = str(int(found["version"]))
        elif str(body.get("base_model")) not in (
            names := self._scheduler.registry.model_names(job)
        ):
            raise PeerProtocolError(f"base_model: name {' or '.join(sorted(names))}")
        sampler = f"{body.get('session_id')}.{body.get('sampling_session_seq_id')}.{version}"
        _checked_sampler(sampler)
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    @_tinker("GET /api/v1/samplers/{sampler}")
    async def _sampler(self, job: JobId, request: web.Request) -> Body:
        sampler = request.match_info["sampler"]
        version = _checked_sampler(sampler)["version"]
        path = f"tinker://{job}/{version}" if version else None
        return {"sampler_id": sampler, "base_model": job, "model_path": path}

    @_tinker(f"POST {SAMPLE_ROUTE}", refuses=(409, 429, 503), body_bytes=None)
    async def _sample(self, job: JobId, request: web.Request, body: Body) -> Body:
        name = f"{body.get('sampling_session_id')}.{body.get('seq_id')}"
        encoded = _generate_body(name, body)
        generate = self._admit(job, encoded)
        digest = sha256(encoded + bytes([bool(body.get("prompt_logprobs"))])).digest()
        promise = self._promises.get((job, name))
        if promise is not None and promise.failed:
            promise.drop()
            promise = None
        if promise is not None and promise.request != digest:
            raise IdInUse(f"seq_id: {name} belongs to another request; use a new one")
        if promise is None:
            tenant = self._scheduler.jobs[job].tenant
            held = ExitStack()
            held.enter_context(self._promise_shares.holding(tenant, 1))
            held.callback(self._promises.pop, (job, name), None)
            work = self._served(job, request, name, generate, body)
            keep = partial(self._open_bodies.keeping, tenant)
            self._promises[job, name] = _Promise(
                asyncio.ensure_future(work), digest, held, request[HELD_BODY].pop_all(), keep
            )
        sequences = [f"{name}.{index}" for index in range(generate.sampling_params.n)]
        return {"request_id": name, "sample_sequence_ids": sequences}

    async def _served(
        self, job: JobId, request: web.Request, name: str, generate: GenerateRequest, body: Body
    ) -> bytes:
        """The samples' reply as protobuf. Raises the errors of serving a turn."""
        trajectory = trajectory_of(request, name)
        parts = samples_of(generate)
        async with follow(self._scheduler.turns[job], trajectory, parts, name=name) as samples:
            choices = await in_shares(turn.choice() for turn in await samples.results())
            scores = samples.prompt_scores(0)
        for choice in choices:
            if choice.finish_reason is FinishReason.ABORT:
                raise Exhausted(f"the turn ended early: {choice.fault or 'it was aborted'}")
        top_k = body.get("topk_sample_logprobs") or 0
        sequences = await in_shares(_message(1, _sequence(choice, top_k)) for choice in choices)
        return b"".join(sequences) + (
            await _scored(generate.token_ids, scores, body) if scores else b""
        )

    @_tinker(
        "POST /api/v1/retrieve_future", kinds=(JSON, PROTOBUF), refuses=(408, 410), repeats=Body
    )
    async def _retrieve(self, job: JobId, body: Body) -> web.Response:
        name = str(body.get("request_id"))
        promise = self._promises.get((job, name))
        if promise is None:
            # The client begins the sample again.
            return json_reply({"error": f"no promise {name[:200]}"}, status=410)
        task = promise.expected()
        done, _ = await asyncio.wait({task}, timeout=WAIT_S)
        if not done:
            return json_reply({"queue_state": "active"}, status=408)
        if task.cancelled():
            return json_reply({"error": "the sample was cancelled", "category": "user"})
        error = task.exception()
        if isinstance(error, RoseMuxError):
            status = getattr(error, "status", 503 if isinstance(error, Exhausted) else 400)
            category = "server" if status >= 500 or status in (409, 429) else "user"
            return json_reply({"error": str(error), "category": category})
        return web.Response(body=task.result(), content_type=PROTOBUF)

    @_tinker("POST /api/v1/cancel_future")
    async def _cancel(self, job: JobId, body: Body) -> Body:
        if (promise := self._promises.get((job, str(body.get("request_id"))))) is not None:
            promise.task.cancel()
        return {}


class _Promise:
    """Running samples, then their reply until clients stop asking for it."""

    def __init__(
        self,
        task: asyncio.Task[bytes],
        request: bytes,
        held: ExitStack,
        body: ExitStack,
        keep: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """`request` is a digest. `held` is closed at the end of the promise, `body` at that of its
        turns; `keep` counts the bytes of the reply instead."""
        self.task = task
        self.request = request
        self._held, self._body, self._keep = held, body, keep
        self._timer: asyncio.TimerHandle | None = None
        self._dropped = False
        task.add_done_callback(self._ended)
        self.expected()

    @property
    def failed(self) -> bool:
        """Whether the promise ended without a reply; then an equal request starts again."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    def expected(self) -> asyncio.Task[bytes]:
        """The samples; they are dropped unless they are expected again in time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(ABANDONED_S, self.drop)
        return self.task

    def drop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._dropped = True
        self.task.cancel()
        self._held.close()

    def _ended(self, task: asyncio.Task[bytes]) -> None:
        self._body.close()
        # `failed` retrieves the error, so that asyncio does not report it as forgotten.
        if not self.failed and not self._dropped:
            self._held.enter_context(self._keep(len(task.result())))


def _checked_sampler(sampler: str) -> re.Match[str]:
    found = _SAMPLER.fullmatch(sampler)
    if found is None:
        raise PeerProtocolError(f"sampling_session_id: this gateway gave no {sampler[:100]!r}")
    return found


def _generate_body(name: str, body: Body) -> bytes:
    """The body of a generate request for Tinker's. Raises PeerProtocolError, naming the field."""
    version = _checked_sampler(str(body.get("sampling_session_id")))["version"]
    for field, value in body.items():
        if field not in _SAMPLE_FIELDS and value not in _NEUTRAL:
            raise PeerProtocolError(f"{field}: not offered; leave it out")
    try:
        chunks = body["prompt"]["chunks"]
        token_ids = [token for chunk in chunks for token in chunk["tokens"]]
        given = {key: value for key, value in body["sampling_params"].items() if value is not None}
    except (KeyError, TypeError, AttributeError) as error:
        raise PeerProtocolError(
            "prompt, sampling_params: send chunks of token ids alone"
        ) from error
    stop = given.pop("stop", None)
    if stop == []:
        given["ignore_eos"] = True
    elif isinstance(stop, list) and all(isinstance(each, int) for each in stop):
        given["stop_token_ids"] = stop
    elif stop is not None:
        given["stop"] = stop
    of_prompt = number_of(body, "topk_prompt_logprobs", most=MAX_LOGPROBS)
    # The sampled token takes a place among vLLM's candidates.
    candidates = 1 + number_of(body, "topk_sample_logprobs", most=MOST_LIKELIEST)
    given |= {"n": body.get("num_samples", 1), "logprobs": candidates}
    if of_prompt or body.get("prompt_logprobs"):
        given["prompt_logprobs"] = of_prompt
    pin = {"weight_version": {"exact": int(version)}} if version else {}
    generate = {"request_id": name, "token_ids": token_ids, "sampling_params": given}
    # The protocol has no partial samples, and restarted samples would be biased towards short ones.
    generate["on_interrupt"] = "continue"
    return msgspec.json.encode(generate | pin, order="sorted")


async def _scored(token_ids: Sequence[int], scores: Body, body: Body) -> bytes:
    """The prompt's part of a `SampleResponse`. The first token has no log-probability."""
    scored = await prompt_logprobs(scores, token_ids)
    encoded = b""
    if body.get("prompt_logprobs"):
        encoded += _message(2, _float32([math.nan, *(each.logprob for each in scored[1:])]))
    if top_k := number_of(body, "topk_prompt_logprobs", most=MAX_LOGPROBS):
        rows = [_row(each, top_k) for each in scored]
        encoded += _message(
            3, _candidates([row + [_NO_CANDIDATE] * (top_k - len(row)) for row in rows])
        )
    return encoded


def _row(token: TokenLogprob, top_k: int) -> list[tuple[int, float]]:
    return [(each.token_id, each.logprob) for each in likeliest(token, top_k)]


def _candidates(rows: Sequence[Sequence[tuple[int, float]]]) -> bytes:
    """Tinker's `TopkLogprobs`, of rows that are equally long."""
    flat = [each for row in rows for each in row]
    encoded = _message(1, _int32([token for token, _ in flat]))
    encoded += _message(2, _float32(logprob for _, logprob in flat))
    return encoded + _number(3, len(rows[0])) + _number(4, len(rows))


def _sequence(choice: Choice, top_k: int) -> bytes:
    """Tinker's `SampledSequence`: stop reason 0 is a stop, 1 the length."""
    content = choice.logprobs.content
    encoded = _number(1, choice.finish_reason is FinishReason.LENGTH)
    encoded += _message(2, _int32(choice.token_ids))
    encoded += _message(3, _float32(each.logprob for each in content))
    if top_k and content:
        rows = [_row(each, top_k) for each in content]
        width = min(map(len, rows))
        encoded += _message(4, _candidates([row[:width] for row in rows]))
    return encoded


def _int32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def _float32(values: Iterable[float]) -> bytes:
    listed = list(values)
    return struct.pack(f"<{len(listed)}f", *listed)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
