"""The harvest arm: our planner as it is, its groups' rollouts on leased slots beside their nodes.

The planner is told nothing of leases, so it admits, moves and repairs as without them. What they
give it is time: phases that end sooner, jobs that leave sooner, nodes that go down sooner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

import numpy as np

from harvester.contracts.ids import GroupId
from scheduler.policy.groups.compiled import Records
from scheduler.policy.groups.judge import OUR_RULES
from scheduler.policy.groups.leased_execution import advance_leased
from scheduler.policy.groups.leases import POOL, LeaseTerms, kv_kept_s
from scheduler.policy.groups.slo import ChanceConstraint
from scheduler.policy.groups.stages import Rules
from scheduler.policy.model import Pool
from scheduler.sim.rollmux.baselines import our_planner
from scheduler.sim.rollmux.cluster import Cluster
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
from scheduler.sim.rollmux.floor import Floor
from scheduler.sim.rollmux.ledger import Ledger, RunResult
from scheduler.sim.rollmux.workload import NODE_TYPES, SimulatedJob

SLOTS_RATIO: Final = 0.5
"""Serving accelerators beside a group, by its rollout accelerators."""
ACTIVATION_S: Final = 5.0
SYNC_S: Final = 20.0
RECOMPUTED_S: Final = 3.0
"""W1's migration; RollPacker reports at most this for moving by recomputing."""
TAIL_TOKENS: Final = 51 * 12_100
"""Open at a tail's beginning: a fifth of 256 responses, at RollMux's mean of the longest."""
KV_BYTES_PER_TOKEN: Final = 147_456
"""Of an 8B model in bf16: 36 layers, 8 KV heads of 128."""
LINK_BYTES_PER_S: Final = 25e9
"""ROSE's 200 Gb/s between clusters."""
_ACCELERATORS: Final = NODE_TYPES[Pool.ROLLOUT].accelerators
W1_TERMS: Final = LeaseTerms(
    activation_s=ACTIVATION_S,
    sync_s=SYNC_S,
    kept_s=kv_kept_s(
        TAIL_TOKENS, bytes_per_token=KV_BYTES_PER_TOKEN, link_bytes_per_s=LINK_BYTES_PER_S
    ),
    recomputed_s=RECOMPUTED_S,
    accelerators=_ACCELERATORS,
    quantile=ChanceConstraint(risk=0.1).quantile,
)
NEVER: Final[tuple[float, ...]] = ()
ALWAYS: Final = (0.0,)
"""Revoked before anything began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSupply:
    """What serving lends to every group."""

    given_s: Records
    """Accelerator seconds that a slot gave by the end of each second."""
    turns_s: tuple[float, ...] = NEVER
    """When all leases are revoked and, in turn, given back."""
    slots_ratio: float = SLOTS_RATIO
    terms: LeaseTerms = W1_TERMS
    seed: int = 0

    def pool(self, group: GroupId) -> Records:
        """The group's own slots, at a place of the record that is its own."""
        rng = np.random.Generator(np.random.PCG64([self.seed, crc32(group.encode())]))
        pool = np.zeros(1, dtype=POOL)
        pool["slots_per_node"] = self.slots_ratio * self.terms.accelerators
        pool["offset_s"] = 3600.0 + rng.uniform(0.0, len(self.given_s) - 1)
        return pool


@dataclass(slots=True, kw_only=True)
class LeasedFloor(Floor):
    supply: LeaseSupply
    pool: Records
    turns_s: Records = field(init=False)

    def __post_init__(self) -> None:
        self.turns_s = np.array(self.supply.turns_s, dtype=np.float64)

    def _run(self, until_s: float, log: Records) -> tuple[float, int, int]:
        return advance_leased(
            self.jobs,
            self.nodes,
            self.permits,
            self.lengths_s,
            self.rules,
            self.pool,
            self.supply.given_s,
            self.turns_s,
            self.supply.terms,
            self.now_s,
            until_s,
            log,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HarvestResult:
    run: RunResult
    slot_hours: float
    """Leased, activation and waiting for weights included."""
    given_node_hours: float
    """Work that leased slots did, in hours of a rollout node."""

    def dollars(self, *, slot_price_per_hour: float) -> float:
        return self.run.dollars + self.slot_hours * slot_price_per_hour


def run_harvest(
    jobs: list[SimulatedJob],
    supply: LeaseSupply,
    *,
    disruptions: Disruptions = UNDISTURBED,
    record: bool = False,
) -> HarvestResult:
    pools: list[Records] = []

    def floor_of(group: GroupId, rules: Rules, lengths_s: Records, now_s: float) -> Floor:
        pool = supply.pool(group)
        pools.append(pool)
        return LeasedFloor(rules, lengths_s, now_s=now_s, supply=supply, pool=pool)

    planner, rules = our_planner(), OUR_RULES
    run = Cluster(
        jobs,
        planner,
        rules,
        disruptions=disruptions,
        ledger=Ledger(record=record),
        floor_of=floor_of,
    ).run()
    return HarvestResult(
        run=run,
        slot_hours=_total(pools, "leased_slot_s") / 3600,
        given_node_hours=_total(pools, "given_node_s") / 3600,
    )


def _total(pools: Sequence[Records], name: str) -> float:
    return float(sum(pool[name][0] for pool in pools))
