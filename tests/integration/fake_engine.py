"""A stand-in for one vLLM engine: its generate stream, control routes and habits, no model.

Tokens are a pure function of the tokens before them and of the weight version, so that a turn cut
and continued elsewhere must give exactly what one engine would have given. Run as a program; it
prints its address. `tests/contract/scheduler` holds it to what a real engine does.
"""

import argparse
import asyncio
import json
import os
import signal
from typing import Any

import xxhash
from aiohttp import web

VOCABULARY = 256


def next_token(token_ids: list[int], version: int) -> int:
    tail = token_ids[-8:]
    return xxhash.xxh3_64_intdigest(f"{version}:{len(token_ids)}:{tail}".encode()) % VOCABULARY


class FakeEngine:
    def __init__(self, *, step_s: float, epoch: str | None) -> None:
        self.step_s = step_s
        self.epoch = epoch
        self.version = 0
        self.updated: dict[str, Any] | None = None
        self.staged: list[list[Any]] = []
        self.models: list[str | None] = []
        self.initialised = False
        self.updating = False
        self.fail_updates = 0
        self.stalled = False
        self.ends_after = 0
        """Tokens after which the next stream ends whole and without a finish reason, once."""
        self.eos: list[int] = []
        self.after_finish = ""
        """What follows the last chunk: `break` of the connection, or `wait` of a second."""
        self.answers: dict[str, int] = {}
        """Statuses with which requests are answered, by the first token of their prompt."""
        self.dies_of = -1
        """First token of a prompt that ends the process."""
        self.aborts = 0
        """Requests to come that are aborted without a token."""
        self.calls: list[str] = []
        self.open = 0
        self.most_open = 0
        self.aborted = 0
        self.running = asyncio.Event()
        self.running.set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self.generate),
                web.get("/health", self.health),
                web.get("/version", self.say_version),
                web.get("/weight_info", self.weight_info),
                web.post("/collective_rpc", self.stage),
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
        return web.json_response({"version": "0.32.0+fake"})

    async def weight_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    async def stage(self, request: web.Request) -> web.Response:
        """Prepared on the second time of asking; what was open then is remembered."""
        body = await request.json()
        assert body["method"] == "rosemux_stage"
        asked = [*body["kwargs"].values(), self.open]
        known = any(seen[:2] == asked[:2] for seen in self.staged)
        self.staged.append(asked)
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
        fault = self._control(path, body)
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
                self.updated = body["update_info"]
            case "/finish_weight_update":
                assert self.updated is not None
                self.updating = False
                self.version = self.updated["version"]
                assert body["weight_version"] == str(self.version)
        return ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.epoch is not None and request.headers.get("X-RoseMux-Epoch") != self.epoch:
            return web.json_response({"error": f"epoch in force is {self.epoch}"}, status=409)
        body = await request.json()
        self.models.append(body.get("model"))
        sampling = body["sampling_params"]
        token_ids = list(body["token_ids"])
        if not token_ids or min(token_ids) < 0:
            return web.json_response({"error": {"message": "bad token id"}}, status=400)
        if token_ids[0] == self.dies_of:
            os._exit(1)
        if (status := self.answers.get(str(token_ids[0]))) is not None:
            return web.json_response({"error": {"message": "not this one"}}, status=status)
        if sampling["max_tokens"] < 1:
            return web.json_response({"error": {"message": "max_tokens"}}, status=400)
        if not body.get("stream"):
            return web.json_response({"error": {"message": "only streams here"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if max(token_ids) >= 1 << 17:
            # As vLLM does: found out where the stream has begun.
            error = {"message": "bad token id", "code": 400}
            await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._stream(response, body["request_id"], token_ids, sampling)
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        finally:
            self.open -= 1
        return response

    async def _stream(
        self,
        response: web.StreamResponse,
        request_id: str,
        token_ids: list[int],
        sampling: dict[str, Any],
    ) -> None:
        stops = [*(sampling.get("stop_token_ids") or []), *self.eos]
        if self.aborts > 0:
            self.aborts -= 1
            sampling = {**sampling, "max_tokens": 0}
        for made in range(1, sampling["max_tokens"] + 1):
            await asyncio.sleep(self.step_s)
            while self.stalled or not self.running.is_set():  # noqa: ASYNC110 - set over HTTP
                await asyncio.sleep(0.01)
            token = next_token(token_ids, self.version)
            token_ids.append(token)
            finish = "stop" if token in stops else None
            if finish is None and made == sampling["max_tokens"]:
                finish = "length"
            await response.write(_chunk(request_id, token, finish))
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


def _chunk(request_id: str, token: int, finish: str | None) -> bytes:
    logprob = {"token_id": token, "logprob": -token / VOCABULARY, "rank": 1}
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": [token],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": {"content": [{**logprob, "top_logprobs": [logprob]}]},
    }
    body = {"request_id": f"generate-tokens-{request_id}", "usage": None, "choices": [choice]}
    return f"data: {json.dumps(body)}\n\n".encode()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--epoch", default=None)
    options = parser.parse_args()
    engine = FakeEngine(step_s=options.step_s, epoch=options.epoch)
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
