"""A guest that its operator stops or kills: real agent, `rosemux guest`, real vLLM."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.testbed.prerequisites import free_ports
from examples.grpo.model import write_checkpoint
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageName, Pulse
from tests.integration.engine_slot import SHAPE
from tests.integration.test_agent_process import Agent, wait_for

pytestmark = pytest.mark.engine

GUEST = """\
    guest:
      model: {root}/model
      weights: {root}/weights
      context_tokens: {context}
      kv_cache_bytes: 1073741824
      arguments: [--load-format, dummy]
      {where}
"""
ON_A_CPU = "isolation: none"
START_S, STOP_S = 200.0, 60.0
MINUTE_NS = 60 * 10**9


class Slot(Agent):
    """A production that is idle throughout, and a guest that a command starts."""

    def __init__(self, root: Path, where: str = ON_A_CPU) -> None:
        write_checkpoint(root / "model", SHAPE)
        (root / "weights").mkdir()
        super().__init__(root)
        pulse = self.pages.pulse_writer("prod", 0)
        pulse.write(Pulse(model_samples=1000), now_ns=monotonic_ns(), ttl_ns=20 * MINUTE_NS)
        pulse.close()
        file = root / "guest.yaml"
        text = self.config.read_text().replace(":8001", f":{free_ports(1)[0]}")
        file.write_text(text + GUEST.format(root=root, context=SHAPE.context_tokens, where=where))
        command = [sys.executable, "-m", "harvester.cli", "guest", "--config", str(file)]
        self.guest = subprocess.Popen(command)

    def offer(self) -> tuple[str, str]:
        (offer,) = self.call("GET", "/v1/slots")["slots"]
        return offer["state"], offer["reason"]

    def metric(self, series: str) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        (line,) = [line for line in lines if line.startswith(series + " ")]
        return str(line.rpartition(" ")[2])

    def end(self) -> None:
        if self.guest.poll() is None:
            for process in psutil.Process(self.guest.pid).children(recursive=True):
                process.kill()
            self.guest.kill()
        self.guest.wait()
        super().end()


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    slot = Slot(tmp_path)
    yield slot
    slot.end()


def test_a_guest_that_its_operator_stops_is_no_loss(slot: Slot) -> None:
    wait_for(lambda: slot.offer()[0] == "offered", seconds=START_S)
    slot.take("r1")
    wait_for(lambda: slot.mode() == "open")
    slot.guest.send_signal(signal.SIGTERM)
    wait_for(lambda: slot.offer() == ("off", "guest stopped on purpose"), seconds=5)
    assert slot.guest.wait(STOP_S) == 0
    assert not (slot.pages.path / PageName.GUEST).exists()
    assert slot.offer() == ("off", "guest stopped on purpose")
    assert slot.metric('harvester_leases_ended_total{reason="drain",slot="slot0"}') == "1.0"
    assert slot.metric('harvester_leases_ended_total{reason="guest_lost",slot="slot0"}') == "0.0"
    assert slot.metric('harvester_signal_age_seconds{slot="slot0",source="guest"}') == "NaN"


def test_a_killed_command_leaves_no_engine_even_one_that_reads_no_signal(slot: Slot) -> None:
    wait_for(lambda: slot.offer()[0] == "offered", seconds=START_S)
    (server,) = psutil.Process(slot.guest.pid).children()
    left = server.children(recursive=True)
    assert any("EngineCore" in process.name() for process in left)
    server.suspend()
    slot.guest.kill()
    psutil.wait_procs([server, *left], timeout=10)
    assert [process for process in left if process.is_running()] == []
