"""MPS: production and guest as clients of one server, the guest on a share of the GPU.

The daemon is the benchmark's own, with directories of its own, and ends with it. A share is read
when a client starts, so each has a guest of its own beside the same production.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from benchmarks.gpu_slot.engines.children import engine
from benchmarks.gpu_slot.engines.orders import EngineSetting
from benchmarks.gpu_slot.results import Put, under
from benchmarks.gpu_slot.sharing.pair import REHEARSED, SHORT, Sharing
from benchmarks.testbed.slot import SLOT
from coserve.guest.isolation import MpsShare
from harvester.contracts.errors import ConfigError, PeerProtocolError, Unsupported
from harvester.contracts.isolation import IsolationBackend
from harvester.contracts.page import PageDirectory
from harvester.platform.mps import DEFAULT_CONTROL, PIPE_VARIABLE, MpsControl
from harvester.platform.parent import end_with

_LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
_ANSWER_S = 10.0
_TRIES = 40
_BOTH = 2
SHARES = ((100.0, False), (100.0, True), (25.0, True))
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
    """Raises Unsupported where there is no such program, ConfigError where it does not answer."""
    if shutil.which(DEFAULT_CONTROL) is None:
        raise Unsupported(f"{DEFAULT_CONTROL} is not installed here")
    with TemporaryDirectory(prefix="rosemux-mps-") as directory:
        pipes, logs = Path(directory, "pipes"), Path(directory, "logs")
        pipes.mkdir()
        logs.mkdir()
        environment = os.environ | {PIPE_VARIABLE: str(pipes), _LOG_VARIABLE: str(logs)}
        # In the foreground: it ends with this part's group of processes, however that ends.
        daemon = subprocess.Popen(
            [DEFAULT_CONTROL, "-f"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - no other thread yet
        )
        control = MpsControl(pipes, timeout_s=_ANSWER_S)
        try:
            _wait_for(control, daemon)
            yield control
        except BaseException:
            for log in sorted(logs.iterdir()):
                print(f"{log.name}: {log.read_text(errors='replace')[-1000:]}", file=sys.stderr)
            raise
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
            daemon.terminate()
            daemon.wait()


def _wait_for(control: MpsControl, daemon: "subprocess.Popen[bytes]") -> None:
    fault = "it has ended"
    for _ in range(_TRIES):
        if daemon.poll() is not None:
            break
        try:
            control.servers()
        except PeerProtocolError:
            return  # Any answer will do.
        except Unsupported as error:
            fault = str(error)
            time.sleep(_ANSWER_S / _TRIES)
        else:
            return
    raise ConfigError(f"the MPS daemon does not answer: {fault}")


async def _shares(kind: str, tiny: bool, control: MpsControl | None, put: Put) -> None:
    sizes = REHEARSED if tiny else SHORT
    with TemporaryDirectory(prefix="rosemux-", dir="/dev/shm") as root:
        pages = PageDirectory.create(Path(root, SLOT))
        setting = EngineSetting(kind=kind, tiny=tiny, pages=str(pages.path))
        served = {} if control is None else {PIPE_VARIABLE: str(control.pipe_directory)}
        async with engine(replace(setting, production=sizes.production), served) as production:
            put("production_multiprocessors", production.ready.multiprocessors)
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
                    if control is not None:
                        keep("clients", _clients(control))
                    await Sharing(production, started, pages, sizes, keep).measure({})


def _clients(control: MpsControl) -> dict[str, list[int]]:
    """Clients by server. Raises ConfigError unless one has both: CUDA starts without MPS and says
    nothing, and time-slicing would be measured under its name."""
    found = {server: control.clients(server) for server in control.servers()}
    if max((len(clients) for clients in found.values()), default=0) < _BOTH:
        raise ConfigError(f"production and guest are not clients of one MPS server: {found}")
    return {str(server): list(clients) for server, clients in found.items()}
