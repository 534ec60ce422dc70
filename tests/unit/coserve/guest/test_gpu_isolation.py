"""Isolation of a GPU guest: time-slicing by default, MPS only with an operator's consent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coserve.guest.gpus import ComputeMode, Gpu, gpus
from coserve.guest.isolation import (
    NO_ISOLATION,
    TIME_SLICING,
    Isolation,
    MpsShare,
    apply_to_process,
    choose,
    lift_from_process,
)
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.isolation import IsolationBackend
from harvester.platform.mps import DEFAULT_PIPE_DIRECTORY, PIPE_VARIABLE
from tests.mps_daemon import MpsDaemon

SHARED = Gpu("GPU-1", ComputeMode.DEFAULT)
EXCLUSIVE = Gpu("GPU-2", ComputeMode.EXCLUSIVE_PROCESS)
CLOSED = Gpu("GPU-3", ComputeMode.PROHIBITED)


@pytest.fixture
def daemon(tmp_path: Path) -> MpsDaemon:
    return MpsDaemon(tmp_path)


def test_a_gpu_guest_is_time_sliced_by_default(daemon: MpsDaemon) -> None:
    consent = MpsShare(daemon.control)
    assert choose(gpus=[SHARED]) is TIME_SLICING
    assert choose(gpus=[SHARED], mps=consent) is TIME_SLICING, "consent is no choice"
    assert choose(IsolationBackend.TIME_SLICING, gpus=[SHARED]).blocking_ratio == 1.0
    assert choose(IsolationBackend.NONE, gpus=[SHARED]) is NO_ISOLATION
    assert daemon.commands() == []


@pytest.mark.parametrize("without_mps", [TIME_SLICING, NO_ISOLATION])
def test_a_guest_without_consent_looks_for_a_daemon_where_there_is_none(
    without_mps: Isolation,
) -> None:
    looked = Path(dict(without_mps.environment)[PIPE_VARIABLE])
    assert looked != DEFAULT_PIPE_DIRECTORY
    assert not looked.exists(), "CUDA would join it without a word"


@pytest.mark.parametrize("backend", [IsolationBackend.TIME_SLICING, IsolationBackend.MPS])
def test_a_gpu_guests_threads_on_the_host_rank_below_productions(
    backend: IsolationBackend,
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        apply_to_process(Isolation(backend, blocking_ratio=1.0), process.pid)
        assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
        lift_from_process(process.pid)
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER


def test_a_process_puts_its_other_threads_under_the_backend_too() -> None:
    script = (
        "import os, threading\n"
        "from coserve.guest.isolation import TIME_SLICING, apply_to_process\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "apply_to_process(TIME_SLICING)\n"
        "threads = [int(name) for name in os.listdir('/proc/self/task')]\n"
        "print(*{os.sched_getscheduler(one) for one in threads},\n"
        "      *{os.getpriority(os.PRIO_PROCESS, one) for one in threads}, len(threads) > 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(os.SCHED_BATCH), "19", "True"], done.stderr


def test_a_thread_that_ends_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with subprocess.Popen(["true"]) as ended:
            pass
        monkeypatch.setattr(
            "coserve.guest.isolation._threads", lambda pid: {ended.pid, process.pid}
        )
        apply_to_process(TIME_SLICING, process.pid)
        assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH


def test_a_backend_that_cannot_work_on_these_gpus_is_refused() -> None:
    with pytest.raises(Unsupported, match="ranks threads on a core"):
        choose(IsolationBackend.IDLE, gpus=[SHARED])
    with pytest.raises(Unsupported, match=r"GPU-2 is in compute mode Exclusive_Process.*Default"):
        choose(gpus=[SHARED, EXCLUSIVE])
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        choose(IsolationBackend.TIME_SLICING)


def test_mps_takes_consent_a_daemon_and_a_gpu_that_is_open(daemon: MpsDaemon) -> None:
    consent = MpsShare(daemon.control)
    with pytest.raises(ConfigError, match="consent"):
        choose(IsolationBackend.MPS, gpus=[SHARED])
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        choose(IsolationBackend.MPS, mps=consent)
    with pytest.raises(Unsupported, match="GPU-3 is in compute mode Prohibited"):
        choose(IsolationBackend.MPS, gpus=[CLOSED], mps=consent)
    daemon.stop()
    with pytest.raises(Unsupported, match="no MPS daemon"):
        choose(IsolationBackend.MPS, gpus=[EXCLUSIVE], mps=consent)


def test_under_mps_the_guest_starts_with_its_share_and_a_note_of_shared_fate(
    daemon: MpsDaemon,
) -> None:
    consent = MpsShare(daemon.control, active_thread_percentage=12.5, blocking_ratio=0.5)
    chosen = choose(IsolationBackend.MPS, gpus=[EXCLUSIVE], mps=consent)
    assert dict(chosen.environment) == {
        "CUDA_MPS_PIPE_DIRECTORY": str(daemon.pipes),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }
    assert not chosen.fault_isolated
    assert chosen.statement == (
        "mps, blocking ratio 0.5, shared fate: a fault of the guest ends production"
    )
    assert TIME_SLICING.fault_isolated
    assert TIME_SLICING.statement == "time-slicing, blocking ratio 1"
    assert daemon.commands() == ["get_server_list"], "nothing of the daemon is changed"


def smi(folder: Path, script: str) -> str:
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return str(command)


def test_the_driver_names_gpus_and_their_modes(tmp_path: Path) -> None:
    says = smi(tmp_path, "printf 'GPU-1, Default\\nGPU-2, Exclusive_Process\\n'")
    assert gpus(says) == (SHARED, EXCLUSIVE)
    assert gpus(str(tmp_path / "absent")) == ()


def test_a_gpu_without_the_driver_s_program_is_no_machine_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "nvidiactl"
    monkeypatch.setattr("coserve.guest.gpus._CONTROL_DEVICE", control)
    assert gpus(str(tmp_path / "absent")) == ()
    control.touch()
    with pytest.raises(Unsupported, match="NVIDIA_DRIVER_CAPABILITIES"):
        gpus(str(tmp_path / "absent"))


def test_the_driver_s_error_text_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"ended with 15: .*: .*GPU0000:01:00\.0: GPU is lost"):
        gpus(smi(tmp_path, "echo 'device handle for GPU0000:01:00.0: GPU is lost.'; exit 15"))


@pytest.mark.parametrize(
    "script",
    [
        "exit 9",
        "echo GPU-1, [Not Supported]",
        "echo GPU-1, [N/A]",
        "echo GPU-1, [Insufficient Permissions]",
        "echo ,,,",
    ],
)
def test_a_driver_that_is_ill_is_no_machine_without_gpus(tmp_path: Path, script: str) -> None:
    with pytest.raises(Unsupported):
        gpus(smi(tmp_path, script))
