"""The check says what the machine has, names a missing driver once, stops where nothing is set."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.gpu import machine, readiness
from deploy.gpu.unpacking import INSTALLED


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def no_library(name: str) -> ctypes.CDLL:
    raise OSError(name)


class Library:
    """A driver's library, as ctypes shows it."""

    def __init__(self, version: int) -> None:
        self.version = version

    def cuDriverGetVersion(self, into: object) -> int:  # noqa: N802 - the driver's name
        into._obj.value = self.version  # type: ignore[attr-defined]
        return 0


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_driver_says_the_newest_cuda_that_it_serves() -> None:
    load: Callable[[str], ctypes.CDLL] = lambda _: Library(13010)  # type: ignore[assignment, return-value]  # noqa: E731
    assert machine.driver_version(load) == "13.1"
    assert machine.driver_version(no_library) == ""


def test_facts_are_a_line_each(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    program(programs, "nvidia-smi", 'echo "NVIDIA H200, 143771 MiB, 580.159"')
    compiler = program(programs, "gcc", "")
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  268435456 kB\nMemAvailable:  134217728 kB\n")
    facts = machine.facts({"PATH": str(programs)}, memory=memory, shared_memory=tmp_path / "none")
    assert [str(fact) for fact in facts] == [
        "fact     GPU: NVIDIA H200, 143771 MiB, 580.159",
        "fact     free host memory: 128.0 GiB",
        "fact     free in /dev/shm: not here",
        "fact     nvidia-cuda-mps-control: not here",
        "fact     nvcc: not here",
        f"fact     C compiler: {compiler}",
    ]


def test_an_ill_driver_is_quoted_in_one_line(tmp_path: Path) -> None:
    ill = program(tmp_path, "nvidia-smi", "echo 'has failed'; echo 'is it loaded?' >&2; exit 9")
    assert machine.gpu_names(str(ill)) == "not known: nvidia-smi says has failed is it loaded?"
    assert machine.gpu_names(None) == "not known: nvidia-smi is not here"
    quiet = program(tmp_path, "nvidia-smi", "exit 0")
    assert machine.gpu_names(str(quiet)) == "none, says nvidia-smi"


def test_a_missing_driver_is_the_one_failure_and_its_modules_are_not_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "driver_version", lambda: "")
    monkeypatch.setattr(machine, "facts", lambda _: iter(()))
    monkeypatch.setattr(readiness, "version", lambda _: "0.26.0")
    monkeypatch.setattr(readiness, "plugins", lambda: iter(()))
    monkeypatch.setattr(readiness, "_kernels", lambda: iter(()))
    monkeypatch.setattr(readiness, "SERVER_MODULES", ("json", "vllm.cumem_allocator"))
    monkeypatch.setattr(readiness, "DRIVER_MODULES", {"vllm.cumem_allocator"})
    monkeypatch.setattr(readiness, "ROSEMUX_MODULES", ())
    monkeypatch.setattr(readiness, "ADAPTER_MODULES", ())
    assert readiness.main([]) == 1
    said = lines(capsys)
    assert [line for line in said if line.startswith("FAILED")] == [
        "FAILED   NVIDIA driver: no NVIDIA driver here: libcuda.so.1 not found"
    ]
    assert said[0].startswith("FAILED")
    assert "         not tried without a driver: vllm.cumem_allocator" in said
    assert said[-1] == "check: 1 failed"


@pytest.mark.parametrize("installed", [False, True])
def test_the_check_stops_at_the_first_failure_only_where_no_bundle_is_on_the_path(
    installed: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if installed:
        (tmp_path / INSTALLED).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "driver_version", lambda: "")
    monkeypatch.setattr(machine, "facts", lambda _: iter(()))
    monkeypatch.setattr(readiness, "plugins", lambda: iter(()))
    monkeypatch.setattr(readiness, "ROSEMUX_MODULES", ("json", "no_such_module_here", "base64"))
    assert readiness.main(["--only", "rosemux"]) == 1
    said = lines(capsys)
    assert "FAILED   import no_such_module_here: ModuleNotFoundError: No module named " in said[2]
    last = "check: no bundle is on Python's path; source SITE/activate first"
    assert said[3:] == [last] if not installed else said[-1] == "check: 1 failed"
    assert len(said) == (5 if installed else 4)


def test_without_vllm_a_missing_driver_is_a_fact_and_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "driver_version", lambda: "")
    monkeypatch.setattr(readiness, "plugins", lambda: iter(()))
    monkeypatch.setattr(readiness, "ROSEMUX_MODULES", ("json",))
    assert readiness.main(["--only", "rosemux"]) == 0
    said = lines(capsys)
    assert said[0] == "fact     NVIDIA driver: no NVIDIA driver here: libcuda.so.1 not found"
    assert said[-1] == "check: all is well"
