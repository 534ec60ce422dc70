"""Runs the engine tests on another vLLM version than the installed one.

A wheel's files are unpacked into a temporary folder that comes first on PYTHONPATH, its metadata
included, so that code and `importlib.metadata` both see that version; everything else stays as
installed. The environment itself is never changed.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from tests.compat.source_tree import WheelTree
from tests.compat.upstream_versions import UpstreamVersion

_NO_TESTS_COLLECTED = 5


class OverlayResult(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Outcome of the engine tests on one version, and the reason if they did not run."""

    version: str
    outcome: OverlayResult
    reason: str = ""


def run_engine_tests(tree: WheelTree, table: UpstreamVersion, *, timeout_s: float) -> EngineRun:
    """Run `pytest -m engine` on one version; skipped unless its torch is the installed one."""
    installed_torch = _installed_torch()
    if installed_torch != table.torch_version:
        reason = f"pins torch {table.torch_version}, installed is {installed_torch or 'none'}"
        return EngineRun(tree.version, OverlayResult.SKIPPED, reason)
    with tempfile.TemporaryDirectory(prefix="rosemux-compat-") as overlay:
        with zipfile.ZipFile(tree.wheel) as archive:
            archive.extractall(overlay)
        return _run(tree.version, Path(overlay), timeout_s)


def _run(version: str, overlay: Path, timeout_s: float) -> EngineRun:
    path = os.pathsep.join(filter(None, (str(overlay), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "engine", "-p", "no:cacheprovider"]
    try:
        code = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, timeout=timeout_s, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return EngineRun(version, OverlayResult.FAILED, f"not done after {timeout_s:.0f} s")
    if code == _NO_TESTS_COLLECTED:
        return EngineRun(version, OverlayResult.SKIPPED, "there is no test marked `engine`")
    if code != 0:
        return EngineRun(version, OverlayResult.FAILED, f"pytest ended with {code}")
    return EngineRun(version, OverlayResult.PASSED)


def _installed_torch() -> str | None:
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
