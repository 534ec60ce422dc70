"""The walks of docs/architecture.md are those that a trace of the running parts takes."""

import asyncio
import math
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from coserve.guest.guest_slot import GuestSlot
from coserve.pulse.engine_cores import EngineStep
from coserve.vllm.capabilities import capabilities
from coserve.vllm.environment import Role, SlotEnvironment
from coserve.vllm.gated_loop import GatedLoop
from coserve.vllm.middleware import EpochMiddleware
from coserve.vllm.pulse_reporter import PulseReporter
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.ids import JobId, NodeId, WeightVersion
from harvester.contracts.wire.rollouts import AnnounceState
from harvester.platform.http_kit import serving
from scheduler.model import PhaseKind
from scheduler.rollmux.control.async_api import AsyncPhaseApi
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.phase_client import PhaseClient
from scheduler.rollmux.control.planning import make_service
from scheduler.rollmux.control.socket_server import application, listening_socket
from scheduler.rollmux.control.socket_transport import SocketTransport
from scheduler.rollmux.permits.terms import JobTerms, PhaseTerms
from tests.integration.fake_engine import FakeEngine
from tests.integration.gateway_in_process import GatewayInProcess, gateway_on
from tests.unit.coserve.conftest import Slot
from tests.unit.coserve.vllm.test_gated_loop import Core
from tests.unit.docs.trace import Trace
from tests.unit.harvester.agent.test_node import Stage
from tests.unit.weightsync.vllm.plain_model import PlainModel
from weightsync.publisher import Publisher
from weightsync.transport.location import StoreRoot
from weightsync.vllm.engine_weights import EngineWeights
from weightsync.vllm.prepared_version import RequestedVersion

PAGE = "docs/architecture.md"
HEADING = "## Walks through the code"
MOST_RETURNS = 5
LEFT_OUT = (
    "harvester/contracts/",
    "harvester/platform/",
    "weightsync/elements/",
    "weightsync/encoding/",
)
WITHIN_S = 120.0


@dataclass(frozen=True)
class Walk:
    files: list[str]
    """In order, each as often as the walk enters it."""
    untraced: set[str]
    returns: int
    """Returns to the file that is entered most often, as the page counts them."""
    beside: set[str]

    @property
    def traced(self) -> list[str]:
        """Files of the walk that a trace can see, no one twice in a row."""
        seen = [file for file in self.files if file not in self.untraced]
        return [file for at, file in enumerate(seen) if seen[at - 1 : at] != [file]]


@pytest.fixture
def walks(repository: Path) -> dict[str, Walk]:
    """A name without its package is in the package of the one before it."""

    def files(cell: str, package: str = "") -> Iterator[tuple[str, bool]]:
        for name, mark in re.findall(r"`([\w/]+\.py)`(†?)", cell):
            top, _, rest = name.partition("/")
            if (repository / top / "__init__.py").is_file():
                package, name_within = top, rest
            else:
                name_within = name
            found = (repository / package).rglob(Path(name).name)
            paths = [path.relative_to(repository).as_posix() for path in found]
            paths = [path for path in paths if f"/{path}".endswith(f"/{name_within}")]
            assert len(paths) == 1, f"{name} in {package}: {paths}"
            yield paths[0], bool(mark)

    section = (repository / PAGE).read_text().partition(f"\n{HEADING}\n")[2].partition("\n## ")[0]
    form = r"### (.+)\n((?:1\. .+\n)+)\nBeside them: ((?:`.+\n)+)\n.+ again (\d+) times\.\n"
    found = re.findall(form, section)
    assert len(found) == section.count("\n### "), "a walk is in another form"
    return {
        walk: Walk(
            [file for file, _ in files(way)],
            {file for file, untraced in files(way) if untraced},
            int(again),
            {file for file, _ in files(beside)},
        )
        for walk, way, beside, again in found
    }


@pytest.fixture
def trace(repository: Path) -> Trace:
    return Trace(repository)


def check(walk: Walk, trace: Trace) -> None:
    first = list(dict.fromkeys(trace.passed))
    assert [file for file in first if file in walk.traced] == list(dict.fromkeys(walk.traced))
    rest = iter(trace.passed)
    for at, file in enumerate(walk.traced):
        assert file in rest, f"never after {walk.traced[:at]}"
    others = {file for file in first if not file.startswith(LEFT_OUT)} - set(walk.traced)
    assert (others - walk.beside, walk.beside - others) == (set(), set()), "not listed, not entered"


def test_no_walk_enters_a_file_again_more_than_five_times(walks: dict[str, Walk]) -> None:
    for name, walk in walks.items():
        assert all(here != before for before, here in pairwise(walk.files)), name
        returns = max(Counter(walk.files).values()) - 1
        assert (name, returns) == (name, walk.returns)
        assert returns <= MOST_RETURNS, name


@asynccontextmanager
async def gateway_beside(engine: FakeEngine) -> AsyncIterator[GatewayInProcess]:
    """A gateway whose engine serves already, and whose probes are rare."""
    async with gateway_on(engine, timeouts={"health_s": 60.0}) as gateway:
        while (await gateway.status())["engines"]["e0"]["state"] != "serving":  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.01)
        yield gateway


async def test_a_turn_takes_its_walk(walks: dict[str, Walk], trace: Trace) -> None:
    async with gateway_beside(FakeEngine(step_s=0.001, epoch=None)) as gateway:
        with trace.recording():
            status, _ = await gateway.generate("turn", 2)
    assert status == 200
    check(walks["A turn, at the gateway"], trace)


async def test_a_turn_in_a_guest_takes_its_walk(
    walks: dict[str, Walk], trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = Slot(tmp_path)
    slot.grant()
    slot.pulse()
    for name, value in (("ROLE", "guest"), ("ENGINE", "prod"), ("PAGE_DIR", str(tmp_path))):
        monkeypatch.setenv(f"ROSEMUX_{name}", value)
    replies: list[Any] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        replies.append(message)

    guest, core = GuestSlot(tmp_path, token_limit=512), Core()
    core.gate.admits = lambda: guest.decide(for_step=True).open
    GatedLoop(core, core.gate, capabilities("0.32.0"))
    middleware = EpochMiddleware(app)
    headers = [(b"x-rosemux-epoch", b"1")]
    path = "/inference/v1/generate"
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    with trace.recording():
        await middleware(scope, receive, send)
        core._process_input_queue()
        core.step_fn()
    guest.close()
    assert (replies[0]["status"], core.in_step) == (200, [True])
    check(walks["The same turn, in a guest"], trace)


def test_a_grant_takes_its_walk(walks: dict[str, Walk], trace: Trace, tmp_path: Path) -> None:
    profile = {"prefill_base_s": 0.01, "decode_base_s": 0.01}
    policy = {"proof": {"share_ratio": 0.0}, "profile": profile}
    stage = Stage(tmp_path, slots=[{"name": "slot0", "policy": policy}])
    reporter = PulseReporter(SlotEnvironment(Role.PRODUCTION, "prod", stage.pages.path))
    reporter.attach_middleware()
    stage.guest()
    stage.beats(3)
    stage.take()
    stage.beats(2)
    step = EngineStep(
        running=0,
        kv_usage_ratio=0.5,
        ttft_s=(),
        prompt_tokens=0,
        generation_tokens=0,
        inter_token_s=(),
        finished_prompt_tokens=(),
    )
    # Once a second the audit looks for its file: not in this beat.
    stage.node.audit._retry_at_s = math.inf
    with trace.recording():
        reporter.step(lambda: step)
        stage.beats()
    assert stage.grant().mode == "open"
    stage.node.close()
    check(walks["A grant"], trace)


class EngineWithWeights(FakeEngine):
    """Its workers' part of an update is real."""

    def __init__(self, weights: EngineWeights) -> None:
        super().__init__(step_s=0.001, epoch=None)
        self._weights = weights

    async def stage(self, body: dict[str, Any]) -> web.Response:
        status = self._weights.stage(self._requested(body["kwargs"]))
        return web.json_response({"results": [{"state": status.state, "message": status.message}]})

    def _control(self, path: str, body: dict[str, Any]) -> str:
        fault = super()._control(path, body)
        if path == "/update_weights" and not fault:
            self._weights.load(self._requested(body["update_info"]))
        if path == "/finish_weight_update":
            self._weights.release()
        return fault

    def _requested(self, update: dict[str, Any]) -> RequestedVersion:
        return RequestedVersion(store=update["store"], version=WeightVersion(update["version"]))


async def test_a_delta_takes_its_walk(walks: dict[str, Walk], trace: Trace, tmp_path: Path) -> None:
    # The first run compiles loops for as long as it takes, untraced.
    await publish_a_delta(tmp_path / "compiles", None)
    with trace.of_threads():
        await publish_a_delta(tmp_path / "runs", trace)
    check(walks["A delta, from trainer to engine"], trace)


async def publish_a_delta(root: Path, trace: Trace | None) -> None:
    root.mkdir()
    state = {"layer.weight": torch.arange(1200.0).reshape(40, 30).bfloat16()}
    model = PlainModel(state)
    weights = EngineWeights(model, None, StoreRoot(root), packed_ahead_bytes=0)
    async with gateway_beside(EngineWithWeights(weights)) as gateway:
        announce = f"{gateway.url}/v1/jobs/job"
        with Publisher(root / "job.store", announce=announce) as publisher:

            def published() -> bool:
                publisher.publish(state)
                return publisher.announced(WITHIN_S) is AnnounceState.SERVED

            assert await in_thread(published)
            state["layer.weight"][3] += 1
            with nullcontext() if trace is None else trace.recording():
                assert await in_thread(published)
    weights.close()
    assert model.holds(state)


async def in_thread(work: Callable[[], bool]) -> bool:
    """The result of a new thread, so that it is traced."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    results: list[bool] = []

    def run() -> None:
        results.append(work())
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, daemon=True).start()
    await asyncio.wait_for(done.wait(), WITHIN_S)
    return results[0]


@contextmanager
def phase_control(directory: Path) -> Iterator[Path]:
    """The socket of a phase control on a thread; without its ticks."""
    socket, ready = directory / "phases.sock", threading.Event()
    ends: list[Callable[[], None]] = []

    async def serve() -> None:
        clock, end = MonotonicClock(), asyncio.Event()
        loop = asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(end.set) and None)
        service = make_service(
            ControlSettings(state=directory / "state.sqlite", journal=directory / "journal"), clock
        )
        async with serving(application(AsyncPhaseApi(service, clock)), shutdown_s=0.1) as runner:
            await web.SockSite(runner, listening_socket(socket)).start()
            ready.set()
            await end.wait()
        service.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(WITHIN_S)
    try:
        yield socket
    finally:
        ends[0]()
        thread.join(WITHIN_S)


def test_a_permit_takes_its_walk(walks: dict[str, Walk], trace: Trace, tmp_path: Path) -> None:
    phases = (PhaseTerms(kind=PhaseKind.ROLLOUT, nodes=(NodeId("r0"),)),)
    with trace.of_threads(), phase_control(tmp_path) as socket:
        job = PhaseClient(SocketTransport(socket), JobTerms(job=JobId("a"), phases=phases))
        phase = job.phase("rollout")
        with trace.recording(), phase as permit:
            assert permit.nodes == ("r0",)
    check(walks["A permit"], trace)
