"""How much of a guest step the agent takes production to wait for."""

import math
from typing import Any

import msgspec
import pytest

from harvester.contracts.page import Guest
from harvester.policy.sample import MpsReading
from harvester.policy.settings import SlotSettings

ISOLATED = Guest(isolation="idle-group", blocking_ratio=0.02)
FALLEN = Guest(isolation="idle-group", isolation_fault="production moved")


@pytest.fixture
def ratio(make_scene: Any, grant_in: Any) -> Any:
    def ratio(guest: Guest | None, **settings: Any) -> float:
        scene = make_scene(**settings)
        scene.guest = guest
        return float(grant_in(scene.beat()).blocking_ratio)

    return ratio


def test_a_step_counts_as_the_guest_s_isolation_promises_by_default(ratio: Any) -> None:
    assert ratio(ISOLATED) == 0.02
    assert ratio(Guest()) == 1.0, "an older guest promises nothing"
    assert ratio(Guest(isolation="time-slicing")) == 1.0
    assert ratio(None) == 1.0


@pytest.mark.parametrize("configured", ["auto", 0.3])
def test_an_isolation_that_does_not_hold_makes_a_step_count_whole(
    configured: float | str, ratio: Any
) -> None:
    assert ratio(FALLEN, blocking_ratio=configured) == 1.0


@pytest.mark.parametrize(
    ("isolation", "configured", "expected_s"),
    [
        ("idle-group", "auto", 1e-4),
        ("idle", "auto", 5e-4),
        ("mps", "auto", 5e-4),
        ("mps", 2e-3, 2e-3),
    ],
)
def test_the_cost_of_a_preemption_is_that_of_the_isolation(
    make_scene: Any, grant_in: Any, isolation: str, configured: float | str, expected_s: float
) -> None:
    scene = make_scene(preemption_s=configured)
    scene.guest = Guest(isolation=isolation, blocking_ratio=0.02)
    assert grant_in(scene.beat()).preemption_s == expected_s


def test_a_number_of_the_operator_s_stands_where_nothing_has_fallen(ratio: Any) -> None:
    assert ratio(ISOLATED, blocking_ratio=0.3) == 0.3
    assert ratio(Guest(), blocking_ratio=0.3) == 0.3, "who says nothing may be isolated by others"


def test_no_number_lowers_it_for_a_guest_that_says_it_has_no_isolation(
    make_scene: Any, grant_in: Any
) -> None:
    scene = make_scene(blocking_ratio=0.02)
    scene.guest = Guest(isolation="none")
    assert grant_in(scene.beats_for(1.0)).blocking_ratio == 1.0
    scene.guest = None
    assert grant_in(scene.beats_for(30.0)).blocking_ratio == 1.0, "nor once it is gone"


@pytest.mark.parametrize("promised", [math.nan, 0.0, -1.0, 1.5, math.inf])
def test_an_invalid_ratio_promises_nothing(promised: float, ratio: Any) -> None:
    assert ratio(Guest(isolation="idle", blocking_ratio=promised)) == 1.0


def test_under_mps_only_a_measurement_lowers_it(make_scene: Any, grant_in: Any) -> None:
    scene = make_scene()
    scene.guest = msgspec.structs.replace(ISOLATED, isolation="mps", blocking_ratio=1.0)
    scene.mps = MpsReading(clients=((7, 41),))
    assert grant_in(scene.beat()).blocking_ratio == 1.0


def test_a_starved_guest_keeps_its_promise_and_a_lost_one_does_not(
    make_scene: Any, grant_in: Any
) -> None:
    scene = make_scene()
    scene.guest = ISOLATED
    scene.beats_for(1.0)
    scene.guest, scene.guest_runs_below_production = None, True
    assert grant_in(scene.beats_for(30.0)).blocking_ratio == 0.02
    scene.guest_runs_below_production = False
    assert grant_in(scene.beat()).blocking_ratio == 1.0


@pytest.mark.parametrize("wrong", [0, -0.1, 1.1, math.nan, "idle"])
def test_a_ratio_that_is_neither_auto_nor_a_share_is_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        SlotSettings(blocking_ratio=wrong)
