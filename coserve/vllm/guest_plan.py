"""Plans a guest's isolation and memory from the capabilities of the machine and of vLLM.

Every choice gets an answer to two questions: is it possible here, and why (not)? The answers are
for an operator to read before anything starts. A choice that needs consent is never made without
it, and a request that cannot be met is refused: there is no substitute.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from coserve.guest import isolation as backends
from coserve.guest.gpus import Gpu
from coserve.guest.isolation import Isolation, MpsShare
from coserve.vllm import kv_shared, residency
from coserve.vllm.capabilities import Capabilities
from coserve.vllm.launch import GpuShare
from harvester.contracts.errors import ConfigError, Unsupported
from harvester.contracts.isolation import IsolationBackend

_GIB = 1 << 30


class MemoryPlacement(StrEnum):
    """Placement of the guest's KV while production needs the memory."""

    STATIC = "static"
    """Unchanged: a fixed size that production has left room for."""
    PAGES = "pages"
    """CPU: pages are returned to the operating system."""
    SHARED = "shared"
    """GPU: kvcached in both engines maps and unmaps pages of one budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSettings:
    """Requests and consents of the operator."""

    kv_cache_bytes: int
    memory_bytes: int = 0
    """Memory that a guest on a CPU can ever have here; 0: unknown."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs of the slot; empty is a guest on a CPU."""
    isolation: IsolationBackend | None = None
    """Backend to use; None chooses the best one that needs no consent."""
    mps: MpsShare | None = None
    """Consent to MPS."""
    shared_kv: str = ""
    """Consent to share KV with production: name of the guest's segment."""
    sleeps: bool = False
    eager: bool = False


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One option of the plan: whether it is possible here, whether it is taken, and why."""

    question: str
    choice: str
    possible: bool
    taken: bool
    why: str


@dataclass(frozen=True, slots=True)
class GuestPlan:
    isolation: Isolation
    memory: MemoryPlacement
    gpu: GpuShare | None
    """The guest's share of its GPUs; None for a CPU engine."""
    kv_cache_gib: int
    """KV of a CPU engine, in GiB."""


def plan(settings: GuestSettings, vllm: Capabilities) -> GuestPlan:
    """Raises Unsupported or ConfigError if a request cannot be met."""
    memory = _memory(settings)
    _held(memory, settings, vllm)
    if settings.sleeps:
        _weights_leave(settings, vllm)
    chosen = backends.choose(settings.isolation, gpus=settings.gpus, mps=settings.mps)
    if not settings.gpus:
        return GuestPlan(chosen, memory, None, settings.kv_cache_bytes // _GIB)
    share = GpuShare(
        kv_cache_bytes=settings.kv_cache_bytes,
        devices=tuple(gpu.uuid for gpu in settings.gpus),
        shared_kv=settings.shared_kv,
        sleeps=settings.sleeps,
        eager=settings.eager,
    )
    return GuestPlan(chosen, memory, share, 0)


def plan_options(settings: GuestSettings, vllm: Capabilities) -> tuple[PlanOption, ...]:
    """Every option, also where `plan` refuses."""
    leave = partial(_weights_leave, settings, vllm)
    asleep = _plan_option("asleep", "weights leave", leave, taken=settings.sleeps)
    return (*_isolations(settings), *_memories(settings, vllm), asleep)


def _plan_option(
    question: str, choice: str, explain: Callable[[], str], *, taken: bool
) -> PlanOption:
    """`explain` says why the choice is possible, or raises why it is not."""
    try:
        return PlanOption(question, choice, True, taken, explain())
    except (ConfigError, Unsupported) as error:
        return PlanOption(question, choice, False, False, str(error))


def _isolations(settings: GuestSettings) -> Iterator[PlanOption]:
    chosen = settings.isolation or backends.choose(gpus=settings.gpus).backend

    def effect(backend: IsolationBackend) -> str:
        found = backends.choose(backend, gpus=settings.gpus, mps=settings.mps)
        return f"{found.statement}; {_EFFECT[backend]}"

    for backend in IsolationBackend:
        taken = backend is chosen
        yield _plan_option("isolation", backend, partial(effect, backend), taken=taken)


_EFFECT = {
    IsolationBackend.IDLE_GROUP: "production's threads run as if the guest were not there",
    IsolationBackend.IDLE: "production's threads preempt the guest's at once",
    IsolationBackend.TIME_SLICING: "CUDA's own turns on the GPU; a fault stays with who caused it",
    IsolationBackend.MPS: "both run at once; by your consent, and only while one server has both",
    IsolationBackend.NONE: "the whole of a running step may delay production",
}


def _memories(settings: GuestSettings, vllm: Capabilities) -> Iterator[PlanOption]:
    taken = _memory(settings)
    for memory in MemoryPlacement:
        held = partial(_held, memory, settings, vllm)
        yield _plan_option("memory", memory, held, taken=memory is taken)


def _memory(settings: GuestSettings) -> MemoryPlacement:
    if settings.shared_kv:
        return MemoryPlacement.SHARED
    return MemoryPlacement.STATIC if settings.gpus else MemoryPlacement.PAGES


def _held(memory: MemoryPlacement, settings: GuestSettings, vllm: Capabilities) -> str:
    """Memory that the KV takes under this placement. Raises Unsupported or ConfigError where it is
    impossible."""
    size = f"{settings.kv_cache_bytes / _GIB:.2f} GiB of KV"
    match memory:
        case MemoryPlacement.STATIC:
            if not settings.gpus:
                raise Unsupported("on a CPU the KV's pages are given back")
            return f"{size} on each GPU stays taken; production must leave room for it"
        case MemoryPlacement.PAGES:
            if settings.gpus:
                raise Unsupported("vLLM's KV on a GPU cannot be given back in part")
            if settings.kv_cache_bytes < _GIB:
                raise ConfigError("kv_cache_bytes: on a CPU vLLM takes whole GiB, at least one")
            if 0 < settings.memory_bytes < settings.kv_cache_bytes:
                have = f"{settings.memory_bytes / _GIB:.2f} GiB"
                raise ConfigError(
                    f"kv_cache_bytes: {size} do not fit into the {have} of memory that this "
                    "machine or the slot's memory_group has"
                )
            return f"at most {size}; a budget is kept by giving pages back"
        case MemoryPlacement.SHARED:
            if not settings.gpus:
                raise Unsupported("kvcached needs an NVIDIA GPU")
            if not settings.shared_kv:
                raise ConfigError(
                    "shared memory takes an operator's consent: kvcached replaces production's KV "
                    "allocation as well. Name both engines' segments to give it"
                )
            kv_shared.check(vllm)
            return f"at most {size} on each GPU, by pages, as segment {settings.shared_kv}"


def _weights_leave(settings: GuestSettings, vllm: Capabilities) -> str:
    """Place of sleeping weights. Raises Unsupported or ConfigError where they cannot leave."""
    if not settings.gpus:
        raise Unsupported("on a CPU there is no other memory for the weights to go to")
    residency.check(vllm, shared_kv=bool(settings.shared_kv))
    why = "to pinned host memory of their size, where they follow new versions"
    if not settings.sleeps:
        why += "; ask for it with guest.sleeps, else they stay on the GPU"
    return why
