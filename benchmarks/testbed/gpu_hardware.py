"""One GPU that production and a guest share, and the choice between it and a CPU."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from benchmarks.testbed import memory_split
from benchmarks.testbed.excerpt import TokenScale
from benchmarks.testbed.hardware import CpuHardware, Hardware, HardwareKind, RolloutLoad
from benchmarks.testbed.memory_split import GpuMemory
from benchmarks.testbed.prerequisites import check_gpu_machine, check_machine, is_cuda_build
from benchmarks.testbed.production_model import (
    EIGHT_BILLION,
    SMALL,
    STEP_TOKENS,
    write_production_checkpoint,
)
from coserve.guest import isolation
from coserve.guest.gpus import ComputeMode, Gpu, gpus, smi_lines
from coserve.guest.isolation import TIME_SLICING, Isolation
from coserve.vllm.launch import GpuOwner, GpuShare
from examples.grpo.policy_shape import PolicyShape
from harvester.contracts.errors import Unsupported

_QUICK_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Decode steps are replayed as whole CUDA graphs, as by default; prefills are not compiled. vLLM's
default compiles with Inductor for minutes at a first start, and both engines would need one."""
_POLICY_CONTEXT = 2048
_MEMORY_FIELDS = 3
_MIB = 1 << 20


@dataclass(frozen=True)
class GpuHardware(Hardware):
    """Both engines on one GPU, in turns of CUDA's; processes on whichever core is free."""

    gpu: Gpu
    memory: GpuMemory

    kind: ClassVar[HardwareKind] = HardwareKind.GPU
    shape = EIGHT_BILLION
    step_tokens = 2048
    production_requests = 64
    rollouts = RolloutLoad(concurrency=64, places=96, prompt_tokens=256, turn_tokens=512)
    clients = 32
    shares_core = False
    starts_in_turn = True
    # Prompts stay as they are: a GPU takes them whole, and the longest make the law's slack. Each
    # output token is a step of milliseconds regardless of its batch, so that requests of natural
    # length would keep production half busy at one per second.
    scales = tuple(
        TokenScale(
            input_scale=1.0, output_scale=scale, input_max=8192, output_min=2, output_max=512
        )
        for scale in (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125, 0.09, 0.0625)
    )
    pulse_sizes = scales[0]

    def check(self) -> None:
        check_gpu_machine()
        # Each refuses a GPU that will not do.
        self.isolation()
        memory_split.beside(self.memory, self.shape)

    def isolation(self) -> Isolation:
        return isolation.choose(gpus=(self.gpu,))

    def isolate(self, pids: Sequence[int], *, first: int, backend: Isolation) -> None:  # noqa: ARG002
        # CUDA's turns cannot be taken from a running process: every arm has them.
        for pid in pids:
            isolation.apply_to_process(self.isolation(), pid, guest=first)

    def write_policy(self, directory: Path, shape: PolicyShape) -> None:
        context_tokens = self.policy_context(shape)
        write_production_checkpoint(directory, shape=self.shape, context_tokens=context_tokens)

    def policy_context(self, shape: PolicyShape) -> int:
        return max(_POLICY_CONTEXT, shape.context_tokens)

    def core(self, number: int) -> int | None:  # noqa: ARG002
        return None

    def production(self) -> GpuOwner | None:
        part = memory_split.beside(self.memory, self.shape)
        return GpuOwner(memory_ratio=part.production_ratio, devices=(self.gpu.uuid,))

    def guest(self) -> GpuShare | None:
        part = memory_split.beside(self.memory, self.shape)
        return GpuShare(kv_cache_bytes=part.guest_kv_bytes, devices=(self.gpu.uuid,))

    def stock(self, engines: int) -> GpuOwner | None:
        ratio = memory_split.side_by_side(self.memory, self.shape, engines=engines)
        return GpuOwner(memory_ratio=ratio, devices=(self.gpu.uuid,))

    def engine_arguments(self) -> tuple[str, ...]:
        return ("--compilation-config", json.dumps(_QUICK_GRAPHS))

    def guest_arguments(self) -> tuple[str, ...]:
        return ("--max-num-batched-tokens", str(self.step_tokens))

    def engine_environment(self, cache: Path) -> dict[str, str]:
        return {
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "CUDA_CACHE_PATH": str(cache / "cuda"),
            "VLLM_LOGGING_LEVEL": "INFO",
        }

    def isolation_at_start(self, backend: Isolation) -> Isolation | None:  # noqa: ARG002
        return self.isolation()


_SMALL_AS_A_GPUS = replace(SMALL, architecture="LlamaForCausalLM", model_type="llama")


@dataclass(frozen=True)
class RehearsedGpu(GpuHardware):
    """All of a GPU's form but what names the GPU to an engine."""

    kind: ClassVar[HardwareKind] = HardwareKind.REHEARSAL
    shape = _SMALL_AS_A_GPUS
    step_tokens = STEP_TOKENS
    production_requests = 32
    rollouts = RolloutLoad()
    clients = 8
    scales = CpuHardware.scales
    pulse_sizes = CpuHardware.pulse_sizes

    def check(self) -> None:
        check_machine()

    def isolation(self) -> Isolation:
        return TIME_SLICING

    def production(self) -> GpuOwner | None:
        return None

    def guest(self) -> GpuShare | None:
        return None

    def stock(self, engines: int) -> GpuOwner | None:  # noqa: ARG002
        return None

    def engine_arguments(self) -> tuple[str, ...]:
        return ()


_REHEARSED = RehearsedGpu(
    Gpu("GPU-none", ComputeMode.DEFAULT), GpuMemory(total_bytes=0, free_bytes=0)
)


def gpu_memory(uuid: str, command: str = "nvidia-smi") -> GpuMemory:
    """Memory of one GPU, now. Raises Unsupported if the driver does not report it."""
    query = "--query-gpu=uuid,memory.total,memory.free"
    for line in smi_lines(command, query, "--format=csv,noheader,nounits"):
        words = [word.strip() for word in line.split(",")]
        if len(words) == _MEMORY_FIELDS and words[0] == uuid and "".join(words[1:]).isdigit():
            total, free = (int(word) * _MIB for word in words[1:])
            return GpuMemory(total_bytes=total, free_bytes=free)
    raise Unsupported(f"{command} does not report the memory of GPU {uuid}")


def find_hardware(kind: HardwareKind | None = None, *, command: str = "nvidia-smi") -> Hardware:
    """This machine's, or one of this kind. Raises Unsupported where that is not here.

    A GPU counts where the installed vLLM is the CUDA build: a CPU build beside it uses none.
    """
    if kind is HardwareKind.REHEARSAL:
        return _REHEARSED
    if kind is HardwareKind.CPU or (kind is None and not is_cuda_build()):
        return CpuHardware()
    here = gpus(command)
    if not here:
        if kind is None:
            return CpuHardware()
        raise Unsupported(f"no NVIDIA GPU: {command} is absent or lists none")
    gpu = here[0]
    return GpuHardware(gpu, gpu_memory(gpu.uuid, command))
