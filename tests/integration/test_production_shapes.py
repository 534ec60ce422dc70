"""One production engine of two API servers and two data-parallel ranks: a pulse for each server.

The guest is fake down to its engine: its side of the slot reads the real pulses. Each server
knows its own requests only, and hears of a rank now and then.
"""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from benchmarks.testbed.prerequisites import free_ports
from benchmarks.testbed.processes import Child, Processes
from coserve.guest.guest_slot import GuestSlot
from coserve.law.gate import Closed
from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineSpec
from examples.grpo.model import write_checkpoint
from harvester.agent.sense import SlotSensor
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.ids import Epoch
from harvester.contracts.page import (
    Grant,
    GrantMode,
    PageDirectory,
    PageFault,
    Pulse,
    latest_cores,
)
from harvester.policy.production import kv_usage_ratio
from harvester.policy.sample import KillSwitch, LeaseView
from tests.integration.engine_slot import CONTEXT_TOKENS, SHAPE, completed, until, wait_for
from tests.integration.forked_program import begin_forked

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SERVE = Path(__file__).with_name("vllm_serve.py")
PULSES = ("pulse.wide.0", "pulse.wide.1")
START_S = 500.0
HOUR_NS = 3_600_000_000_000


@dataclass
class WideProduction:
    url: str
    pages: PageDirectory
    child: Child
    granted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._readers = {name: self.pages.pulse_reader(name) for name in PULSES}

    def pulses(self) -> dict[str, Pulse]:
        """Each as it is left, however old."""
        left = {name: reader.read_left().record for name, reader in self._readers.items()}
        return {name: record or Pulse() for name, record in left.items()}

    def total(self, field: str) -> int:
        return sum(getattr(pulse, field) for pulse in self.pulses().values())

    def decoding(self) -> set[str]:
        return {name for name, pulse in self.pulses().items() if pulse.decoding}

    def ranks(self) -> set[int]:
        return {core.rank for pulse in self.pulses().values() for core in pulse.cores}

    async def complete(self, max_tokens: int) -> int:
        """On a connection of its own, so that another server may take it."""
        return await completed(self.url, "wide", max_tokens)

    async def burst(self, requests: int, max_tokens: int) -> None:
        done = await asyncio.gather(*[self.complete(max_tokens) for _ in range(requests)])
        assert done == [max_tokens] * requests

    def server(self, pulse: str) -> psutil.Process:
        """The API server process that writes it, which signs the lock of its page."""
        (lock,) = self.pages.path.rglob(f".{pulse}.lock")
        return psutil.Process(int(lock.read_text().split()[0]))


@contextmanager
def started(root: Path) -> Iterator[WideProduction]:
    pages = PageDirectory.create(root / "pages")
    write_checkpoint(root / "model", SHAPE)
    (port,) = free_ports(1)
    spec = EngineSpec(
        name="wide",
        model=root / "model",
        port=port,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=8,
        vllm=capabilities(installed_vllm_version()),
        extra_arguments=("--load-format", "dummy", "--data-parallel-size", "2"),
    )
    command = launch.production(spec, pages=pages.path)
    arguments = list(command.arguments)
    module = arguments.index("-m")
    arguments[module : module + 2] = [str(SERVE)]
    arguments += ["--api-server-count", "2"]
    with Processes(root / "logs", begin=begin_forked) as processes:
        child = processes.start("wide", arguments, environment=command.environment)
        url = f"http://127.0.0.1:{port}"
        wait_for(url, child, within_s=START_S)
        yield WideProduction(url, pages, child)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WideProduction]:
    pytest.importorskip("vllm")
    with started(tmp_path_factory.mktemp("wide")) as production:
        yield production


@pytest.fixture
async def guest(wide: WideProduction) -> AsyncIterator[GuestSlot]:
    slot = GuestSlot(wide.pages.path, token_limit=512)
    renewing = asyncio.create_task(keep_granted(wide))
    yield slot
    renewing.cancel()
    slot.close()


async def keep_granted(wide: WideProduction) -> None:
    """A grant is believed for seconds."""
    while True:
        await asyncio.sleep(1.0)
        if wide.granted:
            grant(wide, wide.granted)


def grant(wide: WideProduction, pulses: tuple[str, ...]) -> None:
    """No slack at all while production decodes; ten seconds of it while production is idle."""
    wide.granted = pulses
    record = Grant(
        epoch=1,
        mode=GrantMode.OPEN,
        pulses=pulses,
        ttft_slo_s=10.0,
        itl_slo_s=0.0,
        epsilon=math.inf,
    )
    wide.pages.grant_writer().write(record, now_ns=monotonic_ns(), ttl_ns=HOUR_NS)


def expected(wide: WideProduction) -> tuple[str, ...]:
    """Pulse pages that an agent without a list expects."""
    sensor = SlotSensor(wide.pages, pulses=())
    try:
        sample = sensor.sample(lease=LeaseView(epoch=Epoch(1)), kill_switch=KillSwitch.NONE)
    finally:
        sensor.close()
    return tuple(reading.name for reading in sample.pulses)


async def closed_by_one(
    wide: WideProduction, guest: GuestSlot, turn: asyncio.Task[int]
) -> set[str]:
    """The one server that decodes, once the gate was seen closed for it; empty if it was not before
    the turn's end. A front end that is always busy may answer a turn as late as the next one."""
    closed_by: set[str] = set()

    def seen() -> bool:
        nonlocal closed_by
        busy = wide.decoding()
        closed = guest.decide().reason is Closed.NO_SLACK
        if closed and len(busy) == 1 and wide.decoding() == busy:
            closed_by = busy
        return bool(closed_by) or turn.done()

    await until(seen, "one server alone closes the gate", seen=wide.pulses)
    return closed_by


async def test_each_api_server_has_a_pulse_and_every_request_is_in_one_of_them(
    wide: WideProduction,
) -> None:
    assert expected(wide) == PULSES
    sent = wide.total("requests_total")
    burst = asyncio.create_task(wide.burst(8, 1500))
    await until(lambda: wide.total("in_flight") == 8, "all are in flight", seen=wide.pulses)
    await until(lambda: wide.total("decoding") == 8, "all decode", seen=wide.pulses)
    await burst
    await until(lambda: wide.total("in_flight") == 0, "none is in flight", seen=wide.pulses)
    assert wide.total("requests_total") == sent + 8
    assert wide.total("samples_total") == sent + 8


async def test_both_servers_and_both_ranks_report_and_an_idle_engine_holds_no_kv(
    wide: WideProduction,
) -> None:
    for _ in range(10):
        await wide.burst(8, 50)
        served = [pulse.requests_total for pulse in wide.pulses().values()]
        if all(served) and wide.ranks() == {0, 1}:
            break
    assert all(served)
    assert wide.ranks() == {0, 1}
    await until(
        lambda: kv_usage_ratio(wide.pulses()) == 0.0, "the newest word is none", seen=wide.pulses
    )
    held = [core.running + core.waiting for core in latest_cores(tuple(wide.pulses().values()))]
    assert held == [0, 0], "nor does either server's word keep them busy"
    assert wide.total("unseen_steps_total") == 0


async def test_the_gate_needs_every_servers_pulse_and_obeys_each_of_them(
    wide: WideProduction, guest: GuestSlot
) -> None:
    grant(wide, PULSES)
    await until(lambda: guest.decide().open, "an idle production leaves slack")
    busy: set[str] = set()
    for _ in range(8):
        # The second comes while one server is taken, and goes on alone.
        first = asyncio.create_task(wide.complete(1500))
        busy |= await closed_by_one(wide, guest, first)
        second = asyncio.create_task(wide.complete(3000))
        await first
        busy |= await closed_by_one(wide, guest, second)
        await second
        if len(busy) == 2:
            break
    assert busy == set(PULSES), "each of them closed it while the other was idle"
    await until(lambda: guest.decide().open, "and open again")
    stopped = wide.server(PULSES[1])
    stopped.suspend()
    try:
        await until(lambda: guest.decide().reason is Closed.PULSE_FAULT, "one server is silent")
        assert guest.last.fault is PageFault.EXPIRED
        grant(wide, PULSES[:1])
        assert guest.decide().open, "a grant names which must be there"
        grant(wide, PULSES)
        assert not guest.decide().open
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    await until(lambda: guest.decide().open, "it beats again")
