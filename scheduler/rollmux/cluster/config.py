"""Settings of a planning control: its nodes, and its assumptions about starts and moves."""

import msgspec

from harvester.contracts.ids import NodeId
from scheduler.model import Pool
from scheduler.rollmux.forecast.judge import OUR_RULES, Judge
from scheduler.rollmux.forecast.stages import Rules
from scheduler.rollmux.planner.group_table import NodeType
from scheduler.rollmux.planner.planner import PlannerConfig
from scheduler.rollmux.planner.relocation import MovePrices


class PoolNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one pool; all are of one type."""

    type: NodeType
    names: tuple[NodeId, ...]


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`ClusterSettings` of a nodes file documents every field, and takes its default from here."""

    rollout: PoolNodes
    training: PoolNodes
    risk: float = 0.25
    cold_start_s: float = 135.0
    warm_start_s: float = 5.0
    move_s: float = 300.0
    migrate_s: float = 3.0
    slo_counts_queueing: bool = False
    tail_ratio: float | None = None
    review_s: float = 60.0
    gone_s: float = 900.0
    harvesting: bool = False

    @property
    def pools(self) -> dict[Pool, PoolNodes]:
        return {Pool.ROLLOUT: self.rollout, Pool.TRAINING: self.training}

    @property
    def types(self) -> dict[Pool, NodeType]:
        return {pool: nodes.type for pool, nodes in self.pools.items()}

    @property
    def rules(self) -> Rules:
        """Assumptions about permits that forecasts use."""
        return OUR_RULES._replace(warm_s=self.warm_start_s, migrate_s=self.migrate_s)

    @property
    def judge(self) -> Judge:
        return Judge(rules=self.rules, risk=self.risk)

    @property
    def planner(self) -> PlannerConfig:
        return PlannerConfig(
            cold_start_s=self.cold_start_s,
            prices=MovePrices(move_s=self.move_s),
            accelerators=self.rollout.type.accelerators,
            slo_counts_queueing=self.slo_counts_queueing,
        )
