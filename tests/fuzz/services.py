"""The services that are fuzzed, each in this process, with what a request needs to be served."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from aiohttp import web
from aiohttp.typedefs import Handler

from harvester.agent.http import application as agent_application
from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.contracts.clock import MonotonicClock, monotonic_ns
from harvester.contracts.ids import JobId
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.wire.leases import JOB_HEADER, LeaseGranted, LeaseRequest
from harvester.contracts.wire.stops import StopOrder, StopRequest
from harvester.proxy.engine_proxy import EngineProxy, ProxySettings
from scheduler.gateway.job_switches import JobSwitch
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.job_limits import KINDS
from scheduler.rollmux.cluster.runtime_events import Call, Submit
from scheduler.rollmux.control.async_api import AsyncPhaseApi
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.nodes_file import read_nodes
from scheduler.rollmux.control.planning import make_service
from scheduler.rollmux.control.socket_server import application as phases_application
from scheduler.rollmux.permits.events import Register
from tests.fuzz.requests import KnownRequests, ServedRequests
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_renderer import FakeRenderer
from tests.integration.gateway_in_process import Site, gateway_on
from weightsync import Publisher
from weightsync.layout.names import INDEX_FILE
from weightsync.serve.served_stores import SourceStores
from weightsync.serve.server import ServingLimits, WeightServer
from weightsync.transport.location import StoreRoot

CHECKOUT = Path(__file__).parents[2]
JOB = JobId("job")
_HOLD = {"order": "hold", "reason": "fuzzed"}
_HOUR_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class FuzzedService:
    url: str
    known: KnownRequests
    served: ServedRequests


@asynccontextmanager
async def _serving(app: web.Application) -> AsyncIterator[tuple[str, ServedRequests]]:
    site, served = Site(), ServedRequests()
    served.watch(app)
    await site.serve(app)
    try:
        yield site.url, served
    finally:
        await site.close()


@asynccontextmanager
async def _agent(folder: Path) -> AsyncIterator[FuzzedService]:
    """With a slot that can be leased, and a lease of another one. No order stays in force."""
    slots = []
    for name in ("slot0", "slot1"):
        pages = PageDirectory.create(folder / "pages" / name)
        writers = pages.pulse_writer("prod", 0), pages.guest_writer()
        writers[0].write(Pulse(model_samples=1000), now_ns=monotonic_ns(), ttl_ns=_HOUR_NS)
        writers[1].write(Guest(), now_ns=monotonic_ns(), ttl_ns=_HOUR_NS)
        slots.append({"name": name, "engine_url": f"http://{name}.invalid", "model": "m"})
    given = {"mode": "harvest", "page_root": folder / "pages", "state_dir": folder, "slots": slots}
    node = NodeAgent(AgentConfig.model_validate(given), clock=MonotonicClock(), version="0")

    async def beat() -> None:
        while True:
            node.order(StopRequest(order=StopOrder.NONE))
            node.beat()
            await asyncio.sleep(0.05)

    async with _beside(beat), _serving(agent_application(node)) as (url, served):
        lease = {"request_id": "r0", "slot": "slot0", "tenant": "t", "job": JOB, "duration_s": 30.0}
        request = msgspec.convert(lease | {"slot": "slot1", "request_id": "r1"}, LeaseRequest)
        node.beat()
        granted = node.take(request)
        assert isinstance(granted, LeaseGranted), granted
        known = KnownRequests(
            {
                "/v1/stops": _HOLD,
                "/v1/leases": lease,
                "/v1/leases/{lease}/renew": {"epoch": granted.epoch, "duration_s": 30.0},
            },
            {"lease": [granted.lease]},
        )
        yield FuzzedService(url, known, served)
    node.close()


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """vLLM's renderer answers a wrong body with 400; the fake one stumbles over it."""
    try:
        return await handler(request)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return web.json_response({"error": {"message": repr(error), "code": 400}}, status=400)


_SAMPLER = f"{'0' * 16}.0."
_TURN = {"token_ids": [4, 5, 6], "sampling_params": {"max_tokens": 2}}
_CHAT = {"model": JOB, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
_TEXT = {"model": JOB, "prompt": "hi", "max_tokens": 2}
_UPDATE = {"update_info": {"store": "job.store", "version": 2}}
_SAMPLE = {
    "sampling_session_id": _SAMPLER,
    "seq_id": 0,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]},
    "sampling_params": {"max_tokens": 2},
}
_GATEWAY = KnownRequests(
    {
        "/inference/v1/generate": _TURN,
        "/generate": {"input_ids": [4, 5, 6], "sampling_params": {"max_new_tokens": 2}},
        "/v1/chat/completions": _CHAT,
        "/v1/chat/completions/render": _CHAT,
        "/v1/completions": _TEXT,
        "/v1/completions/render": _TEXT,
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [4, 5]},
        "/v1/jobs/{job}/versions": {"version": 2, "store": "job.store"},
        "/v1/stops": _HOLD,
        "/update_weights": _UPDATE,
        "/v1/jobs/{job}/vllm/update_weights": _UPDATE,
        "/pull_weights": {"source_dir": "/srv/weights/job.store", "target_version": 2},
        "/update_weights_from_disk": {"weight_version": "2"},
        "/finish_weight_update": {"weight_version": "2"},
        "/v1/jobs/{job}/vllm/finish_weight_update": {"weight_version": "2"},
        "/update_weight_version": {"new_version": "2"},
        "/v1/jobs/{job}/vllm/update_weight_version": {"new_version": "2"},
        "/inference/v1/abort_requests": {"request_ids": ["r0"]},
        "/abort_requests": {"request_ids": ["r0"]},
        "/finish_session": {"session_id": "s0"},
        "/close_session": {"session_id": "s0"},
        "/abort_request": {"rid": "r0"},
        "/api/v1/create_sampling_session": {
            "session_id": "0" * 16,
            "sampling_session_seq_id": 0,
            "base_model": JOB,
        },
        "/api/v1/asample": _SAMPLE,
        "/api/v1/retrieve_future": {"request_id": f"{_SAMPLER}.0"},
    },
    {
        "job": [JOB],
        JOB_HEADER: [JOB],
        "model": [JOB],
        "mode": ["keep", "abort", "wait"],
        "for_s": ["1"],
        "sampler": [_SAMPLER],
        "session": ["0" * 16],
    },
)


@asynccontextmanager
async def _gateway(_folder: Path) -> AsyncIterator[FuzzedService]:
    """With two engines and a renderer that is one character a token. No pause and no switch that
    would hold turns stays in force."""
    times = {"queue_s": 2, "pin_s": 1, "publish_s": 2, "update_s": 1}
    renderer = Site()
    await renderer.serve(FakeRenderer().app(web.Application(middlewares=[_refusing])))
    engines = [FakeEngine(step_s=0.0005, epoch=None, context=64) for _ in range(2)]
    served = ServedRequests()
    async with gateway_on(
        *engines, renderers=[renderer.url], timeouts=times, watch=served.watch
    ) as gateway:

        async def let_turns_begin() -> None:
            while True:
                await asyncio.sleep(0.05)
                gateway.scheduler.pauses.end(JOB)
                gateway.scheduler.switches.set(JOB, JobSwitch.DEDICATED, on=True)

        gateway.service.open()
        assert (await gateway.post("/update_weights", _UPDATE))[0] == 200
        bodies = _GATEWAY.bodies | {"/workers": {"url": gateway.url}}
        async with _beside(let_turns_begin):
            yield FuzzedService(gateway.url, replace(_GATEWAY, bodies=bodies), served)
    await renderer.close()


@asynccontextmanager
async def _proxy(_folder: Path) -> AsyncIterator[FuzzedService]:
    """Before an engine that answers everything."""

    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({})

    app, engine = web.Application(), Site()
    app.router.add_route("*", "/{path:.*}", answer)
    await engine.serve(app)
    known = KnownRequests({"/collective_rpc": {"method": "rosemux_weights"}})
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        _serving(EngineProxy(session, ProxySettings(engine=engine.url)).app()) as (url, served),
    ):
        yield FuzzedService(url, known, served)
    await engine.close()


_CALL = {"job": JOB, "holder": "h0"}
_CALLS = {
    "/v1/phases/enter": {"type": "enter", "kind": "rollout"} | _CALL,
    "/v1/phases/withdraw": {"type": "withdraw"} | _CALL,
    "/v1/phases/unloaded": {"type": "unloaded"} | _CALL,
    "/v1/phases/beat": {"type": "beat", "job": JOB, "epoch": 1},
    "/v1/phases/leave": {"type": "leave", "job": JOB, "epoch": 1},
    "/v1/phases/forget": {"type": "forget", "job": "other"},
}
_REGISTERED = {
    "type": "register",
    "terms": {"job": JOB, "phases": [{"kind": "rollout", "nodes": ["roll-0"]}]},
}
_SUBMITTED = {
    "type": "submit",
    "spec": {
        "job": JOB,
        "slo": 3.0,
        "host_bytes": 1,
        "phases": [{"kind": kind, "max_s": 60.0} for kind in KINDS],
    },
}
_PERMITS = KnownRequests(
    _CALLS | {"/v1/phases/register": _REGISTERED},
    refused=frozenset({"POST /v1/phases/submit", "POST /v1/phases/node"}),
)
_PLANNED = KnownRequests(
    _CALLS
    | {
        "/v1/phases/submit": _SUBMITTED,
        "/v1/phases/node": {"type": "node", "node": "train-0", "failed": False},
    },
    refused=frozenset({"POST /v1/phases/register"}),
)


@asynccontextmanager
async def _phases(
    folder: Path, *, first: Call, known: KnownRequests, cluster: ClusterConfig | None
) -> AsyncIterator[FuzzedService]:
    """A phase control over TCP, with a job that it knows."""
    clock = MonotonicClock()
    settings = ControlSettings(cluster=cluster, state=folder / "state", journal=folder)
    service = make_service(settings, clock)
    service.call(first)
    api = AsyncPhaseApi(service, clock)
    async with _beside(api.tick), _serving(phases_application(api)) as (url, served):
        yield FuzzedService(url, known, served)
    service.close()


def _permits(folder: Path) -> AbstractAsyncContextManager[FuzzedService]:
    return _phases(
        folder, first=msgspec.convert(_REGISTERED, Register), known=_PERMITS, cluster=None
    )


def _planned(folder: Path) -> AbstractAsyncContextManager[FuzzedService]:
    cluster = read_nodes(CHECKOUT / "examples/nodes.yaml")
    return _phases(
        folder, first=msgspec.convert(_SUBMITTED, Submit), known=_PLANNED, cluster=cluster
    )


@asynccontextmanager
async def _weights(folder: Path) -> AsyncIterator[FuzzedService]:
    """With one store of one version, without a long wait for another."""
    with Publisher(folder / "store") as publisher:
        publisher.publish({"w": torch.ones(40, 5)})
    known = KnownRequests(
        parameters={
            "store": ["store"],
            "directory": ["weight_v000001"],
            "file": [INDEX_FILE, "model-00001-of-00001.safetensors"],
            "Range": ["bytes=8-15", "bytes=-1", "bytes=9-", "bytes=999999-", "lines=1"],
        }
    )
    stores = SourceStores(StoreRoot(folder))
    app = WeightServer(stores, limits=ServingLimits(wait_max_s=0.1)).app()
    async with _serving(app) as (url, served):
        yield FuzzedService(url, known, served)
    await stores.close()


@asynccontextmanager
async def _beside(loop: Callable[[], Any]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(loop())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


SERVICES: dict[str, Callable[[Path], AbstractAsyncContextManager[FuzzedService]]] = {
    "agent": _agent,
    "gateway": _gateway,
    "proxy": _proxy,
    "permits": _permits,
    "planned": _planned,
    "weights": _weights,
}
