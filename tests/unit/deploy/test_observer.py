"""The observer's wheel, installed alone: everything imports, registers, and meets RoseMux aloud."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy.check_expressions import DEPLOY
from deploy.observer.sources import GUEST_ONLY

ROOT = DEPLOY.parent
MOST_FILES = 41
MOST_BYTES = 175_000
VLLM = {
    "vllm/__init__.py": "",
    "vllm/v1/__init__.py": "",
    "vllm/v1/metrics/__init__.py": "",
    "vllm/v1/metrics/loggers.py": "class StatLoggerBase: ...\n",
}
"""As much of vLLM as the modules need when they are imported."""
PRELUDE = """
import importlib, json, sys
from importlib import metadata

alone, vllm, others = json.loads(sys.argv[1])
sys.path[:0] = [alone, vllm]
sys.path.append(others)

def points(group):
    return {each.name: each for each in metadata.entry_points(group=group)}
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Built by the command that production's image is built with."""
    command = [DEPLOY / "observer/build", "--no-build-isolation"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ROOT / done.stdout.strip()


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("observer")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", target, wheel], check=True, capture_output=True)
    return target


def run(alone: Path, code: str, tmp_path: Path) -> Any:
    """Runs `code`, and decodes its print, without the checkout or a link to it on the path."""
    for name, text in VLLM.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    folders = json.dumps([str(alone), str(tmp_path / "vllm"), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PRELUDE + code, folders],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def modules(wheel: Path) -> list[str]:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    return [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names]


def test_every_module_imports_from_the_wheel_alone(
    wheel: Path, alone: Path, tmp_path: Path
) -> None:
    code = f"""
for name in {modules(wheel)}:
    importlib.import_module(name)
own = ("coserve", "harvester")
found = {{n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] in own}}
print(json.dumps(found))
"""
    found = run(alone, code, tmp_path)
    assert set(found) == set(modules(wheel))
    assert {path for path in found.values() if not path.startswith(str(alone))} == set()


def test_the_hooks_of_production_register(alone: Path, tmp_path: Path) -> None:
    code = """
logger = points("vllm.stat_logger_plugins")["rosemux_pulse"].load()
base = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase
points("vllm.general_plugins")["rosemux_observer"].load()()
middleware = importlib.import_module("coserve.vllm.middleware").PulseMiddleware
print(json.dumps([issubclass(logger, base), callable(middleware)]))
"""
    assert run(alone, code, tmp_path) == [True, True]


@pytest.mark.parametrize("together", [False, True])
def test_rosemux_in_the_same_environment_is_an_error_in_production_s_log(
    together: bool, alone: Path, tmp_path: Path
) -> None:
    if together:
        about = tmp_path / "vllm/rosemux-0.1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rosemux\nVersion: 0.1.0\n")
    code = """
import logging

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("vllm.rosemux").addHandler(handler)
sys.path.pop()
points("vllm.general_plugins")["rosemux_observer"].load()()
print(json.dumps(said))
"""
    said = run(alone, code, tmp_path)
    assert len(said) == together
    assert all("share their files" in line for line in said)


def test_it_is_small_and_has_nothing_of_guests(wheel: Path) -> None:
    entries = zipfile.ZipFile(wheel).infolist()
    assert len(entries) <= MOST_FILES
    assert sum(entry.file_size for entry in entries) <= MOST_BYTES
    for name in modules(wheel):
        assert not f"{name}.".startswith(tuple(f"{each}." for each in GUEST_ONLY)), name
    page = (ROOT / "docs/install.md").read_text()
    stated = re.search(r"the observer: (\d+) files, (\d+) KB", page)
    assert stated is not None
    assert int(stated[1]) == len(entries)
    size = sum(entry.file_size for entry in entries)
    assert int(stated[2]) == pytest.approx(size / 1000, abs=10)


def test_it_has_the_version_and_bounds_of_rosemux() -> None:
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    part = tomllib.loads((DEPLOY / "observer/pyproject.toml").read_text())["project"]
    known = {*whole["dependencies"], *whole["optional-dependencies"]["weights"]}
    for field in ("version", "requires-python", "license"):
        assert part[field] == whole[field]
    assert set(part["dependencies"]) <= known
    point = "vllm.stat_logger_plugins"
    assert part["entry-points"][point] == whole["entry-points"][point]
    assert re.fullmatch(r"[\d.]+", part["version"])
