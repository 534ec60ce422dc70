"""Green contexts: two streams of one process, each on multiprocessors of its own.

Through the driver's own API, since torch makes green contexts that all begin at the first
multiprocessor and so overlap. Only in one process: contexts of two processes take turns all the
same.
"""

from dataclasses import dataclass
from typing import Any

import torch

from harvester.contracts.errors import Unsupported

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

    Raises Unsupported where driver or bindings have no green contexts.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise Unsupported(f"cuda-bindings is not installed: {error}") from error
    torch.zeros(1, device="cuda")  # Makes the primary context, of which green contexts are.
    device = _called(driver.cuDeviceGet(0))
    whole = _called(
        driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    )
    wanted = max(1, round(guest_ratio * whole.sm.smCount))
    groups, _count, rest = _called(driver.cuDevSmResourceSplitByCount(1, whole, 0, wanted))
    made = [_context(driver, device, resource) for resource in (rest, groups[0])]
    (production, production_stream), (guest, guest_stream) = made
    return Partition(
        production=production_stream,
        guest=guest_stream,
        production_multiprocessors=int(rest.sm.smCount),
        guest_multiprocessors=int(groups[0].sm.smCount),
        contexts=(production, guest),
    )


def _context(driver: Any, device: Any, resource: Any) -> tuple[Any, torch.cuda.Stream]:
    description = _called(driver.cuDevResourceGenerateDesc([resource], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _called(driver.cuGreenCtxCreate(description, device, flags))
    stream = _called(driver.cuGreenCtxStreamCreate(context, _STREAM_NON_BLOCKING, 0))
    return context, torch.cuda.ExternalStream(int(stream))  # type: ignore[no-untyped-call]


def _called(answer: tuple[Any, ...]) -> Any:
    """The results of one driver call. Raises Unsupported with its error."""
    code, *results = answer
    if int(code) != 0:
        raise Unsupported(f"the driver refuses green contexts: {code}")
    return results[0] if len(results) == 1 else tuple(results)
