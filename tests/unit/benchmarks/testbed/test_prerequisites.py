"""Each test makes up its machine; no machine of CI has all of the faults."""

import os
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.testbed import prerequisites
from benchmarks.testbed.prerequisites import check_machine
from harvester.contracts.errors import ConfigError, Unsupported

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One that can run the demo."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=24 * GIB))
    shared = SimpleNamespace(f_bavail=GIB, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: shared)
    monkeypatch.setattr(prerequisites, "installed_vllm_version", lambda: "0.32.0+cpu")
    install(monkeypatch, {})
    return monkeypatch


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


def test_a_machine_with_all_of_it_passes() -> None:
    check_machine()


def test_one_core_is_not_enough(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(ConfigError, match="need 2 cores, this process may use 1"):
        check_machine()


def test_too_little_memory_is_reported_in_gib(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * GIB))
    with pytest.raises(ConfigError, match=r"12 GiB of free memory, 3\.0 GiB are free"):
        check_machine()


def test_a_small_shared_memory_is_reported_with_its_remedy(
    machine: pytest.MonkeyPatch,
) -> None:
    machine.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=16384, f_frsize=4096))
    with pytest.raises(ConfigError, match="--shm-size"):
        check_machine()


def test_an_unchecked_vllm_is_refused(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(prerequisites, "installed_vllm_version", lambda: "0.99.0")
    with pytest.raises(Unsupported, match=r"0\.99\.0 is not supported"):
        check_machine()


def test_a_cuda_build_beside_a_cpu_torch_is_reported_with_its_remedy(
    machine: pytest.MonkeyPatch,
) -> None:
    install(machine, {"torchvision": "0.28.0"})
    with pytest.raises(ConfigError, match="pip uninstall torchvision"):
        check_machine()


def test_a_cpu_build_of_it_may_stay(machine: pytest.MonkeyPatch) -> None:
    install(machine, {"torchvision": "0.28.0+cpu"})
    check_machine()
