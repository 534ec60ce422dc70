"""A group's run at its believed means: every node whole, and one meta-iteration of it."""

from itertools import pairwise

from scheduler.model import PhaseKind
from scheduler.rollmux.forecast.forecast import Occupant, Roster
from scheduler.rollmux.forecast.stages import Rules
from scheduler.rollmux.forecast.timeline import meta_iteration, timeline_of
from tests.unit.scheduler.rollmux.forecast.stage_jobs import occupant

PLAIN = Rules(migrate=False, warm_s=0.0, migrate_s=0.0)
TAILS = Rules(migrate=True, warm_s=5.0, migrate_s=3.0)


def _apart(*jobs: tuple[float, float], slo: float = 1.5) -> list[Occupant]:
    """Rollout nodes of their own, one node to train on."""
    return [
        occupant(rollout_s, training_s, slo=slo, rollout=1 << at, training=1 << len(jobs))
        for at, (rollout_s, training_s) in enumerate(jobs)
    ]


def test_a_forecast_gives_every_node_to_one_job_at_a_time() -> None:
    members = [occupant(300.0, 100.0, bulk=0.5), occupant(200.0, 250.0, bulk=0.6)]
    stretches = timeline_of(Roster.of(members), rules=TAILS)
    for node in (1, 2):
        whole = [(s.start_s, s.end_s) for s in stretches if s.nodes & node and not s.tail]
        assert len(whole) > 5
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(whole))
    assert any(s.tail for s in stretches)


def test_a_meta_iteration_begins_with_the_longest_job_and_holds_all() -> None:
    members = _apart((800.0, 100.0), (150.0, 100.0))
    found = meta_iteration(Roster.of(members), rules=PLAIN)
    assert found.length_s >= 900.0
    assert found.stretches[0].start_s == 0.0
    assert {(s.job, s.phase) for s in found.stretches} == {
        (job, phase) for job in (0, 1) for phase in (PhaseKind.ROLLOUT, PhaseKind.TRAINING)
    }
