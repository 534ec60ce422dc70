"""One job in the cluster: where its state is resident, and where it goes next."""

from enum import StrEnum

import msgspec

from harvester.contracts.ids import GroupId, JobId
from scheduler.model import Placement
from scheduler.rollmux.cluster.submission import Submission
from scheduler.rollmux.planner.events import JobArrived


class StayStage(StrEnum):
    QUEUED = "queued"
    """No place was found yet."""
    PLACED = "placed"
    MOVING = "moving"
    """Placed, and asked to go elsewhere at its iteration's end."""
    BETWEEN = "between"
    """Has left its old nodes; its new ones have no room yet."""


class Stay(msgspec.Struct, kw_only=True):
    """Nodes by the planner's names."""

    submission: Submission
    number: int
    """In the order of arrival."""
    submitted_s: float
    placed_s: float | None = None
    group: GroupId | None = None
    at: Placement | None = None
    to: Placement | None = None
    to_group: GroupId | None = None
    told: bool = False
    """That it moves: the next time that it asks for its first phase, it has left."""
    changed: bool = False
    """Its nodes are others than its process was told: it hears of them before its next phase."""
    arrived_s: float | None = None
    """When it came to other nodes, until it asks for a phase there."""
    started: bool = False
    """It had a permit: before that nothing of it is anywhere."""
    reason: str = ""
    """Why it is there, why it goes there, or why it waits."""
    iterations: int = 0
    moves: int = 0

    @property
    def job(self) -> JobId:
        return self.submission.job

    @property
    def arrival(self) -> JobArrived:
        """What the planner is told of it."""
        return msgspec.structs.replace(self.submission.arrival, submitted_s=self.submitted_s)

    @property
    def stage(self) -> StayStage:
        if self.at is not None:
            return StayStage.PLACED if self.to is None else StayStage.MOVING
        return StayStage.QUEUED if self.to is None else StayStage.BETWEEN

    def arrive(self) -> None:
        """It is now where it was to go."""
        self.at, self.group = self.to, self.to_group
        self.to = self.to_group = None
        self.told = False
