"""Chooses a control's service: one that plans every job's nodes, or one that is given them."""

from pathlib import Path

from harvester.contracts.clock import Clock
from harvester.contracts.ids import JobId
from scheduler.model import JobSpec, PhaseSpec
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.job_limits import KINDS
from scheduler.rollmux.control.phase_service import JOURNAL_BYTES, PhaseService
from scheduler.rollmux.control.planning import PlanningService
from scheduler.rollmux.permits.terms import PermitsConfig
from scheduler.rollmux.planner.planner import GroupPlanner


def make_service(
    config: PermitsConfig,
    clock: Clock,
    *,
    state: Path | None,
    journal: Path | None,
    cluster: ClusterConfig | None,
    journal_bytes: int = JOURNAL_BYTES,
) -> PhaseService:
    """Raises ConfigError if the state file belongs to another kind of control."""
    if cluster is None:
        return PhaseService(
            config, clock, state=state, journal=journal, journal_bytes=journal_bytes
        )
    return PlanningService(
        config, cluster, clock, state=state, journal=journal, journal_bytes=journal_bytes
    )


def compile_for(cluster: ClusterConfig | None) -> None:
    """Compiles a planner's forecasts before the first call: tens of seconds on a new machine.

    A client of a present but silent control gives its permit up in the end; a client of an absent
    control goes on.
    """
    if cluster is None:
        return
    planner = GroupPlanner(cluster.judge, cluster.types, cluster.planner)
    for name in ("first", "second"):
        phases = tuple(PhaseSpec(kind=kind, max_s=100.0, mean_s=80.0) for kind in KINDS)
        job = JobSpec(job=JobId(name), phases=phases, slo=100.0, host_bytes=0)
        planner.place_job(job, now=0.0)
    planner.review(now=0.0)
