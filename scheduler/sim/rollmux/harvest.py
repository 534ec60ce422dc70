"""The harvest arm: our planner as it is, its groups' rollouts on leased slots beside their nodes.

Leases give it time: phases end sooner, jobs leave sooner, nodes go down sooner. No admission, move
or SLO rests on them.
"""

from dataclasses import dataclass

from scheduler.sim.rollmux.arms import runtime_of
from scheduler.sim.rollmux.disruptions import UNDISTURBED, Disruptions
from scheduler.sim.rollmux.lease_supply import LeaseSupply
from scheduler.sim.rollmux.leased_driver import LeasedDriver
from scheduler.sim.rollmux.ledger import Ledger, RunResult
from scheduler.sim.rollmux.workload import SimulatedJob


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
    driver = LeasedDriver(
        jobs,
        runtime_of("ours", jobs, seed=0, harvesting=True),
        supply,
        disruptions=disruptions,
        ledger=Ledger(record=record),
    )
    return HarvestResult(
        run=driver.run(),
        slot_hours=driver.slot_s / 3600,
        given_node_hours=driver.given_node_s / 3600,
    )
