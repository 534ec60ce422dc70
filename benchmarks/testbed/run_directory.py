"""The files of one run: nothing remains but its results, weights and logs.

    <out>/result.json, report.html, records.jsonl, logs/    stay
    <out>/weights/                                          every version of both jobs: stays
    <out>/run-*/                                            models, settings: removed
    /dev/shm/rosemux-demo-*/                                pages and engine sockets: removed

Leftovers of an earlier run that was killed outright are removed at the next start.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.testbed.parts import RunPaths
from harvester.contracts.errors import ConfigError

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rosemux-demo-"
_LOGS = "logs"
_WEIGHTS = "weights"


@contextmanager
def run_directory(out: Path, cache: Path) -> Iterator[RunPaths]:
    """Raises ConfigError where `out` cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        cache.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        run = Path(tempfile.mkdtemp(prefix=f"run-{os.getpid()}-", dir=out))
    except OSError as error:
        raise ConfigError(f"cannot write into {out}: {error.strerror}; choose --out") from error
    pages = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_SHARED_MEMORY))
    paths = RunPaths(run=run, pages=pages, logs=out / _LOGS, cache=cache)
    try:
        shutil.rmtree(paths.logs, ignore_errors=True)
        yield paths
    finally:
        shutil.rmtree(pages, ignore_errors=True)
        if paths.weights.is_dir():
            shutil.rmtree(out / _WEIGHTS, ignore_errors=True)
            paths.weights.rename(out / _WEIGHTS)
        shutil.rmtree(run, ignore_errors=True)


def _remove_leftovers(out: Path) -> None:
    for directory in (*out.glob("run-*"), *_SHARED_MEMORY.glob(f"{_PREFIX}*")):
        owner = directory.name.removeprefix("run-").removeprefix(_PREFIX).split("-")[0]
        ours = directory.is_dir() and directory.stat().st_uid == os.geteuid()
        if ours and owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(directory, ignore_errors=True)
