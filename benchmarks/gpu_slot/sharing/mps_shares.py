"""MPS: production and guest as clients of one server, the guest on a share of the GPU.

The daemon is the benchmark's own, with directories of its own, and ends with it. A share is read
when a client starts, so each has a guest of its own beside the same production.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from benchmarks.gpu_slot.engines.children import engine
from benchmarks.gpu_slot.engines.orders import EngineSetting
from benchmarks.gpu_slot.results import Put, under
from benchmarks.gpu_slot.sharing.pair import REHEARSED, SHORT, Sharing
from coserve.isolation import IsolationBackend
from coserve.mps import MpsShare
from harvester.contracts.errors import PeerProtocolError, Unsupported
from harvester.contracts.mps import DEFAULT_CONTROL, PIPE_VARIABLE, MpsControl
from harvester.contracts.page import PageDirectory
from scheduler.demo.slot import SLOT

_LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_ANSWER_S = 10.0
SHARES = ((100.0, False), (100.0, True), (50.0, True), (20.0, True))
"""Percentages of the multiprocessors, each with whether the guest's priority is below normal."""


def measured(kind: str, *, tiny: bool, put: Put) -> None:
    """Raises Unsupported where there is no daemon to start."""
    if kind != "cuda":
        asyncio.run(_shares(kind, tiny, None, put))
        return
    with _daemon() as control:
        asyncio.run(_shares(kind, tiny, control, put))


@contextmanager
def _daemon() -> Iterator[MpsControl]:
    if shutil.which(DEFAULT_CONTROL) is None:
        raise Unsupported(f"{DEFAULT_CONTROL} is not installed here")
    with TemporaryDirectory(prefix="rosemux-mps-") as directory:
        pipes, logs = Path(directory, "pipes"), Path(directory, "logs")
        pipes.mkdir()
        logs.mkdir()
        environment = os.environ | {PIPE_VARIABLE: str(pipes), _LOG_VARIABLE: str(logs)}
        done = subprocess.run(
            [DEFAULT_CONTROL, "-d"],
            env=environment,
            capture_output=True,
            timeout=_ANSWER_S,
            check=False,
        )
        control = MpsControl(pipes, timeout_s=_ANSWER_S)
        try:
            try:
                control.servers()
            except (PeerProtocolError, Unsupported) as error:
                said = (done.stdout + done.stderr).decode(errors="replace").strip()
                raise Unsupported(f"no MPS daemon starts here: {said or error}") from error
            yield control
        finally:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [DEFAULT_CONTROL],
                    input=b"quit\n",
                    env=environment,
                    capture_output=True,
                    timeout=_ANSWER_S,
                    check=False,
                )


async def _shares(kind: str, tiny: bool, control: MpsControl | None, put: Put) -> None:
    sizes = REHEARSED if tiny else SHORT
    with TemporaryDirectory(prefix="rosemux-", dir="/dev/shm") as root:
        pages = PageDirectory.create(Path(root, SLOT))
        setting = EngineSetting(kind=kind, tiny=tiny, pages=str(pages.path))
        served = {} if control is None else {PIPE_VARIABLE: str(control.pipe_directory)}
        async with engine(replace(setting, production=sizes.production), served) as production:
            put("production_multiprocessors", production.ready.multiprocessors)
            rate_per_s = 0.0
            for percentage, below_normal in SHARES[-1:] if tiny else SHARES:
                environment: dict[str, str] = {}
                if control is not None:
                    share = MpsShare(control, percentage, below_normal)
                    environment = dict(share.environment)
                    setting = replace(setting, isolation=IsolationBackend.MPS)
                name = f"{percentage:g}_percent{'_below_normal' if below_normal else ''}"
                guest = replace(setting, guest=sizes.guest)
                async with engine(guest, environment) as started:
                    keep = under(name, put)
                    keep("guest_multiprocessors", started.ready.multiprocessors)
                    sharing = Sharing(production, started, pages, sizes, keep)
                    # The same requests beside every share.
                    rate_per_s = rate_per_s or await sharing.calibrated_rate()
                    await sharing.measure({}, rate_per_s)
