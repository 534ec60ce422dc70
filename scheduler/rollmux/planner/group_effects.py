"""The group planner's answer to the cluster: placements of jobs on nodes."""

from dataclasses import dataclass
from enum import StrEnum

from harvester.contracts.ids import GroupId
from scheduler.model import Placement


class PlacementDecision(StrEnum):
    PLACED = "placed"
    MOVED = "moved"
    """The job moves at the end of its present iteration; it stays resident on its old nodes until
    then.

    It loads on its new nodes as soon as their memory has room: another mover may still be there.
    The last requested placement holds.
    """
    RESTARTED = "restarted"
    """Immediate restart from the last checkpoint, because one of the job's nodes failed.

    The job stays resident on nodes that are both old and new. Replaces a requested move.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignNodes:
    decision: PlacementDecision
    group: GroupId
    placement: Placement
    reason: str
