"""Both middlewares as plain ASGI apps, without vLLM and without a socket."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coserve.pulse.engine_cores import EngineStep
from coserve.vllm import pulse_reporter
from coserve.vllm.middleware import (
    App,
    EpochMiddleware,
    Message,
    PulseMiddleware,
    Receive,
    Scope,
    Send,
    is_inference,
)
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import Grant, GrantMode, PageDirectory, Pulse

SetRole = Callable[[str, Path], None]
HOUR_NS = 3_600_000_000_000
PATH = "/inference/v1/generate"


def scope_of(path: str = PATH, *, method: str = "POST", **headers: str) -> Scope:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": pairs}


class Client:
    """Sends one request to an app and keeps what comes back."""

    def __init__(self, app: App, scope: Scope, *, body: bytes = b"") -> None:
        self.messages: list[Message] = []
        self._body = body
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: App, scope: Scope) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": self._body, "more_body": False}

        async def send(message: Message) -> None:
            assert not self.whole, "a message after the last one"
            self.messages.append(message)

        await app(scope, receive, send)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def whole(self) -> bool:
        return len(self.messages) > 1 and not self.messages[-1].get("more_body", False)


class Engine:
    """An app whose replies the test moves along."""

    def __init__(self) -> None:
        self.begin, self.end = asyncio.Event(), asyncio.Event()
        self.begun = asyncio.Event()
        self.calls = 0
        self.cancelled = 0
        self.says_on_cancel = False
        self.error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        try:
            while (await receive()).get("more_body"):
                pass
            await self.begin.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"chunk", "more_body": True})
            self.begun.set()
            await self.end.wait()
            if self.error is not None:
                raise self.error
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
        except asyncio.CancelledError:
            self.cancelled += 1
            if not self.says_on_cancel:
                raise
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"client went away"})


class GrantPage:
    def __init__(self, path: Path) -> None:
        self._writer = PageDirectory.create(path).grant_writer()

    def set(
        self, epoch: int, *, ttl_ns: int = HOUR_NS, age_ns: int = 0, held: bool = False
    ) -> None:
        grant = Grant(epoch=epoch, mode=GrantMode.OPEN, held=held)
        self._writer.write(grant, now_ns=monotonic_ns() - age_ns, ttl_ns=ttl_ns)


@pytest.fixture
def grant(tmp_path: Path, set_role: SetRole) -> GrantPage:
    page = GrantPage(tmp_path)
    page.set(3)
    set_role("guest", tmp_path)
    return page


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v2/embed",
        "/inference/v1/generate",
        "/invocations",
        "/pooling",
        "/score",
        "/rerank",
    ],
)
def test_knows_the_routes_that_make_the_engine_step(path: str) -> None:
    assert is_inference(scope_of(path))
    assert not is_inference(scope_of(path, method="GET"))


STEPLESS = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/responses/resp_1/cancel",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
]


@pytest.mark.parametrize("path", STEPLESS)
async def test_a_guest_takes_no_call_beside_inference_routes_without_its_lease(
    grant: GrantPage, path: str
) -> None:
    engine = Engine()
    engine.begin.set(), engine.end.set()
    middleware = EpochMiddleware(engine)
    statuses = []
    for headers in ({}, {"x_rosemux_epoch": "3"}):
        client = Client(middleware, scope_of(path, **headers))
        await client.task
        statuses.append(client.status)
    assert (statuses, engine.calls) == ([409, 200], 1)


@pytest.mark.parametrize(
    "path",
    ["/pause", "/resume", "/update_weights", "/abort_requests", "/inference/v1/abort_requests"],
)
def test_an_operators_routes_pass_whatever_the_lease(path: str) -> None:
    assert not is_inference(scope_of(path))
    assert not is_inference({"type": "lifespan"})


ROOTS = ("", "/", "/llm", "/llm/", "llm", "/v1", "/a/b")
PATHS = (
    "/v1/completions", "/llm/v1/completions", "/llm//v1/completions", "//v1/completions",
    "/v1/v1/completions", "/a/b/v1/completions", "/llmv1/completions", "/llm/score", "/score",
    "/llm/llm/v1/completions", "/metrics", "/llm/metrics", "/llm/health", "/tokenize",
)  # fmt: skip


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("path", PATHS)
async def test_whatever_the_router_serves_under_a_root_path_is_known(root: str, path: str) -> None:
    """vLLM's application is FastAPI's, with the root path of `--root-path`."""
    fastapi = pytest.importorskip("fastapi")
    known: list[bool] = []

    class Listening:
        def __init__(self, app: App) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            known.append(is_inference(scope))
            await self._app(scope, receive, send)

    app = fastapi.FastAPI()
    app.root_path = root
    served: list[str] = []
    for route in ("/v1/completions", "/score", "/metrics", "/health", "/tokenize"):
        app.post(route)(lambda route=route: served.append(route))
    app.add_middleware(Listening)
    scope = scope_of(path) | {"query_string": b"", "raw_path": path.encode()}
    await Client(app, scope).task
    steps = [route for route in served if route in {"/v1/completions", "/score"}]
    assert known[-1] or not steps, "a request that no middleware knows"
    assert not (known[-1] and served and not steps), "a request that makes no step"


async def test_under_a_root_path_a_guest_still_asks_for_the_epoch(grant: GrantPage) -> None:
    engine = Engine()
    client = Client(EpochMiddleware(engine), scope_of(f"/llm{PATH}") | {"root_path": "/llm"})
    await client.task
    assert (client.status, engine.calls) == (409, 0)


@pytest.mark.parametrize("epoch", ["", "3"])
async def test_a_guest_serves_no_responses_that_may_outlive_their_request(
    grant: GrantPage, epoch: str
) -> None:
    """With `"background": true` a reply ends at once: no epoch could end what goes on."""
    engine = Engine()
    scope = scope_of("/v1/responses", x_rosemux_epoch=epoch)
    client = Client(EpochMiddleware(engine), scope)
    await client.task
    assert (client.status, engine.calls) == (403, 0)


async def test_a_guest_opens_no_websocket(grant: GrantPage) -> None:
    engine, sent = Engine(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope = scope_of("/v1/realtime", x_rosemux_epoch="3") | {"type": "websocket"}
    await EpochMiddleware(engine)(scope, receive, send)
    assert ([message["type"] for message in sent], engine.calls) == (["websocket.close"], 0)


async def test_the_epoch_in_force_passes(grant: GrantPage) -> None:
    engine = Engine()
    engine.begin.set(), engine.end.set()
    client = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch="3"))
    await client.task
    assert (client.status, client.body, client.whole) == (200, b"chunklast", True)


@pytest.mark.parametrize("epoch", ["2", "4", "x", "-3", "", "3" * 40])
async def test_any_other_epoch_is_refused_before_the_engine_sees_it(
    grant: GrantPage, epoch: str
) -> None:
    engine = Engine()
    client = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch=epoch))
    await client.task
    assert (client.status, engine.calls) == (409, 0)
    assert "is not the one in force, 3" in json.loads(client.body)["error"]


async def test_a_request_without_an_epoch_is_refused(grant: GrantPage) -> None:
    client = Client(EpochMiddleware(Engine()), scope_of())
    await client.task
    assert client.status == 409


@pytest.mark.parametrize("gone", [{"ttl_ns": 0}, {"ttl_ns": HOUR_NS, "age_ns": 6_000_000_000}])
async def test_without_a_grant_nothing_is_served(grant: GrantPage, gone: dict[str, int]) -> None:
    grant.set(3, **gone)
    engine = Engine()
    client = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch="3"))
    await client.task
    assert (client.status, engine.calls) == (503, 0)
    assert "agent is silent" in json.loads(client.body)["error"]


async def test_a_raised_epoch_ends_a_started_stream_without_a_final_chunk(
    grant: GrantPage,
) -> None:
    engine = Engine()
    engine.begin.set()
    client = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch="3"))
    await engine.begun.wait()
    grant.set(4)
    await client.task
    assert (client.status, client.body, client.whole) == (200, b"chunk", True)
    assert engine.cancelled == 1


async def test_a_raised_epoch_refuses_a_request_that_had_no_reply_yet(grant: GrantPage) -> None:
    client = Client(EpochMiddleware(Engine()), scope_of(x_rosemux_epoch="3"))
    await asyncio.sleep(0)
    grant.set(4)
    await client.task
    assert (client.status, client.whole) == (409, True)
    assert "a newer lease epoch" in json.loads(client.body)["error"]


async def test_a_raised_epoch_reaches_a_handler_that_no_cancellation_reaches(
    grant: GrantPage,
) -> None:
    """vLLM's: the engine request ends when the client goes, not with the outer task."""
    left: list[str] = []

    async def generating() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.append("aborted")
            raise

    async def until_the_client_goes(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(generating())
        gone = asyncio.create_task(until_the_client_goes(receive))
        _, pending = await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    client = Client(EpochMiddleware(handler), scope_of(x_rosemux_epoch="3"))
    await asyncio.sleep(0)
    grant.set(4)
    await client.task
    await asyncio.sleep(0)
    assert left == ["aborted"]
    assert client.status == 409


@pytest.mark.parametrize("started", [True, False])
async def test_an_engine_s_reply_to_its_cancellation_reaches_no_client(
    grant: GrantPage, started: bool
) -> None:
    engine = Engine()
    engine.says_on_cancel = True
    if started:
        engine.begin.set()
    client = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch="3"))
    if started:
        await engine.begun.wait()
    else:
        await asyncio.sleep(0)
    grant.set(4)
    await client.task
    assert client.status == (200 if started else 409)
    assert b"went away" not in client.body
    assert client.whole


async def test_a_reply_that_was_whole_gets_nothing_more(grant: GrantPage) -> None:
    async def lingering(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"all"})
        await asyncio.Event().wait()

    client = Client(EpochMiddleware(lingering), scope_of(x_rosemux_epoch="3"))
    await asyncio.sleep(0)
    grant.set(4)
    await client.task
    assert (client.status, client.body) == (200, b"all")


async def test_requests_of_the_new_epoch_go_on_while_older_ones_end(grant: GrantPage) -> None:
    engine = Engine()
    engine.begin.set()
    middleware = EpochMiddleware(engine)
    old = Client(middleware, scope_of(x_rosemux_epoch="3"))
    await engine.begun.wait()
    grant.set(4)
    new = Client(middleware, scope_of(x_rosemux_epoch="4"))
    await old.task
    assert not new.task.done()
    engine.end.set()
    await new.task
    assert (old.body, new.body) == (b"chunk", b"chunklast")


async def test_a_grant_that_is_silent_for_a_moment_ends_nothing(grant: GrantPage) -> None:
    engine = Engine()
    engine.begin.set()
    client = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch="3"))
    await engine.begun.wait()
    grant.set(3, ttl_ns=0)
    await asyncio.wait({client.task}, timeout=0.12)
    engine.end.set()
    await client.task
    assert client.body == b"chunklast"


async def test_an_engines_error_stays_the_engines(grant: GrantPage) -> None:
    engine = Engine()
    engine.begin.set(), engine.end.set()
    engine.error = RuntimeError("boom")
    client = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch="3"))
    with pytest.raises(RuntimeError, match="boom"):
        await client.task


async def test_a_cancelled_server_task_takes_its_engine_request_along(grant: GrantPage) -> None:
    engine = Engine()
    client = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch="3"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert engine.cancelled == 1


async def test_outside_of_a_guest_no_epoch_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSEMUX_ROLE", raising=False)
    engine = Engine()
    engine.begin.set(), engine.end.set()
    client = Client(EpochMiddleware(engine), scope_of())
    await client.task
    assert client.status == 200


@pytest.fixture
def pages(tmp_path: Path, set_role: SetRole, monkeypatch: pytest.MonkeyPatch) -> PageDirectory:
    """A fresh production process: the reporter is one per process."""
    set_role("production", tmp_path)
    monkeypatch.setattr(pulse_reporter, "_reporter", None)
    return PageDirectory(tmp_path)


def pulse_in(pages: PageDirectory) -> Pulse:
    record = pages.pulse_reader("pulse.prod.0").read().record
    assert record is not None
    return record


async def test_the_pulse_shows_a_request_from_its_arrival_to_its_last_byte(
    pages: PageDirectory,
) -> None:
    engine = Engine()
    client = Client(PulseMiddleware(engine), scope_of("/v1/completions"), body=b"x" * 1300)
    await asyncio.sleep(0)
    arrived = pulse_in(pages)
    assert (arrived.in_flight, arrived.waiting, arrived.requests_total) == (1, 1, 1)
    assert arrived.largest_waiting_prompt_tokens == 600
    engine.begin.set(), engine.end.set()
    await client.task
    assert client.body == b"chunklast"
    assert pulse_in(pages).in_flight == 0


async def test_a_request_that_fails_or_is_cancelled_is_in_flight_no_more(
    pages: PageDirectory,
) -> None:
    engine = Engine()
    engine.begin.set(), engine.end.set()
    engine.error = RuntimeError("boom")
    middleware = PulseMiddleware(engine)
    failed = Client(middleware, scope_of("/v1/completions"))
    with pytest.raises(RuntimeError, match="boom"):
        await failed.task
    engine.begin.clear()
    cancelled = Client(middleware, scope_of("/v1/completions"))
    await asyncio.sleep(0)
    cancelled.task.cancel()
    await asyncio.wait({cancelled.task})
    assert (pulse_in(pages).in_flight, pulse_in(pages).requests_total) == (0, 2)


class Upload:
    """A client that sends its body piece by piece, and may go in the middle."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()

    def piece(self, body: bytes, *, last: bool = False) -> None:
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": not last})

    def go(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Message:
        return await self._messages.get()


async def passes() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def nowhere(message: Message) -> None:
    pass


async def test_a_slow_upload_arrives_with_the_end_of_its_body(pages: PageDirectory) -> None:
    engine, upload = Engine(), Upload()
    middleware = PulseMiddleware(engine)
    scope = scope_of("/v1/completions")
    request = asyncio.create_task(middleware(scope, upload.receive, nowhere))
    for _ in range(3):
        upload.piece(b"x" * 1300)
        await passes()
        waiting = pulse_in(pages)
        assert (waiting.in_flight, waiting.waiting, waiting.requests_total) == (0, 0, 0)
    sent_ns = monotonic_ns()
    upload.piece(b"x" * 100, last=True)
    await passes()
    arrived = pulse_in(pages)
    assert (arrived.in_flight, arrived.waiting, arrived.requests_total) == (1, 1, 1)
    assert arrived.oldest_waiting_arrival_ns >= sent_ns
    assert arrived.largest_waiting_prompt_tokens == (4000 - 100) // 2, "of all pieces"
    engine.begin.set(), engine.end.set()
    await request
    assert pulse_in(pages).in_flight == 0


@pytest.mark.parametrize("pieces", [0, 2])
async def test_a_client_that_goes_amid_its_upload_was_never_there(
    pages: PageDirectory, pieces: int
) -> None:
    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    upload = Upload()
    for _ in range(pieces):
        upload.piece(b"x")
    upload.go()
    await PulseMiddleware(reading)(scope_of("/v1/completions"), upload.receive, nowhere)
    assert (pulse_in(pages).in_flight, pulse_in(pages).requests_total) == (0, 0)


async def test_a_client_that_goes_amid_its_reply_is_in_flight_no_more(
    pages: PageDirectory,
) -> None:
    async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert pulse_in(pages).in_flight == 1
        assert (await receive())["type"] == "http.disconnect"
        raise ConnectionResetError

    upload = Upload()
    upload.piece(b"{}", last=True)
    upload.go()
    with pytest.raises(ConnectionResetError):
        await PulseMiddleware(streaming)(scope_of("/v1/completions"), upload.receive, nowhere)
    assert (pulse_in(pages).in_flight, pulse_in(pages).requests_total) == (0, 1)


async def test_a_body_that_is_read_after_the_reply_is_no_request(pages: PageDirectory) -> None:
    late: list[Receive] = []

    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        late.append(receive)

    upload = Upload()
    upload.piece(b"{}", last=True)
    await PulseMiddleware(refusing)(scope_of("/v1/completions"), upload.receive, nowhere)
    await late[0]()
    assert (pulse_in(pages).in_flight, pulse_in(pages).requests_total) == (0, 0)


@pytest.mark.parametrize("path", ["/v1/responses", "/llm/v1/responses", "/v1/completions"])
async def test_a_reply_that_its_request_may_outlive_leaves_no_idle_engine(
    pages: PageDirectory, path: str
) -> None:
    engine = Engine()
    engine.begin.set(), engine.end.set()
    scope = scope_of(path) | {"root_path": "/llm"}
    await Client(PulseMiddleware(engine), scope).task
    assert (pulse_in(pages).unseen_step_ns > 0) == path.endswith("/responses")


@pytest.mark.parametrize("fails", [True, False])
async def test_a_websocket_is_in_flight_while_it_is_open(pages: PageDirectory, fails: bool) -> None:
    async def talking(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(3):
            await receive()
            pulse = pulse_in(pages)
            assert (pulse.in_flight, pulse.sockets, pulse.waiting) == (1, 1, 0)
        if fails:
            raise ConnectionResetError

    async def receive() -> Message:
        return {"type": "websocket.receive", "text": "{}"}

    scope = scope_of("/v1/realtime") | {"type": "websocket"}
    talk = PulseMiddleware(talking)(scope, receive, nowhere)
    if fails:
        with pytest.raises(ConnectionResetError):
            await talk
    else:
        await talk
    assert (pulse_in(pages).in_flight, pulse_in(pages).sockets) == (0, 0)


@pytest.mark.parametrize("way", ["in", "out"])
async def test_a_message_over_a_websocket_explains_the_step_that_follows(
    pages: PageDirectory, way: str
) -> None:
    reporter = pulse_reporter.process_reporter()
    assert reporter is not None
    step = EngineStep(
        running=1, kv_usage_ratio=0.1, prompt_tokens=0, generation_tokens=1,
        inter_token_s=(0.02,), finished_prompt_tokens=(),
    )  # fmt: skip

    async def talking(scope: Scope, receive: Receive, send: Send) -> None:
        reporter.step(lambda: step)
        assert pulse_in(pages).unseen_steps_total == 1, "nobody has spoken"
        if way == "in":
            await receive()
        else:
            await send({"type": "websocket.send", "text": "{}"})
        reporter.step(lambda: step)
        assert pulse_in(pages).unseen_steps_total == 1

    async def receive() -> Message:
        return {"type": "websocket.receive", "text": "{}"}

    scope = scope_of("/v1/realtime") | {"type": "websocket"}
    await PulseMiddleware(talking)(scope, receive, nowhere)


async def test_a_pulse_says_whether_a_middleware_is_there(pages: PageDirectory) -> None:
    reporter = pulse_reporter.process_reporter()
    assert reporter is not None
    reporter.finish(0)
    assert pulse_in(pages).middleware is False
    PulseMiddleware(Engine())
    assert pulse_in(pages).middleware is True


async def test_other_routes_leave_no_trace_in_the_pulse(pages: PageDirectory) -> None:
    engine = Engine()
    engine.begin.set(), engine.end.set()
    middleware = PulseMiddleware(engine)
    for scope in (scope_of("/health", method="GET"), scope_of("/pause"), scope_of("/v1/score")):
        await Client(middleware, scope).task
    assert (engine.calls, pulse_in(pages).requests_total) == (3, 1)


@pytest.mark.parametrize("path", STEPLESS)
async def test_a_control_call_beside_inference_routes_is_no_request_of_production(
    pages: PageDirectory, path: str
) -> None:
    """An adapter that loads for seconds would look like a hung engine's request."""
    engine = Engine()
    client = Client(PulseMiddleware(engine), scope_of(path), body=b"x" * 1300)
    await asyncio.sleep(0)
    assert (engine.calls, pulse_in(pages).in_flight) == (1, 0)
    engine.begin.set(), engine.end.set()
    await client.task
    assert (client.status, pulse_in(pages).requests_total) == (200, 0)


async def test_no_error_of_the_pulse_reaches_a_request(
    pages: PageDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    engine.begin.set(), engine.end.set()
    middleware = PulseMiddleware(engine)

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("a record too large for a page")

    # Its own page alone: reporters of earlier tests beat on.
    page = SimpleNamespace(write=broken, in_place=lambda: True)
    monkeypatch.setattr(middleware._reporter, "_page", page)
    for _ in range(2):
        client = Client(middleware, scope_of("/v1/completions"))
        await client.task
        assert client.body == b"chunklast"
    assert caplog.text.count("reports no pulse any more") == 1


async def test_a_held_guest_refuses_new_requests_and_ends_those_that_it_has(
    grant: GrantPage,
) -> None:
    engine = Engine()
    engine.begin.set()
    running = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch="3"))
    await engine.begun.wait()
    grant.set(3, held=True)
    late = Client(EpochMiddleware(engine), scope_of(x_rosemux_epoch="3"))
    async with asyncio.timeout(30):
        await late.task
    assert (late.status, engine.calls) == (503, 1)
    engine.end.set()
    await running.task
    assert (running.status, running.whole) == (200, True)
