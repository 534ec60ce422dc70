"""Programs forked from a process that has imported what they use.

Starting Python and importing aiohttp takes longer than most tests of the gateway, and hundreds of
them start three programs. A forked one has memory, signals and an exit status of its own too.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["scheduler.gateway.gateway", "scheduler.gateway.scheduler", "uvloop"]
)


class ForkedProgram:
    """Python as `Popen([sys.executable, *arguments], stdout=PIPE)` starts it, with `-c` or a file.

    The network namespace is that of the session, whichever the caller is in.
    """

    def __init__(self, *arguments: str) -> None:
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading)
        # Pytest gives a test that captures output other descriptors than the fork server has.
        streams = Connection(writing, readable=False), Connection(os.dup(2), readable=False)
        given = arguments, *streams, dict(os.environ), str(Path.cwd())
        self._process = _FORKS.Process(target=_run, args=given, daemon=True)
        self._process.start()
        for stream in streams:
            stream.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return status


def _run(
    arguments: tuple[str, ...],
    out: Connection,
    err: Connection,
    environment: dict[str, str],
    directory: str,
) -> None:
    for number, stream in enumerate((out, err), start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = [*arguments]
        runpy.run_path(arguments[0], run_name="__main__")
