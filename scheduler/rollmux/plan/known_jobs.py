"""The production planner, with jobs that are known beforehand and moves that cost nothing.

No job runs yet: a placed job may move for free, so savings are searched for until none is
left.
"""

from dataclasses import replace
from typing import Final

from harvester.contracts.ids import JobId
from scheduler.model import Pool
from scheduler.rollmux.plan.jobs_file import PlannedJobSettings, PlanSettings
from scheduler.rollmux.planner.group_effects import AssignNodes
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.rollmux.planner.relocation import MovePrices

FREE_MOVES: Final = MovePrices(
    move_s=0.0, least_saving_per_move=0.01, quiet_s=0.0, surprise_iterations=0.0
)
_SEARCHES_MAX: Final = 40


class KnownJobsPlanner(GroupPlanner):
    def __init__(self, settings: PlanSettings) -> None:
        control = settings.as_control
        config = replace(control.planner, prices=FREE_MOVES)
        super().__init__(control.judge, control.types, config, settings.supply)
        self.rules = control.rules
        """Assumptions of its forecasts about permits."""
        self.reasons: dict[JobId, str] = {}

    def place(self, job: PlannedJobSettings) -> None:
        """Places a job. Raises Exhausted if the supply of nodes does not suffice."""
        for effect in self.place_job(job.spec, now=0.0):
            if isinstance(effect, AssignNodes):
                self.reasons[effect.placement.job] = effect.reason

    def spare_nodes(self) -> None:
        """Searches for moves that spare nodes, until none is found."""
        # No job is resident anywhere yet, so only the nodes used afterwards count.
        there, self.table.supply = self.table.supply, {}
        for _ in range(_SEARCHES_MAX):
            moves = self.regroup.improve(now=0.0)
            if moves and any(self._used(pool) > count for pool, count in there.items()):
                self.relocation.take_back(moves)
                break
            for move in moves:
                self.reasons[move.job] = "hosted together these jobs need fewer nodes"
                self.complete_move(move.job, now=0.0)
            if not moves and not self.regroup.unseen(now=0.0):
                break
        self.table.supply = there

    def _used(self, pool: Pool) -> int:
        """Number of nodes in use once every job has moved."""
        sides = (
            {node for one in group.pinned.values() for node in dict(one.by_pool)[pool]}
            for group in self.table.groups.values()
        )
        return sum(map(len, sides))
