"""Makes all process groups of a single-rank engine share one gloo device, and so one idle thread.

vLLM makes a dozen groups for one rank too. Torch opens a device for each, whose thread wakes a
hundred times a second to check for its end: 1.5 % of a core. A device may serve any number of
groups, but only a group's options can say so, which torch's own callers never pass. So while such
an engine starts, each single-rank gloo group is a stock group with the device of the first.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_log = logging.getLogger(__name__)


@contextmanager
def share_gloo_device(*, ranks: int) -> Iterator[None]:
    """Enter while the engine creates its process groups. `ranks`: total over its workers."""
    if ranks != 1:
        yield
        return
    from torch.distributed import distributed_c10d

    groups: Any = distributed_c10d
    stock = getattr(groups, "ProcessGroupGloo", None)
    if stock is None:
        yield  # Torch without gloo.
        return
    groups.ProcessGroupGloo = _OneDevice(stock)
    try:
        yield
    finally:
        groups.ProcessGroupGloo = stock


class _OneDevice:
    """Stand-in for torch's ProcessGroupGloo class, which makes stock groups and accepts them as
    instances."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock
        self._first: Any = None
        self._reported = False

    def __call__(self, store: Any, rank: int, size: int, *others: Any, **named: Any) -> Any:
        if size == 1 and self._first is not None:
            try:
                return self._stock(store, rank, size, self._options(*others, **named))
            except (AttributeError, TypeError) as error:
                self._tell(error)
        group = self._stock(store, rank, size, *others, **named)
        if size == 1:
            self._first = group
        return group

    def _options(self, *, timeout: Any) -> Any:
        """Raises AttributeError or TypeError where torch has other options than these."""
        options, of_first = self._stock._Options(), self._first.options
        options._devices, options._threads = of_first._devices, of_first._threads
        options._timeout = timeout
        return options

    def _tell(self, error: Exception) -> None:
        if not self._reported:
            self._reported = True
            _log.warning("no shared gloo device: each group wakes a thread of its own: %s", error)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._stock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)
