"""Processes of a benchmark of weights, each ended with it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from harvester.contracts.errors import Exhausted

WEIGHTS = (sys.executable, "-m", "harvester.cli", "weights")
"""The command `rosemux weights`."""


@contextmanager
def child(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process with a session of its own, and pipes to it."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        # A session of its own: Ctrl-C ends this process first, and this one ends all others.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def line(stream: IO[str] | None) -> str:
    """The next line of a child; raises Exhausted if it ended."""
    assert stream is not None
    found = stream.readline()
    if not found:
        raise Exhausted("a part of the benchmark ended early; see what it said above")
    return found


@contextmanager
def weight_server(root: Path) -> Iterator[str]:
    """The URL of a server of the stores under `root`, as it is shipped."""
    with child([*WEIGHTS, "serve", str(root), "--port", "0"]) as process:
        yield line(process.stdout).removeprefix("listening on ").strip()
