"""The parts of the benchmark, in the order in which they run."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu_slot.results import Put

NOT_HERE = 3
"""Exit status of a part that this machine cannot have, such as MPS without its daemon."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    module: str
    """Has `measured(kind, *, tiny, put)`; loaded in the part's own process alone."""
    limit_s: float
    """The part is ended after this; what it has put by then counts."""

    def measure(self, kind: str, *, tiny: bool, put: Put) -> None:
        """`kind` is `cuda` or `cpu`; `tiny` are the shapes of the rehearsal.

        Raises Unsupported where the machine lacks what the part measures.
        """
        measured: Callable[..., None] = importlib.import_module(self.module).measured
        measured(kind, tiny=tiny, put=put)


_HERE = "benchmarks.gpu_slot"
PARTS = (
    Part("host", f"{_HERE}.host_facts", 40.0),
    Part("time_slicing", f"{_HERE}.time_slicing", 220.0),
    Part("riders", f"{_HERE}.riders", 70.0),
    Part("mps", f"{_HERE}.mps_shares", 190.0),
    Part("sleeping", f"{_HERE}.sleeping_weights", 70.0),
    Part("weights", f"{_HERE}.device_weights", 90.0),
    Part("green_contexts", f"{_HERE}.green_contexts", 80.0),
)
"""Their usual times together are under nine minutes on one H200; their limits are more."""
