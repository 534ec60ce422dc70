"""Which nodes a planning control has, and what it assumes of starts and moves."""

import msgspec

from harvester.contracts.ids import NodeId
from scheduler.model import Pool
from scheduler.rollmux.beliefs.slo import ChanceConstraint
from scheduler.rollmux.forecast.judge import OUR_RULES, Distributional
from scheduler.rollmux.forecast.stages import Rules
from scheduler.rollmux.planner.book import NodeType
from scheduler.rollmux.planner.planner import PlannerConfig
from scheduler.rollmux.planner.relocation import MovePrices


class PoolNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one pool; all are of one type."""

    type: NodeType
    names: tuple[NodeId, ...]


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    rollout: PoolNodes
    training: PoolNodes
    risk: float = 0.25
    """Accepted probability that a forecast slow-down exceeds its SLO."""
    cold_start_s: float = 135.0
    """A job's first load from storage; alone it would take that too."""
    warm_start_s: float = 5.0
    """A phase's start after another job's, from host memory; nothing is loaded ahead."""
    move_s: float = 300.0
    """What a job loses by a move to other nodes."""
    migrate_s: float = 3.0
    """What moving a tail to a part of its accelerators costs the job, and the one that waits."""
    slo_counts_queueing: bool = False
    """An SLO counts from the placement on; true: from the submission on."""
    tail_ratio: float | None = None
    """Completed share from which every rollout's tail may leave, as RollMux has it with 0.8; None:
    learned for each job."""
    review_s: float = 60.0
    """Between two looks at promises and savings."""
    gone_s: float = 900.0
    """A placed job of which nothing was heard for so long has left."""
    harvesting: bool = False
    """Jobs that ask for it may use leases of serving nodes in their rollouts."""

    @property
    def pools(self) -> dict[Pool, PoolNodes]:
        return {Pool.ROLLOUT: self.rollout, Pool.TRAINING: self.training}

    @property
    def types(self) -> dict[Pool, NodeType]:
        return {pool: nodes.type for pool, nodes in self.pools.items()}

    @property
    def rules(self) -> Rules:
        """What forecasts assume of permits."""
        return OUR_RULES._replace(warm_s=self.warm_start_s, migrate_s=self.migrate_s)

    @property
    def judge(self) -> Distributional:
        return Distributional(rules=self.rules, constraint=ChanceConstraint(risk=self.risk))

    @property
    def planner(self) -> PlannerConfig:
        return PlannerConfig(
            cold_start_s=self.cold_start_s,
            prices=MovePrices(move_s=self.move_s),
            accelerators=self.rollout.type.accelerators,
            slo_counts_queueing=self.slo_counts_queueing,
        )
