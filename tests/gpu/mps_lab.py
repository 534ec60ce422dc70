"""A test's own MPS daemon: NVIDIA's on a GPU, or a fake one with fake clients."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from harvester.contracts.errors import RoseMuxError
from harvester.platform.mps import DEFAULT_CONTROL, PIPE_VARIABLE, MpsControl
from tests.gpu.child import Child
from tests.gpu.fake_client import MULTIPROCESSORS
from tests.mps_daemon import MpsDaemon

LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_START_S, _QUIT_S = 30.0, 60.0
_LAST_WORDS_BYTES = 2000


@dataclass(frozen=True, slots=True)
class MpsLab:
    control: MpsControl
    multiprocessors: int
    """Multiprocessors of the whole GPU."""
    device: str
    """Device of its clients: "cuda" or "fake"."""

    def process(self, environment: Mapping[str, str] | None = None) -> Child:
        """A process that inherits this daemon's pipe directory, as a node's default would be."""
        pipes = {PIPE_VARIABLE: str(self.control.pipe_directory)}
        return Child(self.device, pipes | dict(environment or {}))


@contextmanager
def fake_lab(folder: Path) -> Iterator[MpsLab]:
    yield MpsLab(MpsDaemon(folder).control, MULTIPROCESSORS, "fake")


@contextmanager
def real_lab() -> Iterator[MpsLab]:
    """NVIDIA's daemon; skips with its message if no daemon can be started."""
    program = shutil.which(DEFAULT_CONTROL)
    if program is None:
        pytest.skip(f"{DEFAULT_CONTROL} is not installed here")
    # A socket's path is limited in length, and pytest's folders are deep.
    with tempfile.TemporaryDirectory(
        prefix="rosemux-mps-", dir="/tmp", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        pipes, logs, said = folder / "pipe", folder / "log", folder / "said"
        pipes.mkdir()
        logs.mkdir()
        environment = os.environ | {PIPE_VARIABLE: str(pipes), LOG_VARIABLE: str(logs)}
        # The daemon keeps inherited descriptors open: a pipe would never close.
        with said.open("wb") as output:
            started = subprocess.run(
                [program, "-d"], stdout=output, stderr=output, env=environment,
                timeout=_START_S, check=False,
            )  # fmt: skip
        control = MpsControl(pipe_directory=pipes, timeout_s=_START_S)
        try:
            if started.returncode != 0:
                pytest.skip(f"{program} -d ended with {started.returncode}: {_last_words(folder)}")
            yield MpsLab(control, _probed(control, folder), "cuda")
        finally:
            # The daemon ends after its servers; bound the wait.
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [program], input=b"quit\n", stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, env=environment, timeout=_QUIT_S, check=False,
                )  # fmt: skip


def _probed(control: MpsControl, folder: Path) -> int:
    """Multiprocessors of the GPU, as the daemon's first client sees them."""
    try:
        control.servers()
    except RoseMuxError as error:
        pytest.skip(f"the MPS daemon does not answer: {error}: {_last_words(folder)}")
    with Child("cuda", {PIPE_VARIABLE: str(control.pipe_directory)}) as first:
        first.tell("start")
        said = first.answer()
    if "error" in said:
        pytest.skip(f"no client can be had: {said['error']}: {_last_words(folder)}")
    return int(said["multiprocessors"])


def _last_words(folder: Path) -> str:
    files = [folder / "said", *sorted((folder / "log").glob("*"))]
    words = [file.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace") for file in files]
    return " | ".join(" ".join(one.split()) for one in words if one.strip())
