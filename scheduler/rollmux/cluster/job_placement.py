"""One job in the cluster: its resident state, and its next placement."""

from enum import StrEnum
from typing import Final

import msgspec

from harvester.contracts.ids import GroupId, JobId
from scheduler.model import JobSpec, Placement

FIRST_LOADS: Final = 2
"""A rollout's and a training's."""


class PlacementStage(StrEnum):
    QUEUED = "queued"
    """Waits for a placement."""
    PLACED = "placed"
    MOVING = "moving"
    """Placed, and asked to go elsewhere at its iteration's end."""
    BETWEEN = "between"
    """Has left its old nodes; its new ones have no room yet."""


class JobPlacement(msgspec.Struct, kw_only=True):
    """Nodes by the planner's names."""

    spec: JobSpec
    number: int
    """Number in the order of arrival."""
    submitted_s: float
    placed_s: float | None = None
    group: GroupId | None = None
    at: Placement | None = None
    to: Placement | None = None
    to_group: GroupId | None = None
    notified: bool = False
    """The job was notified of its move: it has left when it next requests its first phase."""
    changed: bool = False
    """The job's process does not know its new nodes yet; it is notified before its next phase."""
    arrived_s: float | None = None
    """Time of its arrival on other nodes, until it requests a phase there."""
    moving_s: float | None = None
    """Duration of its last move so far, until each of its phases has run once on the new nodes."""
    loads: int = FIRST_LOADS
    """Phases to come that load their state from afar, after an arrival or a loss."""
    started: bool = False
    """Whether it ever had a permit: before that it has no state anywhere."""
    reason: str = ""
    """Reason for the present placement, the move or the wait."""
    iterations: int = 0
    moves: int = 0
    holder: str = ""
    """Process that submitted it last. A job that only an operator submitted stays in the queue."""

    @property
    def job(self) -> JobId:
        return self.spec.job

    @property
    def stage(self) -> PlacementStage:
        if self.at is not None:
            return PlacementStage.PLACED if self.to is None else PlacementStage.MOVING
        return PlacementStage.QUEUED if self.to is None else PlacementStage.BETWEEN

    def arrive(self) -> None:
        """Completes its move."""
        self.at, self.group = self.to, self.to_group
        self.to = self.to_group = None
        self.notified = False
        self.lose_loaded()

    def lose_loaded(self) -> None:
        self.loads, self.moving_s = FIRST_LOADS, None
