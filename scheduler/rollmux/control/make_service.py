"""Chooses a control's service: one that plans every job's nodes, or one that is given them."""

from harvester.contracts.clock import Clock
from harvester.contracts.ids import JobId
from scheduler.model import JobSpec, PhaseSpec
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.job_limits import KINDS
from scheduler.rollmux.control.control_settings import ControlSettings
from scheduler.rollmux.control.phase_service import PhaseService
from scheduler.rollmux.control.planning import PlanningService
from scheduler.rollmux.planner.planner import GroupPlanner


def make_service(settings: ControlSettings, clock: Clock) -> PhaseService:
    """Raises ConfigError if the state file belongs to another kind of control."""
    kind = PhaseService if settings.cluster is None else PlanningService
    return kind(settings, clock)


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
