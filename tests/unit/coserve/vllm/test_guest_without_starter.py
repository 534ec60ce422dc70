"""An engine core or a worker of a guest ends with the process that started it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from coserve.vllm.environment import Role, SlotEnvironment
from coserve.vllm.guest_start import end_with_starter
from harvester.contracts.isolation import IsolationBackend

END_S = 60.0
# An API server that starts an engine core as vLLM does, and is killed when the core says that it
# runs.
SERVER = """
import multiprocessing, os, signal, sys
from pathlib import Path
from tests.unit.coserve.vllm.test_guest_without_starter import core

folder, method, isolation, delay_s = sys.argv[1:]
context = multiprocessing.get_context(method)
process = context.Process(target=core, args=(Path(folder), isolation, float(delay_s)))
process.start()
while not (Path(folder) / "core").exists():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def core(folder: Path, isolation: str, delay_s: float) -> None:
    """An engine core that registers before its API server is killed, or `delay_s` later."""
    slot = SlotEnvironment(Role.GUEST, "guest", folder, IsolationBackend(isolation))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not delay_s:
        end_with_starter(slot)
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "core")
    time.sleep(delay_s)
    end_with_starter(slot)
    (folder / "registered").touch()
    time.sleep(600)


def orphan(folder: Path, method: str, isolation: str, delay_s: float) -> psutil.Process:
    """The core of a killed API server."""
    arguments = [str(folder), method, isolation, str(delay_s)]
    server = subprocess.Popen([sys.executable, "-c", SERVER, *arguments])
    assert server.wait(END_S) == -signal.SIGKILL
    return psutil.Process(int((folder / "core").read_text()))


@pytest.mark.parametrize("delay_s", [0.0, 2.0], ids=["registered", "not-registered-yet"])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_core_does_not_outlive_its_api_server(
    tmp_path: Path, method: str, delay_s: float
) -> None:
    with suppress(psutil.NoSuchProcess):  # It has ended already.
        orphan(tmp_path, method, "idle", delay_s).wait(END_S)


def test_under_mps_no_kernel_is_cut_off(tmp_path: Path) -> None:
    left = orphan(tmp_path, "fork", "mps", 0.5)
    try:
        while not (tmp_path / "registered").exists():
            time.sleep(0.05)
        assert left.is_running()
    finally:
        left.kill()
