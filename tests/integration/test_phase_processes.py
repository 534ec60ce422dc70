"""Phase control between real processes: holders and the control killed and stopped."""

import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import Epoch, JobId
from scheduler.rollmux.control.command import forget as phases_forget
from scheduler.rollmux.control.command import status as phases_status
from scheduler.rollmux.control.socket_server import listening_socket
from scheduler.rollmux.control.socket_transport import SocketTransport
from scheduler.rollmux.control.wire import (
    ControlUnreachable,
    Ended,
)
from scheduler.rollmux.permits.events import (
    Beat,
)
from tests.integration.line_children import LineChild, LineChildren

LEASE_S = 5.0
"""Long enough for a holder on a busy machine to be heard, short enough to be waited for."""


@dataclass
class Machine:
    """One control and its jobs."""

    directory: Path
    children: LineChildren = field(default_factory=LineChildren)

    @property
    def socket(self) -> Path:
        return self.directory / "phases" / "phases.sock"

    def control(self, *arguments: str, module: bool = True) -> subprocess.Popen[str]:
        command = ("scheduler.rollmux.control",) if module else ("harvester.cli", "phases", "serve")
        process = self.children.start(
            *("-m", *command, "--socket", str(self.socket)),
            *("--state", str(self.directory / "state.sqlite")),
            *("--lease-s", str(LEASE_S), "--patience-s", "0.05"),
            *arguments,
        )
        transport, clock = SocketTransport(self.socket), MonotonicClock()
        until_s = clock.now() + 60.0
        while clock.now() < until_s:
            try:
                transport.call(Beat(job=JobId("nobody"), epoch=Epoch(1)))
            except ControlUnreachable:
                assert process.poll() is None
                continue
            return process
        raise AssertionError("the control did not answer")

    def job(self, name: str) -> "Job":
        module = "tests.integration.phase_job"
        return Job(self.children.start("-m", module, str(self.socket), name))


class Job(LineChild):
    def enter(self, kind: str) -> None:
        self.says(kind)

    def end(self) -> None:
        self.says("")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.children.stop()


def test_a_holder_that_is_killed_loses_its_permit_and_the_other_job_goes_on(
    machine: Machine,
) -> None:
    machine.control()
    first, second = machine.job("first"), machine.job("second")
    assert (first.hears(), second.hears()) == ("placed", "placed")
    first.enter("rollout")
    assert first.hears() == "granted 1"
    second.enter("rollout")
    first.kill()
    assert second.hears() == "granted 2"
    again = machine.job("first")
    assert again.hears() == "placed"
    again.enter("rollout")
    second.end()
    assert second.hears() == "ended"
    assert again.hears() == "granted 3"


def test_holders_go_on_while_the_control_is_dead_and_are_known_when_it_is_back(
    machine: Machine,
) -> None:
    control = machine.control()
    first, second = machine.job("first"), machine.job("second")
    assert (first.hears(), second.hears()) == ("placed", "placed")
    first.enter("rollout")
    assert first.hears() == "granted 1"
    second.enter("rollout")
    control.kill()
    control.wait()
    # The file that it left behind blocks nothing.
    assert machine.socket.exists()
    machine.control()
    first.end()
    assert first.hears() == "ended"
    assert second.hears() == "granted 2"
    first.enter("training")
    assert first.hears() == "granted 3"


def test_a_control_that_was_stopped_takes_no_permit_for_its_own_silence(
    machine: Machine,
) -> None:
    control = machine.control()
    job = machine.job("first")
    assert job.hears() == "placed"
    job.enter("rollout")
    assert job.hears() == "granted 1"
    control.send_signal(signal.SIGSTOP)
    job.process.send_signal(signal.SIGSTOP)
    threading.Event().wait(1.5 * LEASE_S)
    control.send_signal(signal.SIGCONT)
    job.process.send_signal(signal.SIGCONT)
    job.end()
    assert job.hears() == "ended"


def test_a_control_that_ends_leaves_the_socket_of_the_one_that_replaced_it(
    machine: Machine,
) -> None:
    control = machine.control()
    machine.socket.unlink()
    with closing(listening_socket(machine.socket)):
        control.terminate()
        control.wait(timeout=20.0)
        assert machine.socket.exists()


def test_the_socket_is_this_user_s_alone_and_has_one_control(machine: Machine) -> None:
    control = machine.control()
    assert stat.S_IMODE(machine.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(machine.socket.parent.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="another phase control"):
        listening_socket(machine.socket)
    transport = SocketTransport(machine.socket)
    assert isinstance(transport.call(Beat(job=JobId("j"), epoch=Epoch(1))), Ended)
    with pytest.raises(ConfigError, match="job"):
        transport.call(Beat(job=JobId("../j"), epoch=Epoch(1)))
    control.send_signal(signal.SIGTERM)
    assert control.wait(timeout=30) == 0
    with pytest.raises(ControlUnreachable):
        transport.call(Beat(job=JobId("j"), epoch=Epoch(1)))


def test_the_command_serves_shows_and_exports_the_holders(
    machine: Machine, free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.control("--metrics-port", str(free_port), module=False)
    job = machine.job("first")
    assert job.hears() == "placed"
    job.enter("rollout")
    assert job.hears() == "granted 1"
    (status,) = SocketTransport(machine.socket).jobs()
    assert (status.job, status.stage, status.nodes) == ("first", "running", ("r0",))
    phases_status(machine.socket)
    assert re.search(r"first.*rollout.*running.*r0", capfd.readouterr().out)
    phases_status(machine.socket, as_json=True)
    (told,) = msgspec.json.decode(capfd.readouterr().out)
    assert (told["job"], told["epoch"]) == ("first", 1)
    with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=10) as reply:
        said = reply.read().decode()
    assert 'scheduler_phase_permits_held{phase="rollout"} 1.0' in said
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{free_port}/v1/phases", timeout=10)


def test_an_unknown_job_is_named_when_it_is_to_be_forgotten(machine: Machine) -> None:
    machine.control()
    job = machine.job("first")
    assert job.hears() == "placed"
    phases_forget("first", machine.socket)
    for name in ("first", "nope"):
        with pytest.raises(ConfigError, match=f"no job {name} at "):
            phases_forget(name, machine.socket)


def test_a_metrics_port_that_is_taken_ends_the_start_with_one_line(
    machine: Machine, free_port: int
) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        command = ("harvester.cli", "phases", "serve", "--socket", str(machine.socket))
        ended = subprocess.run(
            [sys.executable, "-m", *command, "--metrics-port", str(free_port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 75, "the port may be free later"
    (told,) = ended.stderr.splitlines()
    assert told.startswith(f"rosemux: cannot listen on 127.0.0.1:{free_port}: ")
    assert told.endswith("; set another --metrics-port")
    assert not machine.socket.exists()
