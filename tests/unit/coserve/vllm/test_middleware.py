"""Both middlewares as plain ASGI apps, without vLLM and without a socket."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coserve.vllm import pulse
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

    def __init__(self, app: App, scope: Scope) -> None:
        self.messages: list[Message] = []
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: App, scope: Scope) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

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

    def set(self, epoch: int, *, ttl_ns: int = HOUR_NS) -> None:
        grant = Grant(epoch=epoch, mode=GrantMode.OPEN)
        self._writer.write(grant, now_ns=monotonic_ns(), ttl_ns=ttl_ns)


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


@pytest.mark.parametrize(
    "path",
    ["/pause", "/resume", "/update_weights", "/abort_requests", "/inference/v1/abort_requests"],
)
def test_an_operators_routes_pass_whatever_the_lease(path: str) -> None:
    assert not is_inference(scope_of(path))
    assert not is_inference({"type": "lifespan"})


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
    assert "in force is 3" in json.loads(client.body)["error"]


async def test_a_request_without_an_epoch_is_refused(grant: GrantPage) -> None:
    client = Client(EpochMiddleware(Engine()), scope_of())
    await client.task
    assert client.status == 409


async def test_without_a_grant_nothing_is_served(grant: GrantPage) -> None:
    grant.set(3, ttl_ns=0)
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
    assert "raised" in json.loads(client.body)["error"]


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
async def test_what_an_engine_says_to_its_cancellation_reaches_no_client(
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


async def test_outside_a_guest_no_epoch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSEMUX_ROLE", raising=False)
    engine = Engine()
    engine.begin.set(), engine.end.set()
    client = Client(EpochMiddleware(engine), scope_of())
    await client.task
    assert client.status == 200


@pytest.fixture
def pages(tmp_path: Path, set_role: SetRole, monkeypatch: pytest.MonkeyPatch) -> PageDirectory:
    """A production process of its own: the reporter is one per process."""
    set_role("production", tmp_path)
    monkeypatch.setattr(pulse, "_reporter", None)
    return PageDirectory(tmp_path)


def pulse_in(pages: PageDirectory) -> Pulse:
    record = pages.pulse_reader("pulse.prod.0").read().record
    assert record is not None
    return record


async def test_the_pulse_shows_a_request_from_its_arrival_to_its_last_byte(
    pages: PageDirectory,
) -> None:
    engine = Engine()
    client = Client(PulseMiddleware(engine), scope_of("/v1/completions", content_length="1300"))
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


async def test_other_routes_leave_no_trace_in_the_pulse(pages: PageDirectory) -> None:
    engine = Engine()
    engine.begin.set(), engine.end.set()
    middleware = PulseMiddleware(engine)
    for scope in (scope_of("/health", method="GET"), scope_of("/pause"), scope_of("/v1/score")):
        await Client(middleware, scope).task
    assert (engine.calls, pulse_in(pages).requests_total) == (3, 1)


async def test_no_error_of_the_pulse_reaches_a_request(
    pages: PageDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    engine.begin.set(), engine.end.set()
    middleware = PulseMiddleware(engine)

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("a record too large for a page")

    monkeypatch.setattr("harvester.contracts.page.PageWriter.write", broken)
    for _ in range(2):
        client = Client(middleware, scope_of("/v1/completions"))
        await client.task
        assert client.body == b"chunklast"
    assert caplog.text.count("reports no pulse any more") == 1
