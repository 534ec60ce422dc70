"""`python -m tests.fuzz [NAME…]`: does each API do what its OpenAPI document says, whatever it is
sent?

schemathesis makes requests from the document of agent, gateway, phase control and weight server,
valid ones and wrong ones, and holds replies to it: no 5xx, the statuses, content types and schemas
that it names. Ends with 1 where one does not.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
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
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.wire.leases import JOB_HEADER
from scheduler.rollmux.control.async_api import AsyncPhaseApi
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.make_service import make_service
from scheduler.rollmux.control.nodes_file import read_nodes
from scheduler.rollmux.control.socket_server import application as phases_application
from tests.integration.fake_engine import FakeEngine
from tests.integration.fake_renderer import FakeRenderer
from tests.integration.gateway_in_process import Site, gateway_on
from weightsync import Publisher
from weightsync.layout.names import INDEX_FILE
from weightsync.serve.served_stores import SourceStores
from weightsync.serve.server import ServingLimits, WeightServer
from weightsync.transport.location import StoreRoot

CHECKOUT = Path(__file__).parents[2]
_ENVIRONMENT = "schemathesis"
_HOUR_NS = 3600 * 10**9
_CHECKS = (
    *("not_a_server_error", "status_code_conformance"),
    *("content_type_conformance", "response_schema_conformance"),
)
_SEED = 1
_KNOWN = {"job": ["job"], JOB_HEADER: ["job"], "mode": ["keep"], "store": ["store"]}
_KNOWN |= {
    "directory": ["weight_v000001"],
    "file": [INDEX_FILE, "model-00001-of-00001.safetensors"],
}
_KNOWN |= {"Range": ["bytes=8-15", "bytes=-1", "bytes=9-", "bytes=999999-", "lines=1"]}
"""Values of parameters."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SERVICES)}")
    parser.add_argument("--examples", type=int, default=15, help="for each operation")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(SERVICES))
    if unknown:
        parser.error(f"no such API: {', '.join(unknown)}; there are {', '.join(SERVICES)}")
    names = given.names or list(SERVICES)
    failed = [name for name in names if asyncio.run(_fuzzed(name, given.examples))]
    sys.exit(f"not as their documents say: {', '.join(failed)}" if failed else 0)


async def _fuzzed(name: str, examples: int) -> int:
    """Exit status of schemathesis."""
    install = await asyncio.create_subprocess_exec(
        CHECKOUT / "deploy/clients/install", _ENVIRONMENT
    )
    if status := await install.wait():
        return status
    with tempfile.TemporaryDirectory(prefix="rosemux-fuzz-") as folder:
        async with SERVICES[name](Path(folder)) as url:
            document = Path(folder) / "document.json"
            document.write_bytes(msgspec.json.encode(await _document(url)))
            fuzzer = await asyncio.create_subprocess_exec(
                CHECKOUT / f"build/clients/{_ENVIRONMENT}/bin/python",
                *("-m", "schemathesis.cli", "run", str(document), "--url", url),
                *("--checks", ",".join(_CHECKS), "--max-examples", str(examples)),
                *("--seed", str(_SEED), "--request-timeout", "30", "--no-color"),
                cwd=folder,
            )
            return await fuzzer.wait()


async def _document(url: str) -> Any:
    """The service's own, with the names that it knows: a request with another name is refused
    before anything else of it is read."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/openapi.json") as reply:
        document = await reply.json()
    for methods in document["paths"].values():
        for operation in methods.values():
            for parameter in operation["parameters"]:
                if known := _KNOWN.get(parameter["name"]):
                    parameter["schema"]["enum"] = known
    return document


@asynccontextmanager
async def _served(app: web.Application) -> AsyncIterator[str]:
    site = Site()
    await site.serve(app)
    try:
        yield site.url
    finally:
        await site.close()


@asynccontextmanager
async def _agent(folder: Path) -> AsyncIterator[str]:
    """With one slot that can be leased."""
    pages = PageDirectory.create(folder / "pages" / "slot0")
    writers = pages.pulse_writer("prod", 0), pages.guest_writer()
    writers[0].write(Pulse(model_samples=1000), now_ns=monotonic_ns(), ttl_ns=_HOUR_NS)
    writers[1].write(Guest(), now_ns=monotonic_ns(), ttl_ns=_HOUR_NS)
    slot = {"name": "slot0", "engine_url": "http://127.0.0.1:1", "model": "m"}
    given = {"mode": "harvest", "page_root": folder / "pages", "state_dir": folder, "slots": [slot]}
    node = NodeAgent(AgentConfig.model_validate(given), clock=MonotonicClock(), version="0")

    async def beat() -> None:
        while True:
            node.beat()
            await asyncio.sleep(0.05)

    async with _beside(beat), _served(agent_application(node)) as url:
        yield url
    node.close()


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """vLLM's renderer answers a wrong body with 400; the fake one stumbles over it."""
    try:
        return await handler(request)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return web.json_response({"error": {"message": repr(error), "code": 400}}, status=400)


@asynccontextmanager
async def _gateway(_folder: Path) -> AsyncIterator[str]:
    """With two engines and a renderer that is one character a token."""
    times = {"queue_s": 2, "pin_s": 1, "publish_s": 2, "update_s": 1}
    async with (
        _served(FakeRenderer().app(web.Application(middlewares=[_refusing]))) as renderer,
        gateway_on(
            FakeEngine(step_s=0.0005, epoch=None),
            FakeEngine(step_s=0.0005, epoch=None),
            renderers=[renderer],
            timeouts=times,
        ) as gateway,
    ):
        yield gateway.url


@asynccontextmanager
async def _phases(folder: Path) -> AsyncIterator[str]:
    """A control that plans, over TCP: the fuzzer speaks to no Unix socket."""
    clock, nodes = MonotonicClock(), read_nodes(CHECKOUT / "examples/nodes.yaml")
    service = make_service(
        ControlSettings(cluster=nodes, state=folder / "state", journal=folder), clock
    )
    api = AsyncPhaseApi(service, clock)
    async with _beside(api.tick), _served(phases_application(api)) as url:
        yield url
    service.close()


@asynccontextmanager
async def _weights(folder: Path) -> AsyncIterator[str]:
    """With one store of one version, without a long wait for another."""
    with Publisher(folder / "store") as publisher:
        publisher.publish({"w": torch.ones(40, 5)})
    served = SourceStores(StoreRoot(folder))
    async with _served(WeightServer(served, limits=ServingLimits(wait_max_s=0.1)).app()) as url:
        yield url
    await served.close()


@asynccontextmanager
async def _beside(loop: Callable[[], object]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(loop())  # type: ignore[arg-type]
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


SERVICES: dict[str, Callable[[Path], AbstractAsyncContextManager[str]]] = {
    "agent": _agent,
    "gateway": _gateway,
    "phases": _phases,
    "weights": _weights,
}

if __name__ == "__main__":
    main()
