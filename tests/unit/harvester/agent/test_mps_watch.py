"""The agent beside an MPS daemon: what it believes, what it grants, and how it ends a guest."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harvester.agent.guest_processes import GuestProcesses
from harvester.agent.mps_watch import MpsWatch
from harvester.config_file import load_agent_config
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import Guest
from harvester.contracts.process import ProcessId, process_ids
from harvester.contracts.wire.leases import SlotState
from harvester.policy.sample import MpsReading
from tests.mps_daemon import MpsDaemon

GUEST_PID, PRODUCTION_PID = 41, 7
GUEST = Guest(processes=(ProcessId(pid=GUEST_PID, start_ticks=1),), isolation="mps")
TOGETHER = MpsReading(clients=((PRODUCTION_PID, GUEST_PID),))


@pytest.fixture
def daemon(tmp_path: Path) -> MpsDaemon:
    (tmp_path / "pipes").mkdir()
    return MpsDaemon(tmp_path / "pipes")


@pytest.fixture
def watch(daemon: MpsDaemon) -> MpsWatch:
    return MpsWatch(daemon.control, look_s=60.0)


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_the_daemon_s_reply_is_parsed(daemon: MpsDaemon, watch: MpsWatch) -> None:
    assert watch.read().fault
    daemon.serve({70: [PRODUCTION_PID, GUEST_PID], 71: []})
    watch.query()
    assert watch.read() == MpsReading(clients=((PRODUCTION_PID, GUEST_PID), ()))
    daemon.serve({70: [PRODUCTION_PID]}, status="FAULT")
    watch.query()
    assert watch.read().server_fault
    daemon.stop()
    watch.query()
    assert "no MPS daemon" in watch.read().fault


def test_the_daemon_is_queried_outside_of_the_beat(daemon: MpsDaemon, watch: MpsWatch) -> None:
    watch.start()
    try:
        while not daemon.commands():
            time.sleep(0.01)
    finally:
        watch.close()
    assert watch.read().fault == ""


@pytest.mark.parametrize(
    ("clients", "shared"),
    [
        (((GUEST_PID, PRODUCTION_PID),), True),
        (((GUEST_PID,), (PRODUCTION_PID,)), False),
        (((PRODUCTION_PID,),), False),
        ((), False),
    ],
)
def test_guest_and_production_share_when_both_are_on_one_server(
    clients: tuple[tuple[int, ...], ...], shared: bool
) -> None:
    assert MpsReading(clients=clients).shared_by(GUEST.processes) is shared


@pytest.fixture
def scene(make_scene: Any) -> Any:
    scene = make_scene(blocking_ratio=0.3)
    scene.guest, scene.mps = GUEST, TOGETHER
    scene.beats_for(0.5)
    return scene


def test_the_configured_mps_ratio_holds_while_both_are_on_one_server(
    scene: Any, grant_in: Any
) -> None:
    assert grant_in(scene.beat()).blocking_ratio == 0.3
    scene.mps = MpsReading(clients=((PRODUCTION_PID,),))
    assert grant_in(scene.beat()).blocking_ratio == 1.0, "they take turns on the GPU"
    scene.mps = MpsReading(fault="no MPS daemon answers")
    assert grant_in(scene.beat()).blocking_ratio == 1.0
    scene.mps = TOGETHER
    assert grant_in(scene.beat()).blocking_ratio == 0.3


def test_a_fault_of_the_server_quarantines_the_slot(scene: Any, grant_in: Any) -> None:
    assert scene.policy.slot_state() is SlotState.OFFERED
    scene.mps = MpsReading(clients=TOGETHER.clients, server_fault=True)
    assert not grant_in(scene.beat()).mode.admits
    scene.mps = TOGETHER
    grant = grant_in(scene.beat())
    assert not grant.mode.admits
    assert "production and guest share" in grant.reason
    assert scene.policy.slot_state() is SlotState.QUARANTINED


def test_a_guest_under_mps_gets_nothing_without_consent(scene: Any, grant_in: Any) -> None:
    assert grant_in(scene.beat()).mode.admits
    scene.mps = None
    grant = grant_in(scene.beat())
    assert not grant.mode.admits
    assert "without the slot's consent" in grant.reason
    assert scene.policy.slot_state() is SlotState.OFF
    scene.guest = msgspec.structs.replace(GUEST, isolation="time-slicing")
    scene.beats_for(0.5)
    assert grant_in(scene.beat()).mode.admits


def guest_of(watch: MpsWatch, folder: Path) -> GuestProcesses:
    (folder / "guest").touch()
    return GuestProcesses(folder / "guest", memo=folder / "lifted", mps=watch)


def test_a_guest_under_mps_is_killed_once_its_work_has_ended(
    child: "subprocess.Popen[bytes]", daemon: MpsDaemon, watch: MpsWatch, tmp_path: Path
) -> None:
    daemon.serve({70: [PRODUCTION_PID, child.pid]})
    guest = guest_of(watch, tmp_path)
    guest.kill(process_ids([child.pid]))
    assert child.wait(timeout=60) == -9
    guest.close()
    assert daemon.commands()[-1] == f"terminate_client 70 {child.pid}"


def test_a_guest_that_is_no_client_is_simply_killed(
    child: "subprocess.Popen[bytes]", daemon: MpsDaemon, watch: MpsWatch, tmp_path: Path
) -> None:
    daemon.serve({70: [PRODUCTION_PID]})
    guest = guest_of(watch, tmp_path)
    guest.kill(process_ids([child.pid]))
    guest.close()
    assert child.wait(timeout=60) == -9
    assert not any("terminate" in command for command in daemon.commands())


@pytest.mark.parametrize("gone", [True, False])
def test_without_the_daemon_s_help_a_guest_is_not_killed(
    child: "subprocess.Popen[bytes]",
    daemon: MpsDaemon,
    watch: MpsWatch,
    tmp_path: Path,
    gone: bool,
) -> None:
    daemon.serve({70: [PRODUCTION_PID, child.pid]}, refuses=True)
    if gone:
        daemon.stop()
    guest = guest_of(watch, tmp_path)
    guest.kill(process_ids([child.pid]))
    guest.close()
    (outcome,) = guest.outcomes()
    assert "MPS did not end its work" in outcome.fault
    assert child.poll() is None, "a signal amid a kernel could take production with it"


def test_nothing_of_the_daemon_is_ever_set(
    child: "subprocess.Popen[bytes]", daemon: MpsDaemon, watch: MpsWatch, tmp_path: Path
) -> None:
    daemon.serve({70: [PRODUCTION_PID, child.pid]})
    watch.query()
    guest = guest_of(watch, tmp_path)
    guest.lift(process_ids([child.pid]))
    guest.settle()
    guest.kill(process_ids([child.pid]))
    guest.close()
    words = {command.split()[0] for command in daemon.commands()}
    reads = {"get_server_list", "get_client_list", "get_server_status"}
    assert words == reads | {"terminate_client"}


CONFIG = "slots:\n  - name: slot0\n    mps: {}\n"


def test_consent_names_the_pipe_directory_and_nothing_is_taken_for_granted(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"

    def load(mps: str) -> Any:
        path.write_text(CONFIG.replace("{}", mps))
        return load_agent_config(path, environment={}).slots[0].mps

    assert str(load("{pipe_directory: /run/nvidia-mps}").pipe_directory) == "/run/nvidia-mps"
    with pytest.raises(ConfigError, match="pipe_directory"):
        load("{}")
    with pytest.raises(ConfigError, match="absolute"):
        load("{pipe_directory: nvidia-mps}")
    with pytest.raises(ConfigError, match="look_s"):
        load("{pipe_directory: /run/nvidia-mps, look_s: 0}")
