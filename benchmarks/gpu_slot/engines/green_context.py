"""Green contexts: two streams of one process, each on multiprocessors of its own.

Through the driver's own API, since torch makes green contexts that all begin at the first
multiprocessor and so overlap. Only in one process: contexts of two processes take turns all the
same.
"""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_slot.cuda_driver import checked, driver

_STREAM_NON_BLOCKING = 1


@dataclass(frozen=True, slots=True)
class Partition:
    production: torch.cuda.Stream
    guest: torch.cuda.Stream
    production_multiprocessors: int
    guest_multiprocessors: int
    contexts: tuple[Any, ...]
    """Kept alive as long as the streams."""


def partition(guest_ratio: float) -> Partition:
    """The guest gets about `guest_ratio` of the multiprocessors, production the rest.

    Raises Unsupported without cuda-bindings, RuntimeError where the driver refuses.
    """
    library = driver()
    torch.zeros(1, device="cuda")  # Makes the primary context, of which green contexts are.
    device = checked(library, "cuDeviceGet", 0)
    kind = library.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = checked(library, "cuDeviceGetDevResource", device, kind)
    required = max(1, round(guest_ratio * whole.sm.smCount))
    groups, _, rest = checked(library, "cuDevSmResourceSplitByCount", 1, whole, 0, required)
    made = [_context(library, device, resource) for resource in (rest, groups[0])]
    (production, production_stream), (guest, guest_stream) = made
    return Partition(
        production=production_stream,
        guest=guest_stream,
        production_multiprocessors=int(rest.sm.smCount),
        guest_multiprocessors=int(groups[0].sm.smCount),
        contexts=(production, guest),
    )


def _context(library: Any, device: Any, resource: Any) -> tuple[Any, torch.cuda.Stream]:
    description = checked(library, "cuDevResourceGenerateDesc", [resource], 1)
    flags = library.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = checked(library, "cuGreenCtxCreate", description, device, flags)
    stream = checked(library, "cuGreenCtxStreamCreate", context, _STREAM_NON_BLOCKING, 0)
    return context, torch.cuda.ExternalStream(int(stream))  # type: ignore[no-untyped-call]
