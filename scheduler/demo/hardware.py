"""What the engines of a run are started on: cores of a CPU, or one GPU.

Engines' flags, models, loads and places differ between the two, and are here. What a run measures,
and in which order, does not.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from coserve import isolation
from coserve.gpus import ComputeMode, Gpu, GpuMemory, gpu_memory, gpus
from coserve.isolation import TIME_SLICING, Isolation
from coserve.vllm.launch import GpuOwner, GpuShare
from harvester.contracts.errors import Unsupported
from scheduler.demo import memory_split
from scheduler.demo.job.model import PolicyShape, write_checkpoint
from scheduler.demo.prerequisites import check_gpu_machine, check_machine, is_cuda_build
from scheduler.demo.production_model import (
    EIGHT_BILLION,
    SMALL,
    STEP_TOKENS,
    ModelShape,
    write_production_checkpoint,
)
from scheduler.demo.window import TokenScale


class Kind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"
    REHEARSAL = "gpu-rehearsal"
    """A GPU's form of the run with small models on CPU engines: for a machine without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLoad:
    """Turns without end on a guest."""

    concurrency: int = 16
    """The guest's batch."""
    places: int = 24
    """Turns that a gateway gives an engine: those beyond its batch take the places of turns that
    end, without the way through the gateway in between. Turns of one length end together."""
    prompt_tokens: int = 96
    turn_tokens: int = 160


class Hardware(ABC):
    """Its class attributes are those of the CPU form."""

    kind: ClassVar[Kind]
    shape: ModelShape = SMALL
    """Of production."""
    step_tokens: int = STEP_TOKENS
    """Production's budget for one step."""
    production_requests: int = 32
    """That it serves at once."""
    rollouts = RolloutLoad()
    clients: int = 8
    """Of a closed loop that fills one engine."""
    shares_core: bool = True
    """Production and guest take turns on a core, so that what a process ran is what it used."""
    starts_in_turn: bool = False
    """Production has to answer before the guest starts, and the guest before the agent does."""
    policy: Mapping[str, Any] = MappingProxyType({})
    """Over the slot's own settings in the agent."""
    scales: tuple[TokenScale, ...]
    """Of the trace's token counts, from the largest: taken until there are enough requests."""
    pulse_sizes: TokenScale
    """Of a run whose question is what a request costs."""

    @abstractmethod
    def check(self) -> None:
        """Raises ConfigError or Unsupported where the machine lacks something, with what to do."""

    @abstractmethod
    def isolation(self) -> Isolation: ...

    @abstractmethod
    def isolate(self, pids: Sequence[int], *, first: int, backend: Isolation) -> None:
        """Put a guest's processes under `backend`, whichever they were under."""

    @abstractmethod
    def write_policy(self, directory: Path, shape: PolicyShape) -> None:
        """The guest's model, to be started with dummy weights."""

    def policy_context(self, shape: PolicyShape) -> int:
        """Tokens of a guest's longest request."""
        return shape.context_tokens

    def core(self, number: int) -> int | None:
        """Where a process is kept; None leaves it to the kernel."""
        return number

    def production(self) -> GpuOwner | None:
        """None is a CPU engine; so for the two below."""
        return None

    def guest(self) -> GpuShare | None:
        return None

    def stock(self, engines: int) -> GpuOwner | None:  # noqa: ARG002 - of a GPU's form
        """Each of several engines side by side."""
        return None

    def engine_arguments(self) -> tuple[str, ...]:
        """Of vLLM, for any engine."""
        return ()

    def guest_arguments(self) -> tuple[str, ...]:
        # Most contexts are shorter than the 128 tokens of a CPU engine's own block: no prefix
        # would ever be found again.
        return ("--block-size", "32")

    def engine_environment(self, cache: Path) -> dict[str, str]:  # noqa: ARG002 - as above
        """`cache` is kept between runs."""
        return {}

    def told_to_guest(self, backend: Isolation) -> Isolation | None:  # noqa: ARG002 - as above
        """Isolation that is a matter of how the guest's processes start."""
        return None


class CpuHardware(Hardware):
    """Both engines on one core, the guest in the isolation backend's class."""

    kind = Kind.CPU
    # From the demo's requests to ever smaller ones.
    scales = tuple(
        TokenScale(
            input_scale=scale, output_scale=scale, input_max=1024, output_min=2, output_max=128
        )
        for scale in (0.25, 0.18, 0.125, 0.09, 0.0625, 0.045, 0.03)
    )
    pulse_sizes = scales[4]

    def check(self) -> None:
        check_machine()

    def isolation(self) -> Isolation:
        return isolation.choose()

    def isolate(self, pids: Sequence[int], *, first: int, backend: Isolation) -> None:
        for pid in pids:
            isolation.lift_from_process(pid)
            isolation.apply_to_process(backend, pid, guest=first)

    def write_policy(self, directory: Path, shape: PolicyShape) -> None:
        write_checkpoint(directory, shape)


_QUICK_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Decode steps are replayed as whole CUDA graphs, as by default; prefills are not compiled. vLLM's
own choice takes Inductor minutes at a first start, of which both engines need one."""
_POLICY_CONTEXT = 2048


@dataclass(frozen=True)
class GpuHardware(Hardware):
    """Both engines on one GPU, in turns of CUDA's; processes on whichever core is free."""

    gpu: Gpu
    memory: GpuMemory

    kind: ClassVar[Kind] = Kind.GPU
    shape = EIGHT_BILLION
    step_tokens = 2048
    production_requests = 64
    rollouts = RolloutLoad(concurrency=64, places=96, prompt_tokens=256, turn_tokens=512)
    clients = 32
    shares_core = False
    starts_in_turn = True
    # A running step blocks production for all of its time: a twentieth of most prompts is less than
    # any step of a guest, and none would start. What is promised without isolation is a quarter.
    policy = MappingProxyType({"epsilon": 0.25})
    # Prompts stay as they are: a GPU takes them whole, and the longest make the law's slack. Each
    # output token is a step of milliseconds whatever else is in it, so that requests of natural
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

    def told_to_guest(self, backend: Isolation) -> Isolation | None:  # noqa: ARG002
        return self.isolation()


_SMALL_AS_A_GPUS = replace(SMALL, architecture="LlamaForCausalLM", model_type="llama")


@dataclass(frozen=True)
class RehearsedGpu(GpuHardware):
    """All of a GPU's form but what names the GPU to an engine."""

    kind: ClassVar[Kind] = Kind.REHEARSAL
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


def find_hardware(wanted: Kind | None = None, *, command: str = "nvidia-smi") -> Hardware:
    """This machine's, or the wanted kind. Raises Unsupported where that is not here.

    A GPU counts where the installed vLLM is the CUDA build: a CPU build beside it uses none.
    """
    if wanted is Kind.REHEARSAL:
        return _REHEARSED
    if wanted is Kind.CPU or (wanted is None and not is_cuda_build()):
        return CpuHardware()
    here = gpus(command)
    if not here:
        if wanted is None:
            return CpuHardware()
        raise Unsupported(f"no NVIDIA GPU: {command} is not there or names none")
    gpu = here[0]
    return GpuHardware(gpu, gpu_memory(gpu.uuid, command))
