"""The parts of the benchmark, in the order in which they run."""

from dataclasses import dataclass

NOT_HERE = 3
"""Exit status of a part that this machine cannot have, such as MPS without its daemon."""


@dataclass(frozen=True, slots=True)
class BenchmarkPart:
    """A module with `measured(kind, *, tiny, put)`, loaded in the part's own process alone.

    `kind` is `cuda` or `cpu`; `tiny` are the shapes of the rehearsal. It raises Unsupported where
    the machine lacks what the part measures.
    """

    name: str
    module: str
    limit_s: float
    """Time limit of the part; the results put by then count."""


_HERE = "benchmarks.gpu_slot"
PARTS = (
    BenchmarkPart("host", f"{_HERE}.host.facts", 40.0),
    BenchmarkPart("time_slicing", f"{_HERE}.sharing.time_slicing", 220.0),
    BenchmarkPart("riders", f"{_HERE}.riders", 70.0),
    BenchmarkPart("mps", f"{_HERE}.sharing.mps_shares", 190.0),
    BenchmarkPart("weights", f"{_HERE}.device_weights.weights", 120.0),
    BenchmarkPart("sleeping", f"{_HERE}.sleeping.weights", 70.0),
    BenchmarkPart("green_contexts", f"{_HERE}.sharing.green_contexts", 80.0),
)
"""On one H200 they are estimated at nine to ten minutes together: the last may be left for another
run. Their limits are more."""
