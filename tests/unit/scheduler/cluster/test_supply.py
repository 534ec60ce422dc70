"""A cluster without free nodes: an arrival finds the one group that can take it."""

from collections import Counter

import pytest

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId
from scheduler.policy.cluster.supply import SuppliedPlanner
from scheduler.policy.groups.events import PlaceJob
from scheduler.policy.model import PhaseKind, Pool
from tests.unit.scheduler.cluster.submitted import cluster, submission


def _full(groups: int, *, shares: int) -> SuppliedPlanner:
    """A planner with one job on each pair of nodes, of which the job `shares` alone is patient."""
    words = [" ".join(f"{side}{at}" for at in range(groups)) for side in "rt"]
    planner = SuppliedPlanner(cluster(*words))
    for at in range(groups):
        supply = Counter({Pool.ROLLOUT: groups - at, Pool.TRAINING: groups - at})
        slo = 4.0 if at == shares else 1.0
        planner.admit(submission(f"j{at}", slo=slo), supply, now=float(at))
    return planner


@pytest.mark.parametrize("shares", [0, 63, 64, 149])
def test_the_one_group_that_admits_a_job_is_found_wherever_it_stands(shares: int) -> None:
    planner = _full(150, shares=shares)
    effects = planner.admit(submission("late", slo=4.0), Counter(), now=150.0)
    (placed,) = [one for one in effects if isinstance(one, PlaceJob)]
    assert set(planner.book.cells[placed.group].pinned) == {f"j{shares}", "late"}


def test_a_refusal_says_how_many_groups_were_asked() -> None:
    planner = _full(70, shares=-1)
    with pytest.raises(Exhausted, match="none of the 70 groups admits it"):
        planner.admit(submission("late", slo=4.0), Counter(), now=70.0)
    assert JobId("late") not in planner.facts


def test_a_group_is_asked_again_once_its_jobs_are_known_to_leave_room() -> None:
    planner = SuppliedPlanner(cluster("r0", "t0"))
    supply = Counter({Pool.ROLLOUT: 1, Pool.TRAINING: 1})
    planner.admit(submission("a", 2.0, 40.0, slo=1.05), supply, now=0.0)
    late = submission("late", 2.0, 40.0, slo=1.4)

    def forecasts_made() -> int:
        counted = planner.packer.simulated
        with pytest.raises(Exhausted):
            planner.admit(late, Counter(), now=1.0)
        return planner.packer.simulated - counted

    before = forecasts_made()
    for _ in range(100):
        planner.facts[JobId("a")].observe(PhaseKind.ROLLOUT, 20.0)
        planner.facts[JobId("a")].observe(PhaseKind.TRAINING, 4.0)
    assert forecasts_made() > before
