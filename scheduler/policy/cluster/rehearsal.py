"""Two jobs that nobody runs: one decision of every kind, so that all that it needs is compiled."""

from collections import Counter

from harvester.contracts.ids import JobId
from scheduler.policy.cluster.config import ClusterConfig
from scheduler.policy.cluster.submission import KINDS, DeclaredPhase, Submission
from scheduler.policy.cluster.supply import SuppliedPlanner
from scheduler.policy.model import Pool


def rehearse(config: ClusterConfig) -> None:
    planner = SuppliedPlanner(config)
    for name in ("first", "second"):
        phases = tuple(DeclaredPhase(kind=kind, max_s=100.0, mean_s=80.0) for kind in KINDS)
        job = Submission(job=JobId(name), phases=phases, slo=100.0, host_bytes=0)
        planner.admit(job, Counter(dict.fromkeys(Pool, 2)), now=0.0)
    planner.review(Counter(), now=0.0)
