"""The command lines of stock vLLM as a production engine, a guest or a dedicated rollout engine.

Pure: it builds argument lists and environments and starts nothing. `production` adds exactly what
an operator must add to an existing deployment: one middleware flag and three variables.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from coserve.guest.isolation import Isolation
from coserve.vllm import residency
from coserve.vllm.capabilities import Capabilities
from coserve.vllm.environment import ENGINE_VARIABLE, ISOLATION_VARIABLE, SLOT_VARIABLE, Role
from harvester.contracts.errors import ConfigError
from harvester.contracts.page.directory import DIRECTORY_VARIABLE
from harvester.contracts.stock_fallback import ROLE_VARIABLE
from harvester.contracts.wire.engines import IDENTITY

WEIGHT_ROOT_VARIABLE = "ROSEMUX_WEIGHT_ROOT"
WORKER_EXTENSION = "coserve.vllm.kv_worker.KvPages"
"""Lets a guest return its KV memory page by page. Without the flag the memory stays allocated."""

SEGMENT_VARIABLE = "KVCACHED_IPC_NAME"
AUTOPATCH_VARIABLE = "KVCACHED_AUTOPATCH"

GUEST_UTILIZATION = "0.01"
"""Share of the whole GPU of which vLLM, given a fixed KV size, only checks that it is free at the
start: production has taken its nine tenths already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """A guest's share of its GPUs. Its KV size is fixed: profiling would take memory that is free
    now and belongs to production."""

    kv_cache_bytes: int
    """KV cache on each GPU."""
    devices: tuple[str, ...] = ()
    """UUIDs or numbers for CUDA_VISIBLE_DEVICES; empty inherits the process's."""
    shared_kv: str = ""
    """Consent level `memory`: the engine's segment, with which kvcached maps and unmaps its KV by
    pages. "" keeps all KV mapped."""
    sleeps: bool = False
    """Offload weights to pinned host memory of the same size while asleep (vLLM's sleep mode)."""
    eager: bool = False
    """Run without CUDA graphs: slower steps, a lower floor."""

    def __post_init__(self) -> None:
        if self.kv_cache_bytes <= 0:
            raise ConfigError("a guest's KV on a GPU must be above 0 bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOwner:
    """Production's share of its GPUs: a part of the memory, which vLLM profiles at its start and
    fills with KV. No other process may start on these GPUs meanwhile."""

    memory_ratio: float
    """Part of each GPU's whole memory, between 0 and 1."""
    devices: tuple[str, ...] = ()
    """UUIDs or numbers, as in GpuShare."""

    def __post_init__(self) -> None:
        if not 0.0 < self.memory_ratio < 1.0:
            raise ConfigError("an engine's part of a GPU's memory must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Settings that all three kinds of engine share."""

    name: str
    model: Path
    port: int
    max_model_len: int
    max_num_seqs: int
    vllm: Capabilities
    core: int | None = None
    """CPU to pin to; None leaves it to the operating system."""
    kv_cache_gib: int = 1
    """KV cache of a CPU engine."""
    gpu: GpuShare | GpuOwner | None = None
    """The engine's GPUs and its share of them; None for a CPU engine."""
    extra_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineCommand:
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def stock(spec: EngineSpec) -> EngineCommand:
    """A production engine without any RoseMux component."""
    # A rollout engine's weights, unlike production's, come from a store of bfloat16.
    dtype = "bfloat16" if spec.gpu is not None or _fast_bf16() else "float32"
    return EngineCommand(_server(spec, dtype), _environment(spec) | HUGE_PAGES)


def production(spec: EngineSpec, *, pages: Path, shared_kv: str = "") -> EngineCommand:
    """A production engine at consent level `plugin`, or `memory` if its KV has a segment."""
    bare = stock(spec)
    arguments = (*bare.arguments, "--middleware", "coserve.vllm.middleware.PulseMiddleware")
    shared = shared_memory(shared_kv) if shared_kv else {}
    slot = _slot(spec, Role.PRODUCTION, pages)
    return EngineCommand(arguments, bare.environment | slot | shared)


def guest(
    spec: EngineSpec,
    *,
    pages: Path,
    weights: Path,
    isolation: Isolation | None = None,
    slot: str = "",
) -> EngineCommand:
    """A rollout engine on a production slot, gated by the slot's pages.

    `isolation` is passed if it takes effect through the environment that its processes start with.
    """
    arguments = (
        *_server(spec),
        *_rollout(spec.vllm),
        "--scheduler-cls",
        "coserve.vllm.scheduler.CoserveScheduler",
        "--middleware",
        "coserve.vllm.middleware.EpochMiddleware",
        "--worker-extension-cls",
        WORKER_EXTENSION,
        *IDENTITY,
    )
    within = _slot(spec, Role.GUEST, pages) | ({SLOT_VARIABLE: slot} if slot else {})
    under: dict[str, str] = {}
    if isolation is not None:
        under = {ISOLATION_VARIABLE: isolation.backend, **dict(isolation.environment)}
    environment = _environment(spec) | _compiler(spec) | within | _weights(weights) | under
    return EngineCommand(arguments, environment)


def dedicated(spec: EngineSpec, *, weights: Path) -> EngineCommand:
    """A rollout engine on dedicated accelerators."""
    arguments = (*_server(spec), *_whole_prompts(spec), *_rollout(spec.vllm), *IDENTITY)
    environment = _environment(spec) | HUGE_PAGES | _compiler(spec)
    return EngineCommand(arguments, environment | _weights(weights))


_CPU_STEP_TOKENS = 2048
"""Most tokens of a dedicated engine's step; vLLM's own number on a CPU."""


def _fast_bf16() -> bool:
    """Whether bf16 is fast: without AVX-512, bf16 prefill takes ten times as long as float32."""
    return "avx512f" in Path("/proc/cpuinfo").read_text()


def _server(spec: EngineSpec, dtype: str = "bfloat16") -> tuple[str, ...]:
    pin = () if spec.core is None else ("taskset", "-c", str(spec.core))
    return (
        *pin,
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(spec.model),
        "--served-model-name",
        spec.name,
        "--host",
        "127.0.0.1",
        "--port",
        str(spec.port),
        "--dtype",
        dtype,
        *_memory(spec),
        "--max-model-len",
        str(spec.max_model_len),
        "--max-num-seqs",
        str(spec.max_num_seqs),
        "--disable-uvicorn-access-log",
        *spec.extra_arguments,
    )


def _memory(spec: EngineSpec) -> tuple[str, ...]:
    """Memory flags. Raises Unsupported if sleeping weights could not follow versions in this
    vLLM.
    """
    gpu = spec.gpu
    if gpu is None:
        return ("--enforce-eager",)
    if isinstance(gpu, GpuOwner):
        return ("--gpu-memory-utilization", f"{gpu.memory_ratio:g}")
    if gpu.sleeps:
        residency.check(spec.vllm, shared_kv=bool(gpu.shared_kv))
    eager = ("--enforce-eager",) if gpu.eager else ()
    size = ("--kv-cache-memory-bytes", str(gpu.kv_cache_bytes))
    sleeps = ("--enable-sleep-mode",) if gpu.sleeps else ()
    return (*eager, *sleeps, *size, "--gpu-memory-utilization", GUEST_UTILIZATION)


def _whole_prompts(spec: EngineSpec) -> tuple[str, ...]:
    """Flags for whole prompts on a CPU: vLLM rewinds a seeded generator behind each step but a
    prompt's last, which CPU generators cannot do, and the engine dies."""
    if spec.gpu is not None:
        return ()
    step_tokens = max(_CPU_STEP_TOKENS, spec.max_model_len)
    return ("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(step_tokens))


def _rollout(vllm: Capabilities) -> tuple[str, ...]:
    # Each token is sent as it is made. An end is never held back: were others, a move would draw
    # them again and keep the end, and moved turns would be shorter.
    routes = () if vllm.token_routes_flag is None else (vllm.token_routes_flag,)
    return (
        *routes,
        "--load-format",
        "dummy",
        "--weight-transfer-config",
        '{"backend": "rosemux"}',
        "--stream-interval",
        "1",
        "--logprobs-mode",
        "processed_logprobs",
    )


STEADY_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
}
"""Keeps memory that a step frees for the next one. glibc otherwise returns large blocks to the
kernel and requests them again, step after step: page faults, and a lock on which a page scanner of
the kernel held production's worker up for a second, several times an hour."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Requests huge pages where the kernel gives them on request. Reading weights through small pages
also waits for page tables, which neighbours evict from the shared cache. Not for guests: they
return memory in small pages, and the kernel would merge the rest into huge pages again."""

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Keeps the worker in the engine core's process, as on a single GPU. On CPUs vLLM otherwise gives
it a process of its own, to bind its threads, which RoseMux does not request; and a worker spins for
a second after each step, taking the core from the process that shares it. Engines of several ranks
keep their workers."""

NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""vLLM compiles its count of better tokens, which every request with log-probabilities needs, at
the first of them: 20 s of a core, which a guest takes from production."""


def _environment(spec: EngineSpec) -> dict[str, str]:
    if spec.gpu is None:
        device = {
            "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **ONE_PROCESS,
        }
    else:
        device = _gpu(spec.gpu)
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **device,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **STEADY_HEAP,
    }


def _compiler(spec: EngineSpec) -> dict[str, str]:
    # On a GPU vLLM's own steps are compiled.
    return NO_COMPILER if spec.gpu is None else {}


def _gpu(part: GpuShare | GpuOwner) -> dict[str, str]:
    # In the order of the bus, as nvidia-smi counts; CUDA's own default puts the fastest first.
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if part.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(part.devices)
    shared_kv = part.shared_kv if isinstance(part, GpuShare) else ""
    return environment | (shared_memory(shared_kv) if shared_kv else {})


def shared_memory(segment: str) -> dict[str, str]:
    """Variables of consent level `memory`, for production too, in addition to the package."""
    return {"ENABLE_KVCACHED": "true", AUTOPATCH_VARIABLE: "1", SEGMENT_VARIABLE: segment}


def _slot(spec: EngineSpec, role: Role, pages: Path) -> dict[str, str]:
    return {ROLE_VARIABLE: role, ENGINE_VARIABLE: spec.name, DIRECTORY_VARIABLE: str(pages)}


def _weights(root: Path) -> dict[str, str]:
    # The routes for pausing and weight updates are vLLM's development routes; they are reached over
    # loopback only.
    return {WEIGHT_ROOT_VARIABLE: str(root), "VLLM_SERVER_DEV_MODE": "1"}
