"""The identity of a rollout engine as a plain ASGI app, without vLLM and without a socket."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from coserve.vllm.identity import IdentityMiddleware, Message, Receive, Scope, Send
from harvester.contracts.wire.engines import ENGINE_HEADER, ENGINE_ROUTE, EngineReport

GENERATE = "/inference/v1/generate"
NAME = ENGINE_HEADER.lower().encode()


class Engine:
    """An app that streams as long as the test feeds it, and keeps the bodies that it reads."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        self.bodies.append(message["body"])
        if self.error is not None:
            raise self.error
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == GENERATE and (part := await self.parts.get()) is not None:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def middleware(engine: Engine) -> IdentityMiddleware:
    return IdentityMiddleware(engine)


class Reply:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.came = asyncio.Event()
        """A part of the body is there."""

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def identity(self) -> str:
        return dict(self.messages[0]["headers"])[NAME].decode()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])


async def ask(
    middleware: IdentityMiddleware,
    path: str,
    *,
    method: str = "POST",
    wanted: str = "",
    body: bytes = b"{}",
    **scope: Any,
) -> Reply:
    return await _ask(middleware, path, Reply(), method=method, wanted=wanted, body=body, **scope)


async def _ask(
    middleware: IdentityMiddleware,
    path: str,
    reply: Reply,
    *,
    method: str = "POST",
    wanted: str = "",
    body: bytes = b"{}",
    **scope: Any,
) -> Reply:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        reply.messages.append(message)
        if message.get("body"):
            reply.came.set()

    headers = [(NAME, wanted.encode())] if wanted else []
    whole = {"type": "http", "method": method, "path": path, "headers": headers, **scope}
    await middleware(whole, receive, send)
    return reply


async def identity_of(app: IdentityMiddleware) -> str:
    reply = await ask(app, ENGINE_ROUTE, method="GET")
    return msgspec.json.decode(reply.body, type=EngineReport).identity


async def test_every_reply_carries_the_identity_of_the_route(engine, middleware) -> None:
    told = await identity_of(middleware)
    engine.parts.put_nowait(None)
    assert (await ask(middleware, GENERATE)).identity == told
    assert (await ask(middleware, "/health", method="GET")).identity == told


@pytest.mark.parametrize(("role", "slot"), [("guest", "slot0"), ("production", ""), (None, "")])
async def test_a_guest_names_its_slot(engine, monkeypatch, role, slot) -> None:
    monkeypatch.setenv("ROSEMUX_SLOT", "slot0")
    if role is not None:
        monkeypatch.setenv("ROSEMUX_ROLE", role)
    reply = await ask(IdentityMiddleware(engine), ENGINE_ROUTE, method="GET")
    assert msgspec.json.decode(reply.body, type=EngineReport).slot == slot


async def test_two_processes_never_share_an_identity(engine) -> None:
    assert len({await identity_of(IdentityMiddleware(engine)) for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "path",
    [
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/weight_checker",
        "/v1/load_lora_adapter",
        "/sleep",
        "/wake_up",
        "/prefix/update_weights",
        "/update_weights/",
    ],
)
async def test_a_call_that_may_change_weights_changes_the_identity(middleware, path) -> None:
    before = await identity_of(middleware)
    assert (await ask(middleware, path)).identity != before
    assert await identity_of(middleware) != before


async def test_a_failed_weight_call_changes_it_too(engine, middleware) -> None:
    before, engine.error = await identity_of(middleware), RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        await ask(middleware, "/update_weights")
    assert await identity_of(middleware) != before


@pytest.mark.parametrize(
    ("method", "changes"),
    [("rosemux_weights", False), ("rosemux_stage", False), ("reload_weights", True), (None, True)],
)
async def test_only_reading_worker_calls_leave_the_identity(
    engine, middleware, method, changes
) -> None:
    before = await identity_of(middleware)
    body = json.dumps({"method": method}).encode()
    await ask(middleware, "/collective_rpc", body=body)
    assert (await identity_of(middleware) != before) is changes
    assert engine.bodies == [body]


@pytest.mark.parametrize("body", [b"", b"[]", b"no json", b'"rosemux_weights"', b"x" * (1 << 17)])
async def test_a_worker_call_that_cannot_be_read_counts_as_a_change(middleware, body) -> None:
    before = await identity_of(middleware)
    await ask(middleware, "/collective_rpc", body=body)
    assert await identity_of(middleware) != before


async def test_a_request_for_another_process_never_reaches_the_engine(engine, middleware) -> None:
    reply = await ask(middleware, GENERATE, wanted="another.0")
    assert (reply.status, reply.identity) == (412, await identity_of(middleware))
    assert engine.bodies == []


async def test_a_stream_for_one_identity_ends_before_a_token_of_other_weights(
    engine, middleware
) -> None:
    reply = Reply()
    wanted = await identity_of(middleware)
    streaming = asyncio.create_task(_ask(middleware, GENERATE, reply, wanted=wanted))
    engine.parts.put_nowait(b"of the old weights")
    await reply.came.wait()
    await ask(middleware, "/update_weights")
    for part in (b"of the new weights", b"[DONE]", None):
        engine.parts.put_nowait(part)
    await streaming
    assert reply.body == b"of the old weights"
    assert not reply.messages[-1].get("more_body", False)


async def test_a_stream_that_names_no_identity_is_left_alone(engine, middleware) -> None:
    reply = Reply()
    streaming = asyncio.create_task(_ask(middleware, GENERATE, reply))
    engine.parts.put_nowait(b"a")
    await reply.came.wait()
    await ask(middleware, "/update_weights")
    for part in (b"b", None):
        engine.parts.put_nowait(part)
    await streaming
    assert reply.body == b"ab"


@pytest.mark.parametrize(
    ("ranks", "external", "features"),
    [
        (1, False, ("rosemux-weights",)),
        (2, True, ("rosemux-weights",)),
        (2, False, ("rosemux-weights", "rosemux-first-core")),
    ],
)
async def test_describes_what_the_engine_can_serve(
    middleware, ranks: int, external: bool, features: tuple[str, ...]
) -> None:
    class Model:
        served_model_name = "policy"
        hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"])
        max_model_len = 4096
        dtype = "torch.bfloat16"
        logprobs_mode = "processed_logprobs"

        def get_vocab_size(self) -> int:
            return 512

    config = SimpleNamespace(
        model_config=Model(),
        weight_transfer_config=SimpleNamespace(backend="rosemux"),
        lora_config=None,
        parallel_config=SimpleNamespace(
            data_parallel_size=ranks, data_parallel_external_lb=external
        ),
    )
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=config))
    reply = await ask(middleware, ENGINE_ROUTE, method="GET", app=app)
    told = msgspec.json.decode(reply.body, type=EngineReport).description
    assert (told.model, told.architecture) == ("policy", "LlamaForCausalLM")
    assert (told.context_tokens, told.vocabulary) == (4096, 512)
    assert (told.dtype, told.logprobs_mode) == ("bfloat16", "processed_logprobs")
    assert told.features == features


async def test_other_scopes_pass_untouched() -> None:
    seen: list[str] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope["type"])

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    await IdentityMiddleware(app)({"type": "lifespan"}, nothing, nothing)
    assert seen == ["lifespan"]
