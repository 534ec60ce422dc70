"""Two processes take their turns to start on a GPU that has its real name."""

import subprocess
import sys
from pathlib import Path

import pytest

from coserve.guest.gpus import gpus
from coserve.guest.launch_lock import LaunchLock
from harvester.contracts.errors import Exhausted
from tests.gpu.child import ROOT
from tests.gpu.conftest import ON_A_GPU, need_cuda
from tests.gpu.nvidia_smi import fake

BRIEF_S, LONG_S = 0.05, 60.0
_STARTS = (
    "import pathlib, sys\nfrom coserve.guest.launch_lock import LaunchLock\n"
    "lock = LaunchLock(pathlib.Path(sys.argv[1]), sys.argv[2:])\n"
    "lock.acquire(timeout_s=60)\nprint('starting', flush=True)\ninput()\n"
)


@pytest.fixture(params=["fake", pytest.param("real", marks=ON_A_GPU)])
def uuids(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    if request.param == "real":
        need_cuda()
        return [gpu.uuid for gpu in gpus()]
    return [gpu.uuid for gpu in gpus(fake(tmp_path, "Default"))]


def starting(folder: Path, uuids: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _STARTS, str(folder), *uuids],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def test_a_second_process_starts_once_the_first_has_ended(uuids: list[str], tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    with starting(locks, uuids) as first, starting(locks, uuids) as second:
        assert first.stdout is not None
        assert second.stdout is not None
        # Either of the two may be there first.
        one, other = sorted((first, second), key=lambda child: child.pid != _holder(locks, uuids))
        assert one.stdout is not None
        assert one.stdout.readline() == "starting\n"
        with pytest.raises(Exhausted, match=f"process {one.pid} .* {uuids[0]}"):
            LaunchLock(locks, uuids).acquire(timeout_s=BRIEF_S)
        one.kill()
        assert other.stdout is not None
        assert other.stdout.readline() == "starting\n"
        assert _holder(locks, uuids) == other.pid
        other.kill()
    mine = LaunchLock(locks, uuids)
    mine.acquire(timeout_s=LONG_S)
    mine.release()


def _holder(locks: Path, uuids: list[str]) -> int:
    """Process id of the lock's holder, once there is one."""
    file = locks / f"{sorted(uuids)[0]}.launch"
    while not (file.exists() and file.read_text().strip()):
        pass
    return int(file.read_text())
