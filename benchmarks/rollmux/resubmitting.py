"""The paper's answer to a failed node: its jobs stop, and each arrives again."""

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId, NodeId
from scheduler.rollmux.planner.group_effects import AssignNodes
from scheduler.rollmux.planner.packing import Opening
from scheduler.rollmux.planner.planner import GroupPlanner


class ResubmittingPlanner(GroupPlanner):
    def fail_node(self, node: NodeId, *, now: float) -> tuple[AssignNodes, ...]:
        """Every job on the node gives up all nodes and arrives again."""
        self.packer.now_s, self.packer.load_s = now, self.relocation.move_s
        if node not in self.table.nodes:
            return ()
        pinned, torn = self.table.on_node(node), self.table.leaving_node(node)
        for job in torn:
            self._leave_torn(job)
        for job in pinned:
            self.packer.leave(job)
        for job in pinned:
            self.packer.take(self._anywhere(job))
        return self._begin_again(pinned, torn, f"node {node} failed; arrives again")

    def _anywhere(self, job: JobId) -> Opening:
        """Opening for a job that has run already; without free nodes, new ones that it awaits."""
        try:
            return self.choose(job)
        except Exhausted:
            return self.packer.isolated(job)
