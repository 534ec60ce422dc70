"""Phases of RL jobs on shared nodes: the names that a job's code imports, each loaded on first use.

    from pathlib import Path

    from scheduler import DeclaredPhase, PhaseControl, PhaseKind, SocketControl, Submission

    job = Submission(
        job="math-7b",
        slo=1.5,
        host_bytes=400 * 10**9,
        phases=(
            DeclaredPhase(kind=PhaseKind.ROLLOUT, max_s=900.0),
            DeclaredPhase(kind=PhaseKind.TRAINING, max_s=600.0),
        ),
    )
    phases = PhaseControl(SocketControl(Path("/run/rosemux/phases.sock")), job)
    with phases.phase("rollout") as permit:
        permit.progress(1.0)
    with phases.phase("training") as permit:
        permit.check()
    phases.forget()

`PhaseControl(..., harvesting=Harvesting(gateway=URL))` lets the rollouts use leases of idle serving
slots. The whole contract: docs/phases.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler.model import PhaseKind
    from scheduler.rollmux.cluster.submission import DeclaredPhase, Submission
    from scheduler.rollmux.control.control import PhaseControl
    from scheduler.rollmux.control.harvesting import Harvesting
    from scheduler.rollmux.control.socket_control import SocketControl

__all__ = [
    "DeclaredPhase",
    "Harvesting",
    "PhaseControl",
    "PhaseKind",
    "SocketControl",
    "Submission",
]
_MODULES = {
    "DeclaredPhase": "scheduler.rollmux.cluster.submission",
    "Harvesting": "scheduler.rollmux.control.harvesting",
    "PhaseControl": "scheduler.rollmux.control.control",
    "PhaseKind": "scheduler.model",
    "SocketControl": "scheduler.rollmux.control.socket_control",
    "Submission": "scheduler.rollmux.cluster.submission",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
