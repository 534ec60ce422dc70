"""A simulated job's submission: declared maxima, nodes, memory and SLO, and no mean.

It harvests, which changes nothing where the control allows no leases.
"""

from typing import Final

from scheduler.model import PhaseKind
from scheduler.rollmux.cluster.submission import DeclaredPhase, Submission
from scheduler.sim.rollmux.workload import SimulatedJob
from scheduler.sim.rollmux.world import World

_SYNC_MAX_RATIO: Final = 2.0
"""Declared maximum of a weight sync, over its duration."""


def submission_of(one: SimulatedJob, world: World) -> Submission:
    phases = [
        DeclaredPhase(
            kind=phase.kind, max_s=phase.max_s, nodes=phase.nodes, divisible=phase.divisible
        )
        for phase in one.job.phases
    ]
    if world.sync_s:
        max_s = _SYNC_MAX_RATIO * world.sync_s
        phases.append(DeclaredPhase(kind=PhaseKind.SYNC, max_s=max_s, nodes=0))
    return Submission(
        job=one.job.job,
        tenant=one.job.tenant,
        phases=tuple(phases),
        slo=one.job.slowdown_slo,
        host_bytes=one.job.host_bytes_per_node,
        harvesting=True,
    )
