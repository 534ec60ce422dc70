"""Facts of a machine, read from programs and libraries that are faked."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.gpu_slot.host import driver as host_driver  # noqa: E402
from benchmarks.gpu_slot.host import facts as host_facts  # noqa: E402
from benchmarks.gpu_slot.host import memory as host_memory  # noqa: E402
from benchmarks.gpu_slot.host.driver import agreement, nvidia_smi, nvml_device, queried  # noqa: E402
from benchmarks.gpu_slot.host.launch_lock import LockHold, turn_figures  # noqa: E402
from benchmarks.gpu_slot.parts import PARTS  # noqa: E402
from benchmarks.gpu_slot.results import left_in, put_into  # noqa: E402
from benchmarks.gpu_slot.spread import spread  # noqa: E402
from harvester.contracts.errors import Unsupported  # noqa: E402

BARE = "1b2c3d4e-0000-1111-2222-333344445555"
UUID = f"GPU-{BARE}"
FULL = f"""\
==============NVSMI LOG==============
Driver Version                            : 580.159.04
CUDA Version                              : 13.0
Attached GPUs                             : 1
GPU 00000000:00:07.0
    Product Name                          : NVIDIA H200
    Persistence Mode                      : Enabled
    GPU UUID                              : {UUID}
    Serial Number                         : 1234
    Compute Mode                          : Default
"""
MS = 1_000_000


@pytest.fixture
def command(tmp_path: Path) -> str:
    """A program that answers as nvidia-smi does for one H200."""
    program, text = tmp_path / "nvidia-smi", tmp_path / "full"
    text.write_text(FULL)
    program.write_text(
        "#!/bin/sh\n"
        f'case "$1" in -q) cat {text};; -L) echo "GPU 0: NVIDIA H200 (UUID: {UUID})";;\n'
        f'*) echo "{UUID}, Default";; esac\n'
    )
    program.chmod(0o755)
    return str(program)


class NvmlError(Exception):
    pass


def _not_supported(*_asked: Any) -> Any:
    raise NvmlError("Not Supported")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NVML's bindings with one GPU, which takes whole UUIDs alone."""

    def by_uuid(uuid: str) -> str:
        if uuid != UUID:
            raise NvmlError("Not Found")
        return "first"

    fake = SimpleNamespace(
        __name__="pynvml",
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: "first",
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda handle: UUID,
        nvmlDeviceGetComputeMode=lambda handle: 0,
        nvmlDeviceGetPersistenceMode=lambda handle: 1,
        nvmlDeviceGetCurrPcieLinkGeneration=_not_supported,
        nvmlDeviceGetCurrPcieLinkWidth=lambda handle: 16,
        nvmlDeviceGetClockInfo=lambda handle, clock: 345 if clock == 1 else 3201,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=7)],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=5),
    )
    monkeypatch.setattr(host_driver, "nvml", lambda: fake)
    monkeypatch.setattr(host_memory, "nvml", lambda: fake)
    return fake


def test_gpus_are_read_and_timed_and_their_texts_kept(command: str) -> None:
    found = nvidia_smi(calls=2, texts=True, command=command)
    assert found["gpus"] == [{"uuid": UUID, "compute_mode": "Default"}]
    assert found["call_s"]["count"] == 2
    assert 0 < found["call_s"]["low"] <= found["first_call_s"]
    assert found["csv"] == f"{UUID}, Default\n"
    assert found["full"]["GPU UUID"] == [UUID]
    assert "full" not in nvidia_smi(calls=1, texts=False, command=command)


def test_only_the_named_keys_of_the_full_text_are_kept() -> None:
    kept = queried(FULL)
    assert kept["Compute Mode"] == ["Default"]
    assert kept["Driver Version"] == ["580.159.04"]
    assert "Serial Number" not in kept


def test_nvml_says_which_forms_of_a_uuid_it_takes_and_what_it_does_not_know(library: Any) -> None:
    found = nvml_device()
    assert found["uuids"] == [UUID]
    assert (found["uuid_with_prefix_taken"], found["uuid_without_prefix_taken"]) == (True, False)
    assert found["compute_mode"] == "Default"
    assert found["pcie_generation"] == "NVML: Not Supported"
    library.nvmlInit = _not_supported
    assert nvml_device() == {"not_here": "Not Supported"}


@pytest.mark.parametrize("torch_says", [BARE, UUID])
def test_sources_agree_on_the_gpu_whichever_form_torch_has(
    torch_says: str, command: str, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(uuid=torch_says)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    found = {
        "nvidia_smi_without_context": nvidia_smi(calls=1, texts=True, command=command),
        "nvml": nvml_device(),
    }
    said = agreement("cuda", found)
    assert said.pop("torch_uuid") == torch_says
    assert set(said.values()) == {True}
    found["nvml"]["uuids"], found["nvml"]["compute_mode"] = ["GPU-other"], "Prohibited"
    said = agreement("cuda", found)
    assert [name for name, agrees in said.items() if agrees is False] == [
        "uuid_as_nvml",
        "compute_mode_as_nvml",
    ]
    found["nvml"] = {"not_here": "x"}
    with pytest.raises(Unsupported):
        agreement("cuda", found)


def test_programs_of_mps_are_found_and_run_for_their_version_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert set(host_driver.mps_programs().values()) == {None}
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text('#!/bin/sh\necho "asked $*"\n')
    program.chmod(0o755)
    found = host_driver.mps_programs()
    assert found["nvidia-cuda-mps-control"] == str(program)
    assert found["nvidia-cuda-mps-server"] is None
    assert found["version"] == "asked -v"


def test_turns_that_overlap_are_counted() -> None:
    def turn(asked_ms: int, held_ms: int, released_ms: int) -> LockHold:
        return LockHold(asked_ns=asked_ms * MS, held_ns=held_ms * MS, released_ns=released_ms * MS)

    apart = turn_figures([turn(0, 30, 40), turn(0, 0, 10), turn(5, 10, 20)])
    assert (apart["turns"], apart["overlaps"]) == (3, 0)
    assert apart["wait_s"]["median"] == pytest.approx(0.005)
    assert apart["wait_s"]["high"] == pytest.approx(0.030)
    assert apart["idle_between_turns_s"]["high"] == pytest.approx(0.010)
    both = turn_figures([turn(0, 0, 10), turn(0, 9, 20)])
    assert both["overlaps"] == 1


def test_a_spread_has_its_count() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "count": 3}
    assert spread([]) == {"count": 0}


def test_the_part_runs_through_where_there_is_no_gpu(tmp_path: Path) -> None:
    part = next(part for part in PARTS if part.name == "host")
    importlib.import_module(part.module).measured(
        "cpu", tiny=True, put=put_into(tmp_path / "found.json")
    )
    found: dict[str, Any] = left_in(tmp_path / "found.json")
    assert found["launch_lock"]["turns"] == 8
    assert found["launch_lock"]["overlaps"] == 0
    (file,) = found["launch_lock"]["file"]
    assert file.startswith("GPU-")
    assert file.endswith(".launch")
    assert all(one < 10.0 for one in found["launch_lock"]["freed_by_kill_s"])
    report = found["memory_report"]
    assert (report["report"]["weights_bytes"], report["report"]["kv_bytes"]) == (6144, 16384)
    assert set(report["differences_bytes"].values()) == {0}
    assert found["copies"]["host_to_device"]["65536"]["us"]["count"] == 7
    assert found["launches"]["graph_and_wait_us"]["low"] > 0


def test_a_fact_that_fails_is_named_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> dict[str, Any]:
        raise ZeroDivisionError("no clock")

    monkeypatch.setattr(host_facts, "mps_programs", broken)
    monkeypatch.setattr(host_facts, "lock_facts", lambda *_, **__: {"turns": 1})
    found: dict[str, Any] = {}
    with pytest.raises(RuntimeError, match=r"facts not found: mps$"):
        host_facts.measured("cpu", tiny=True, put=found.__setitem__)
    assert found["mps"] == {"failed": "ZeroDivisionError: no clock"}
    assert found["launch_lock"] == {"turns": 1}
    json.dumps(found)


def test_memory_of_a_gpu_is_compared_part_by_part(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arithmetic beside the report, on what torch and the driver are made to say."""
    memory = SimpleNamespace(
        weights_bytes=10, kv_bytes=20, graphs_bytes=5, activations_bytes=7, other_bytes=8
    )
    segments = [
        {"total_size": 5, "segment_pool_id": (0, 1)},
        {"total_size": 38, "segment_pool_id": (0, 0)},
    ]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device=None: 43)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(host_memory, "_own_process_bytes", lambda: 50)
    differences = host_memory._against_the_driver(memory, torch.device("cuda:0"))
    assert differences == {
        "graphs_minus_private_pools": 0,
        "pools_minus_reserved": 0,
        "parts_minus_reserved": -1,
        "parts_and_other_minus_process": 0,
        "process_minus_device_used": 45,
    }
    assert host_memory._pids() == [7]
    library.nvmlInit = _not_supported
    assert host_memory._device_used_bytes() is None
    monkeypatch.setattr(host_memory, "nvml", lambda: None)
    assert host_memory._pids() is None
