"""The control daemon's command language, as a stand-in for its executable speaks it."""

from pathlib import Path

import pytest

from harvester.contracts.errors import PeerProtocolError, Unsupported
from harvester.platform.mps import MpsControl, ServerStatus
from tests.mps_daemon import EXECUTABLE, MpsDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> MpsDaemon:
    return MpsDaemon(tmp_path)


def test_before_the_first_client_there_is_no_server(daemon: MpsDaemon) -> None:
    assert daemon.control.servers() == ()


def test_servers_and_their_clients_are_read(daemon: MpsDaemon) -> None:
    daemon.serve({70: [11, 12], 71: []})
    assert daemon.control.servers() == (70, 71)
    assert daemon.control.clients(70) == (11, 12)
    assert daemon.control.clients(71) == ()
    assert daemon.control.status(70) is ServerStatus.ACTIVE
    daemon.serve({70: []}, status="FAULT")
    assert daemon.control.status(70) is ServerStatus.FAULT
    daemon.serve({70: []}, status="something new")
    assert daemon.control.status(70) is ServerStatus.UNKNOWN


def test_a_client_s_work_is_ended_and_a_refusal_is_reported(daemon: MpsDaemon) -> None:
    daemon.serve({70: [11, 12]})
    assert daemon.control.terminate_client(70, 11)
    assert daemon.control.clients(70) == (12,)
    daemon.serve({70: [12]}, refuses=True)
    assert not daemon.control.terminate_client(70, 12)
    assert daemon.control.clients(70) == (12,)


def test_a_missing_daemon_program_or_answer_is_reported_as_such(
    daemon: MpsDaemon, tmp_path: Path
) -> None:
    daemon.stop()
    with pytest.raises(Unsupported, match=f"no MPS daemon answers in {tmp_path}"):
        daemon.control.servers()
    with pytest.raises(Unsupported, match="not installed here"):
        MpsControl(pipe_directory=tmp_path, executable="nvidia-cuda-mps-none").servers()
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    with pytest.raises(Unsupported, match=r"no answer in 0\.1 s"):
        MpsControl(pipe_directory=tmp_path, executable=str(hangs), timeout_s=0.1).servers()


@pytest.mark.parametrize("where", ["", ">&2"], ids=["output", "error"])
def test_a_program_that_finds_no_daemon_is_not_read_as_a_daemon_without_servers(
    tmp_path: Path, where: str
) -> None:
    alone = tmp_path / "alone"
    alone.write_text(f"#!/bin/sh\necho Cannot find MPS control daemon process {where}\n")
    alone.chmod(0o755)
    with pytest.raises(Unsupported, match="no MPS daemon answers"):
        MpsControl(pipe_directory=tmp_path, executable=str(alone), timeout_s=30.0).servers()


def test_a_reply_that_is_no_list_of_processes_is_not_believed(tmp_path: Path) -> None:
    talks = tmp_path / "talks"
    talks.write_text("#!/bin/sh\necho 12 and more\n")
    talks.chmod(0o755)
    with pytest.raises(PeerProtocolError, match="get_server_list"):
        MpsControl(pipe_directory=tmp_path, executable=str(talks), timeout_s=30.0).servers()


def test_the_stand_in_refuses_what_the_daemon_does_not_know(daemon: MpsDaemon) -> None:
    daemon.serve({70: []})
    with pytest.raises(PeerProtocolError):
        daemon.control._numbers("get_everything")
    assert EXECUTABLE.exists()
    assert daemon.commands() == ["get_everything"]
