"""Two fictitious jobs: one decision of every kind, so that all compiled code is compiled early."""

from harvester.contracts.ids import JobId
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.cluster.submission import KINDS, DeclaredPhase, Submission
from scheduler.rollmux.planner.group_events import ReviewDue
from scheduler.rollmux.planner.planner import GroupPlanner


def compile_forecasts(config: ClusterConfig) -> None:
    planner = GroupPlanner(config.judge, config.types, config.planner)
    for name in ("first", "second"):
        phases = tuple(DeclaredPhase(kind=kind, max_s=100.0, mean_s=80.0) for kind in KINDS)
        job = Submission(job=JobId(name), phases=phases, slo=100.0, host_bytes=0)
        planner.observe(job.arrival, now=0.0)
    planner.observe(ReviewDue(), now=0.0)
