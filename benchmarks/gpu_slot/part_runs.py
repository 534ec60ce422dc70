"""Parts run one after the other, each in a process of its own that a limit of time ends.

A part that fails, hangs or loses its CUDA context ends with its process; the next one begins on a
device without it. The result is whole in its file after every part.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_slot.parts import NOT_HERE, BenchmarkPart
from benchmarks.gpu_slot.results import left_in
from harvester.contracts.clock import Clock
from harvester.platform.parent import end_with
from harvester.platform.whole_file import write_whole

_TAIL_BYTES = 3000
_END_S = 5.0
_LEAST_S = 10.0
"""A part is not begun with less time than this."""


class Status(StrEnum):
    MEASURED = "measured"
    FAILED = "failed"
    NOT_HERE = "not_here"
    """The machine lacks what the part measures."""
    AT_LIMIT = "ended_at_limit"
    NOT_RUN = "not_run"
    """The time of the whole run was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRuns:
    kind: str
    tiny: bool
    path: Path | None
    """File for the whole result, written after every part; None writes none."""
    clock: Clock
    until_s: float
    """Deadline on the clock, in s: no part goes on beyond it."""

    def run(self, parts: Sequence[BenchmarkPart], result: dict[str, Any]) -> dict[str, Any]:
        """`result` with what the parts found under `parts`."""
        result["parts"] = {}
        for part in parts:
            result["parts"][part.name] = found = self._run(part)
            print(
                f"{part.name}: {found['status']}, {found['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            if self.path is not None:
                write_whole(self.path, json.dumps(result, indent=1) + "\n")
        return result

    def _run(self, part: BenchmarkPart) -> dict[str, Any]:
        began_s = self.clock.now()
        limit_s = min(part.limit_s, self.until_s - began_s)
        if limit_s < _LEAST_S:
            return {"status": Status.NOT_RUN, "seconds": 0.0, "results": {}}
        with tempfile.TemporaryDirectory(prefix="rosemux-part-") as directory:
            file, log = Path(directory, "results.json"), Path(directory, "log")
            status = self._status(part, file, log, limit_s)
            found = {
                "status": status,
                "seconds": round(self.clock.now() - began_s, 1),
                "results": left_in(file),
            }
            # For a measured part too: the log of an agent may name the reason for a closed slot.
            found["log"] = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return found

    def _status(self, part: BenchmarkPart, file: Path, log: Path, limit_s: float) -> Status:
        command = [sys.executable, "-m", "benchmarks.gpu_slot.part_process", part.module, self.kind]
        with (
            log.open("wb") as output,
            _whole_group(
                [*command, str(file), *(["--tiny"] if self.tiny else [])], output.fileno()
            ) as process,
        ):
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return Status.AT_LIMIT
        if code == NOT_HERE:
            return Status.NOT_HERE
        return Status.FAILED if code else Status.MEASURED


@contextmanager
def _whole_group(command: list[str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own; afterwards nothing of the group is left."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - this process has one thread
    )
    try:
        yield process
    finally:
        for number, patience_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience_s)
