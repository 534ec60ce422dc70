"""A plan's records, which are printed, drawn and written as JSON alike. Computes nothing."""

import msgspec

from harvester.contracts.ids import GroupId, JobId, NodeId
from scheduler.model import PhaseKind, Placement, Pool


class SloForecast(msgspec.Struct, frozen=True, kw_only=True):
    """A job's forecast slow-down against its SLO."""

    job: JobId
    slo: float
    mean: float
    bound: float
    """Exceeded with the accepted risk only."""
    risk: float
    """Forecast probability that the slow-down exceeds the SLO."""

    @property
    def slack(self) -> float:
        """Room between the bound and the SLO, as a ratio of the SLO."""
        return (self.slo - self.bound) / self.slo


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A possible placement of a job besides the planned one, with all other jobs as planned."""

    kind: str
    beside: tuple[JobId, ...]
    """Jobs of the group that the job would join; empty for dedicated nodes."""
    change_per_hour: float
    """Change of the whole plan's price."""
    admitted: bool
    reason: str
    """The objection to it; empty if it is admissible."""


class PlannedJob(Placement, frozen=True, kw_only=True):
    reason: str
    sync_s: float = 0.0
    """Believed weight sync after each training; on no node."""
    slo_forecast: SloForecast
    alternatives: tuple[Alternative, ...]


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """A node and the jobs with state in its host memory."""

    node: NodeId
    pool: Pool
    jobs: tuple[JobId, ...]
    used_gb: float
    host_gb: float


class TimelineBar(msgspec.Struct, frozen=True, kw_only=True):
    """One job on one node in the picture of a meta-iteration."""

    node: NodeId
    job: JobId
    phase: PhaseKind
    start_s: float
    end_s: float
    tail: bool
    """Whether it is on a part of the node, beside the next job."""


class GroupLoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a group: above 1, no order serves every job once in its longest iteration."""

    cycle_s: float
    """The longest job's iteration alone."""
    busiest_s: float
    """Work on the busiest node when every job has run once."""
    share: float
    """Work over iteration."""


class PlannedGroup(msgspec.Struct, frozen=True, kw_only=True):
    group: GroupId
    price_per_hour: float
    nodes: tuple[Resident, ...]
    jobs: tuple[PlannedJob, ...]
    bound_by: JobId
    """The job with the least room below its SLO."""
    meta_iteration_s: float
    bars: tuple[TimelineBar, ...]
    load: GroupLoadRow


class Unplaced(msgspec.Struct, frozen=True, kw_only=True):
    job: JobId
    reason: str


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True):
    risk: float
    price_per_hour: float
    dedicated_per_hour: float
    """Price of these jobs on dedicated nodes."""
    nodes: dict[str, int]
    """Number of nodes by type."""
    groups: tuple[PlannedGroup, ...]
    unplaced: tuple[Unplaced, ...] = ()
    slo_counts_queueing: bool = False
