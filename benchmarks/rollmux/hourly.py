"""Hourly regrouping: the baseline under drift, which regroups everything every hour.

It knows every job's true means of that moment, but not their future drift. Groups that break an
SLO are taken apart at once, and every saving is taken, however small, until none is left; a job
that changes nodes pays the usual price of a move. Between two hours nothing moves.
"""

from dataclasses import replace

from benchmarks.rollmux.variants import means_at
from harvester.contracts.ids import JobId
from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.cluster.config import ClusterConfig
from scheduler.rollmux.planner.group_effects import AssignNodes
from scheduler.rollmux.planner.planner import GroupPlanner
from scheduler.rollmux.planner.relocation import MovePrices
from scheduler.sim.rollmux.workload import PHASE_CV, SimulatedJob

HOUR_S = 3600.0
_ROUNDS = 40


class HourlyPlanner(GroupPlanner):
    def __init__(self, config: ClusterConfig, jobs: list[SimulatedJob]) -> None:
        prices = MovePrices(least_saving_per_move=0.01, quiet_s=0.0)
        super().__init__(config.judge, config.types, replace(config.planner, prices=prices))
        self._truth: dict[JobId, SimulatedJob] = {one.job.job: one for one in jobs}
        self._due_s = 0.0

    def review(self, *, now: float) -> tuple[AssignNodes, ...]:
        self.packer.now_s, self.packer.load_s = now, self.relocation.move_s
        if now < self._due_s:
            return ()
        self._due_s = now + HOUR_S
        for job, facts in self.facts.items():
            rollout_s, training_s = means_at(self._truth[job], facts.training.count)
            facts.believe(Belief(rollout_s, 0.0, PHASE_CV, training_s, 0.0, PHASE_CV))
        effects: list[AssignNodes] = []
        for group in list(self.table.groups.values()):
            effects += self._restore(group, now=now)
        for _ in range(_ROUNDS):
            moves = self.regroup.improve(now=now)
            effects += self._announce(moves, "hourly regrouping", now=now)
            if not moves and not self.regroup.unseen(now=now):
                break
        return tuple(effects)
