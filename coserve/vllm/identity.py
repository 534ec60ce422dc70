"""ASGI middleware for a rollout engine: every reply says which process and which weights made it.

coserve.vllm.identity.IdentityMiddleware   header `X-RoseMux-Engine`; GET /rosemux/engine

The identity is a random number of this process and a count of the calls that may have changed its
weights. A request that names an identity in the same header is served by exactly that one: another
one refuses it (412), and a call that may change weights ends its stream before the next token.
Changes nothing else and calls nothing of vLLM's engine.
"""

import json
import os
import secrets

import msgspec

from coserve.vllm import continuation
from coserve.vllm.environment import SLOT_VARIABLE
from coserve.vllm.middleware import App, Message, Receive, Scope, Send, reply_json
from harvester.contracts.stock_fallback import GUEST_ROLE, ROLE_VARIABLE
from harvester.contracts.wire.engines import (
    CONTINUATION_FEATURE,
    ENGINE_HEADER,
    ENGINE_ROUTE,
    FIRST_CORE_FEATURE,
    WEIGHTS_FEATURE,
    EngineDescription,
    EngineReport,
    WorkerMethod,
)

_HEADER = ENGINE_HEADER.lower().encode()
_RPC = "collective_rpc"
_WEIGHT_CALLS = frozenset(
    (
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weight_version",
        "weight_checker",
        "load_lora_adapter",
        "unload_lora_adapter",
        "sleep",
        "wake_up",
        _RPC,
    )
)
"""Last parts of the paths of vLLM's routes after which the weights may be others."""
_MOST_BODY_BYTES = 64 << 10


class IdentityMiddleware:
    def __init__(self, app: App) -> None:
        self._app = app
        self._instance = secrets.token_hex(8)
        self._weight_calls = 0
        guest = os.environ.get(ROLE_VARIABLE) == GUEST_ROLE
        self._slot = os.environ.get(SLOT_VARIABLE, "") if guest else ""

    @property
    def identity(self) -> str:
        return f"{self._instance}.{self._weight_calls}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"].rstrip("/")
        if scope["method"] == "GET" and path.endswith(ENGINE_ROUTE):
            report = EngineReport(
                identity=self.identity, description=_description(scope), slot=self._slot
            )
            await reply_json(send, 200, msgspec.json.encode(report), _header(self.identity))
        elif scope["method"] == "POST" and path.rpartition("/")[2] in _WEIGHT_CALLS:
            await self._weight_call(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        expected = next((value for name, value in scope["headers"] if name == _HEADER), b"").decode(
            "latin-1"
        )
        if expected and expected != self.identity:
            refusal = json.dumps({"error": f"this is engine {self.identity}, not {expected}"})
            await reply_json(send, 412, refusal.encode(), _header(self.identity))
            return
        cut = False

        async def stamped(message: Message) -> None:
            nonlocal cut
            if cut:
                return
            if message["type"] == "http.response.start":
                message = _stamped(message, self.identity)
            elif expected and expected != self.identity:
                # Omits the protocol's end, so that the reader takes the stream for broken.
                cut, message = True, {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, receive, stamped)

    async def _weight_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].rstrip("/").endswith(_RPC):
            body, receive = await _read(receive)
            if _reads_only(body):
                await self._serve(scope, receive, send)
                return
        # Before and after: neither an identity from before the call nor one made while it ran may
        # be taken for the weights after it.
        self._weight_calls += 1

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._weight_calls += 1
                message = _stamped(message, self.identity)
            await send(message)

        try:
            await self._app(scope, receive, stamped)
        except BaseException:
            self._weight_calls += 1
            raise


def _description(scope: Scope) -> EngineDescription:
    """The server's vllm_config as a description; facts that it lacks are left unknown."""
    config = getattr(scope["app"].state, "vllm_config", None) if "app" in scope else None
    if config is None:
        return EngineDescription()
    model = config.model_config
    served = model.served_model_name
    transfer = getattr(config, "weight_transfer_config", None)
    weights = transfer is not None and transfer.backend == "rosemux"
    parallel = config.parallel_config
    several = parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb
    return EngineDescription(
        model=served if isinstance(served, str) else str(served[0]) if served else "",
        architecture=",".join(getattr(model.hf_config, "architectures", None) or ()),
        context_tokens=int(model.max_model_len),
        vocabulary=int(model.get_vocab_size()),
        dtype=str(model.dtype).removeprefix("torch."),
        logprobs_mode=str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
        features=(
            *((WEIGHTS_FEATURE,) if weights else ()),
            *((CONTINUATION_FEATURE,) if continuation.accepts_emitted_output() else ()),
            *(("lora",) if config.lora_config is not None else ()),
            *((FIRST_CORE_FEATURE,) if several else ()),
        ),
    )


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The body as far as it is looked at, and a `receive` that gives all of it again."""
    messages: list[Message] = []
    body = b""
    while True:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if not message.get("more_body", False) or len(body) > _MOST_BODY_BYTES:
            break

    async def again() -> Message:
        return messages.pop(0) if messages else await receive()

    return body, again


def _reads_only(body: bytes) -> bool:
    """Our worker methods leave the weights in force as they are."""
    try:
        return json.loads(body)["method"] in tuple(WorkerMethod)
    except (ValueError, TypeError, KeyError):
        return False


def _stamped(message: Message, identity: str) -> Message:
    return {**message, "headers": [*message.get("headers", ()), _header(identity)]}


def _header(identity: str) -> tuple[bytes, bytes]:
    return _HEADER, identity.encode()
