"""A stand-in for one vLLM engine: its generate stream, control routes and habits, no model.

Tokens are a pure function of the tokens before them and of the weight version, so that a turn cut
and continued elsewhere must give exactly what one engine would have given. Run as a program; it
prints its address. `tests/contract/scheduler` holds it to what a real engine does.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import xxhash
from aiohttp import web

VOCABULARY = 256
WEIGHT_CALLS = ("/start_weight_update", "/update_weights", "/finish_weight_update")


def next_token(token_ids: list[int], version: int) -> int:
    tail = token_ids[-8:]
    return xxhash.xxh3_64_intdigest(f"{version}:{len(token_ids)}:{tail}".encode()) % VOCABULARY


@dataclass(eq=False, kw_only=True)
class FakeEngine:
    """Tests set what it is to do, by attributes here or by `POST /_fake` from another process."""

    step_s: float
    epoch: str | None
    """The lease's epoch that it fences, as a guest does; None: it is no guest."""
    context: int = 1 << 20
    stock: bool = False
    """Without coserve's middleware."""
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    weight_calls: int = 0
    started_s: int = field(default_factory=lambda: secrets.randbelow(1 << 31))
    told_context: int | None = None
    """The context it reports, if that is not its own; 0 reports none."""
    release: str = "0.32.0+fake"
    vocabulary: int = VOCABULARY
    reported_identity: str = ""
    """The identity in its report, if that is not its own."""
    logprobs_mode: str = "processed_logprobs"
    mute: bool = False
    """For a stock engine: its metrics hold no start time."""
    prefill_s: float = 0.0
    """Delay to the first token of each request, in s."""
    slot: str = ""
    """The slot whose guest it says that it is."""
    version: int = 0
    updated: dict[str, Any] | None = None
    stored_hash: str = ""
    """Hash of every version in its store; empty: the expected one, or the version's number."""
    held_hash: str = ""
    staged: list[list[Any]] = field(default_factory=list)
    stage_fault: str = ""
    """Why no version can be prepared; empty: one can."""
    preparing: bool = False
    """Whether preparations are under way: none is ready, and an update waits."""
    models: list[str | None] = field(default_factory=list)
    extra_args: list[dict[str, Any]] = field(default_factory=list)
    initialised: bool = False
    updating: bool = False
    fail_updates: int = 0
    in_doubt: bool = False
    """Whether its weights are half-written, as by an update that failed."""
    stalled: bool = False
    holds_at: int = 0
    """The token before which each stream waits, for as long as this is set; 0: none waits."""
    ends_after: int = 0
    """Tokens after which the next stream ends whole and without a finish reason, once."""
    breaks_after: int = 0
    """The token before which the next `breaks` streams are reset; 0 resets none."""
    breaks: int = 1
    silent: bool = False
    """Whether it answers nothing, as a stopped process."""
    silent_once_broken: bool = False
    """Whether it is silent after a reset."""
    replaced_after: str = ""
    """The control route after which another process is here, once."""
    false_lengths: int = 0
    """Streams to come that end with `length` at their first token."""
    misnamed: int = 0
    """Chunks to come whose log-probability is another token's."""
    unscored: int = 0
    """Chunks to come whose log-probability was NaN."""
    eos: list[int] = field(default_factory=list)
    after_finish: str = ""
    """Event after the last chunk: `break` of the connection, or `wait` of a second."""
    answer_words: str = "not this one"
    answers: dict[str, int] = field(default_factory=dict)
    """Statuses with which requests are answered, by the first token of their prompt."""
    masks: bool = False
    """Whether it reports sampling masks."""
    routes_experts: bool = False
    """Whether it reports routed experts."""
    scored: int = 0
    dies_of: int = -1
    """First token of a prompt that ends the process."""
    aborts: int = 0
    """Requests to come that are aborted without a token."""
    calls: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    aborted: int = 0
    running: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.running.set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20, middlewares=[self.identify])
        app.add_routes(
            [
                web.post("/inference/v1/generate", self.generate),
                web.get("/health", self.health),
                web.get("/version", self.say_version),
                web.get("/weight_info", self.weight_info),
                web.get("/v1/models", self.say_models),
                web.get("/metrics", self.say_metrics),
                web.get("/metrics/", self.say_metrics),
                web.get("/rosemux/engine", self.say_engine),
                web.post("/v1/completions/derender", self.fence),
                web.post("/collective_rpc", self.call_workers),
                web.get("/_fake", self.look),
                web.post("/_fake", self.set),
                *(
                    web.post(path, self.control)
                    for path in (
                        "/pause",
                        "/resume",
                        "/init_weight_transfer_engine",
                        "/start_weight_update",
                        "/update_weights",
                        "/finish_weight_update",
                        "/reset_prefix_cache",
                    )
                ),
            ]
        )
        return app

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def say_version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self.release})

    async def weight_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    def waits_at(self, token: int) -> bool:
        """Whether a stream's token, counted from 1, is not made yet."""
        waits = self.stalled or self.silent or not self.running.is_set()
        return waits or self.holds_at == token

    @property
    def identity(self) -> str:
        return f"{self.instance}.{self.weight_calls}"

    @web.middleware
    async def identify(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Acts like coserve's IdentityMiddleware: identity on every reply, 412 for another
        engine's."""
        while self.silent:  # noqa: ASYNC110 - set by the test
            await asyncio.sleep(0.01)
        if not self.stock:
            wanted = request.headers.get("X-RoseMux-Engine", self.identity)
            if wanted != self.identity:
                error = {"error": f"this is engine {self.identity}"}
                return self.stamped(web.json_response(error, status=412))
            if request.path in WEIGHT_CALLS:
                self.weight_calls += 1
        return self.stamped(await handler(request))

    def stamped(self, response: web.StreamResponse) -> web.StreamResponse:
        if not self.stock and not response.prepared:
            response.headers["X-RoseMux-Engine"] = self.identity
        return response

    async def say_engine(self, _request: web.Request) -> web.Response:
        if self.stock:
            raise web.HTTPNotFound
        told = self.context if self.told_context is None else self.told_context
        description = {
            "model": "fake",
            "architecture": "FakeForCausalLM",
            "context_tokens": told,
            "vocabulary": self.vocabulary,
            "dtype": "bfloat16",
            "logprobs_mode": self.logprobs_mode,
            "features": ["rosemux-weights"],
        }
        identity = self.reported_identity or self.identity
        report = {"identity": identity, "description": description, "slot": self.slot}
        return web.json_response(report)

    async def fence(self, request: web.Request) -> web.Response:
        """Acts like coserve's EpochMiddleware before a route that samples nothing."""
        return self.stale(request) or web.json_response({"error": "no output"}, status=400)

    def stale(self, request: web.Request) -> web.Response | None:
        if self.epoch is None or request.headers.get("X-RoseMux-Epoch") == self.epoch:
            return None
        return web.json_response({"error": f"epoch in force is {self.epoch}"}, status=409)

    async def say_models(self, _request: web.Request) -> web.Response:
        told = self.context if self.told_context is None else self.told_context
        return web.json_response({"data": [{"id": "fake", "max_model_len": told or None}]})

    async def say_metrics(self, _request: web.Request) -> web.Response:
        line = "" if self.mute else f"process_start_time_seconds {self.started_s}\n"
        return web.Response(text=f"# TYPE vllm:num_requests_running gauge\n{line}")

    async def call_workers(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "rosemux_stage":
            return await self.stage(body)
        assert body["method"] == "rosemux_weights"
        return web.json_response({"results": [self.held()]})

    def held(self) -> dict[str, Any]:
        if self.updated is None or self.version == 0:
            return {"in_doubt": True} if self.in_doubt else {}
        told = {"state_hash": self.held_hash, "reapplied": 0}
        held = {"store": self.updated["store"], "version": self.updated["version"], **told}
        if adapter := self.updated.get("adapter"):
            return {"store": "base", "version": 1, **told, "adapters": {adapter: held}}
        return held

    async def stage(self, body: dict[str, Any]) -> web.Response:
        """Ready on the second call; records the turns open at each call."""
        asked = [*body["kwargs"].values(), self.open]
        known = any(seen[:2] == asked[:2] for seen in self.staged)
        self.staged.append(asked)
        running = [{"state": "running"}] * self.preparing
        if self.stage_fault:
            failed = {"state": "failed", "message": self.stage_fault}
            return web.json_response({"results": [*running, failed]})
        if running:
            return web.json_response({"results": running})
        return web.json_response({"results": [{"state": "ready" if known else "running"}]})

    async def look(self, _request: web.Request) -> web.Response:
        names = (
            "version", "calls", "open", "most_open", "aborted", "updated", "staged", "models",
            "ends_after",
        )  # fmt: skip
        return web.json_response({name: getattr(self, name) for name in names})

    async def set(self, request: web.Request) -> web.Response:
        for name, value in (await request.json()).items():
            if not hasattr(self, name):
                return web.json_response({"error": name}, status=400)
            setattr(self, name, value)
        return web.json_response({})

    async def control(self, request: web.Request) -> web.Response:
        path = request.path
        body = await request.json() if request.can_read_body else {}
        self.calls.append(path + (f"?{request.query_string}" if request.query_string else ""))
        while path == "/update_weights" and self.preparing:  # noqa: ASYNC110 - set by the test
            await asyncio.sleep(0.01)
        fault = self._control(path, body)
        if path == self.replaced_after:
            self.replaced_after = ""
            self.instance, self.started_s = secrets.token_hex(8), self.started_s + 1
            self.version, self.updated, self.initialised, self.updating = 0, None, False, False
        if fault:
            return web.json_response({"error": fault}, status=500)
        return web.json_response({"message": "ok", "success": True, "status": "ok"})

    def _control(self, path: str, body: dict[str, Any]) -> str:
        match path:
            case "/pause":
                self.running.clear()
            case "/resume":
                self.running.set()
            case "/init_weight_transfer_engine":
                self.initialised = True
            case "/start_weight_update":
                if not self.initialised:
                    return "the weight transfer engine is not initialised"
                self.updating = True
            case "/update_weights":
                if not self.updating:
                    return "no weight update was started"
                if self.fail_updates > 0:
                    self.fail_updates -= 1
                    return "state hash mismatch"
                update = body["update_info"]
                wanted = update.get("state_hash") or self.stored_hash or f"{update['version']:032x}"
                if self.stored_hash not in ("", wanted):
                    return f"state {self.stored_hash}, the caller expects {wanted}"
                self.updated, self.held_hash = update, wanted
            case "/finish_weight_update":
                if self.updated is None:
                    return "no version is loaded"
                self.updating = False
                self.version = self.updated["version"]
                assert body["weight_version"] == str(self.version)
        return ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self.stale(request)) is not None:
            return refusal
        body = await request.json()
        self.models.append(body.get("model"))
        sampling = body["sampling_params"]
        self.extra_args.append(sampling.get("extra_args") or {})
        token_ids = list(body["token_ids"])
        if not token_ids or min(token_ids) < 0:
            return web.json_response({"error": {"message": "bad token id"}}, status=400)
        if token_ids[0] == self.dies_of:
            os._exit(1)
        if (status := self.answers.get(str(token_ids[0]))) is not None:
            return web.json_response({"error": {"message": self.answer_words}}, status=status)
        if sampling["max_tokens"] < 1:
            return web.json_response({"error": {"message": "max_tokens"}}, status=400)
        if not body.get("stream"):
            return self.stamped(self.score(body["request_id"], token_ids, sampling))
        if len(token_ids) >= self.context:
            message = f"prompt of {len(token_ids)} tokens, max_model_len {self.context}"
            return web.json_response({"error": {"message": message}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await self.stamped(response).prepare(request)
        if max(token_ids) >= 1 << 17:
            # As vLLM does: found out where the stream has begun.
            error = {"message": "bad token id", "code": 400}
            await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            meant = request.headers.get("X-RoseMux-Engine", "")
            await self._stream(response, body["request_id"], token_ids, sampling, meant)
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            self.open -= 1
        return response

    def score(
        self, request_id: str, token_ids: list[int], sampling: dict[str, Any]
    ) -> web.Response:
        """The one whole reply that a gateway asks for: the prompt's log-probabilities."""
        self.scored += 1
        if sampling.get("prompt_logprobs") is None:
            return web.json_response({"error": {"message": "only streams here"}}, status=400)
        scores = [
            {str(token): {"logprob": -token / VOCABULARY, "rank": 1, "decoded_token": "x"}}
            for token in token_ids[1:]
        ]
        choice = {"index": 0, "token_ids": [0], "finish_reason": "length"}
        return web.json_response(
            {
                "request_id": f"generate-tokens-{request_id}",
                "choices": [choice],
                "prompt_logprobs": [None, *scores],
            }
        )

    async def _stream(
        self,
        response: web.StreamResponse,
        request_id: str,
        token_ids: list[int],
        sampling: dict[str, Any],
        meant: str,
    ) -> None:
        stops = [*(sampling.get("stop_token_ids") or []), *self.eos]
        if self.aborts > 0:
            self.aborts -= 1
            sampling = {**sampling, "max_tokens": 0}
        await asyncio.sleep(self.prefill_s)
        for made in range(1, sampling["max_tokens"] + 1):
            await asyncio.sleep(self.step_s)
            while self.waits_at(made):  # noqa: ASYNC110 - set over HTTP
                await asyncio.sleep(0.01)
            if meant not in ("", self.identity):
                return
            if self.breaks_after == made:
                self.breaks -= 1
                self.breaks_after = self.breaks_after if self.breaks else 0
                self.silent = self.silent_once_broken
                raise ConnectionResetError
            token = next_token(token_ids, self.version)
            token_ids.append(token)
            finish = "stop" if token in stops else None
            if finish is None and sampling["max_tokens"] == made:
                finish = "length"
            if finish is None and len(token_ids) >= self.context:
                finish = "length"
            if self.false_lengths:
                self.false_lengths, finish = self.false_lengths - 1, "length"
            named = token
            if self.misnamed:
                self.misnamed, named = self.misnamed - 1, token ^ 1
            likeliest = range(sampling["logprobs"])
            wanted = [named, *(sampling.get("logprob_token_ids") or likeliest)]
            shown = list(dict.fromkeys(wanted))[: max(1, sampling["logprobs"])]
            more: dict[str, Any] = {"sampling_mask": [[token, 0]]} if self.masks else {}
            if self.unscored:
                self.unscored -= 1
                content = {"token_id": token, "logprob": -9999.0, "rank": None, "top_logprobs": []}
                more["logprobs"] = {"content": [content]}
            if finish and self.routes_experts:
                more["routed_experts"] = f"{len(token_ids) - 1} rows"
            await response.write(_chunk(request_id, token, finish, shown, more))
            if finish:
                break
            if made == self.ends_after:
                self.ends_after = 0
                break
        if self.after_finish == "break":
            await asyncio.sleep(0.01)
            raise ConnectionError
        if self.after_finish == "wait":
            await asyncio.sleep(1.0)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()


def _chunk(
    request_id: str, token: int, finish: str | None, shown: list[int], more: dict[str, Any]
) -> bytes:
    told = [{"token_id": each, "logprob": -each / VOCABULARY, "rank": 1} for each in shown]
    logprob = told[0]
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": [token],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": {"content": [{**logprob, "top_logprobs": told}]},
        **more,
    }
    body = {"request_id": f"generate-tokens-{request_id}", "usage": None, "choices": [choice]}
    return f"data: {json.dumps(body)}\n\n".encode()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--epoch", default=None)
    parser.add_argument("--context", type=int, default=1 << 20)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--holds-at", type=int, default=0)
    options = parser.parse_args()
    engine = FakeEngine(
        step_s=options.step_s,
        epoch=options.epoch,
        context=options.context,
        stock=options.stock,
        holds_at=options.holds_at,
    )
    runner = web.AppRunner(
        engine.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port).start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
