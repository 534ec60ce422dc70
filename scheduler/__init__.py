"""Imports of a job's code, each loaded on first use: rollouts, and phases on shared nodes.

    from scheduler import RolloutClient

    with RolloutClient("http://127.0.0.1:8300", "math-7b") as client:
        turn = client.generate([1, 17, 42, 9], {"max_tokens": 64}, trajectory="a", weight_version=3)
        turn.token_ids, turn.log_probs, turn.spans

`AsyncRolloutClient` is the same for code in an event loop; examples/rollout.py runs. Phases:

    from pathlib import Path

    from scheduler import JobSpec, PhaseClient, PhaseKind, PhaseSpec, SocketTransport

    job = JobSpec(
        job="math-7b",
        slo=1.5,
        host_bytes=400 * 10**9,
        phases=(
            PhaseSpec(kind=PhaseKind.ROLLOUT, max_s=900.0),
            PhaseSpec(kind=PhaseKind.TRAINING, max_s=600.0),
        ),
    )
    phases = PhaseClient(SocketTransport(Path("/run/phases/phases.sock")), job)
    with phases.phase("rollout") as permit:
        permit.progress(1.0)
    with phases.phase("training") as permit:
        permit.check()
    phases.forget()

The whole contract: docs/phases.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler.client.blocking import RolloutClient
    from scheduler.client.rollout_client import AsyncRolloutClient
    from scheduler.model import JobSpec, PhaseKind, PhaseSpec
    from scheduler.rollmux.control.phase_client import PhaseClient
    from scheduler.rollmux.control.socket_transport import SocketTransport

__all__ = [
    "AsyncRolloutClient",
    "JobSpec",
    "PhaseClient",
    "PhaseKind",
    "PhaseSpec",
    "RolloutClient",
    "SocketTransport",
]
_MODULES = {
    "AsyncRolloutClient": "scheduler.client.rollout_client",
    "JobSpec": "scheduler.model",
    "PhaseClient": "scheduler.rollmux.control.phase_client",
    "PhaseKind": "scheduler.model",
    "PhaseSpec": "scheduler.model",
    "RolloutClient": "scheduler.client.blocking",
    "SocketTransport": "scheduler.rollmux.control.socket_transport",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harvester.distribution import needing

    with needing("rollmux", subject=f"scheduler.{name}"):
        return getattr(import_module(_MODULES[name]), name)
