"""Jobs for tests of groups: phases of known lengths and no doubt about them."""

from scheduler.rollmux.beliefs.durations import Belief
from scheduler.rollmux.forecast.forecast import Occupant, Roster
from scheduler.rollmux.forecast.scenarios import Horizon, slowdowns
from scheduler.rollmux.forecast.stages import Rules

EXACT = Horizon(scenarios=1, warm_up=3.0, cycles=20.0)


def occupant(
    rollout_s: float,
    training_s: float,
    *,
    slo: float = 2.0,
    rollout: int = 1,
    training: int = 2,
    bulk: float = 1.0,
    divisible: bool = True,
) -> Occupant:
    belief = Belief(rollout_s, 0.0, 0.0, training_s, 0.0, 0.0)
    return Occupant(rollout, training, slo, belief, bulk, 0.25, divisible)


def exact_slowdowns(occupants: list[Occupant], rules: Rules) -> list[float]:
    roster = Roster.of(occupants)
    return list(slowdowns(roster.jobs, roster.beliefs, EXACT, rules)[0])
