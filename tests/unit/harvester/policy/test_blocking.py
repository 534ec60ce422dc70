"""How much of a guest step production was seen to wait for."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.page import Guest
from harvester.policy.blocking import Blocking

ALONE_S, STEP_S = 0.010, 0.020


def seen(share: float, times: int) -> list[float]:
    return [ALONE_S + share * STEP_S] * times


def observed(*itl_s: float) -> Blocking:
    blocking = Blocking()
    blocking.observe(itl_s, alone_s=ALONE_S, guest_step_s=STEP_S)
    return blocking


def test_few_tokens_say_nothing() -> None:
    assert observed(*seen(1.0, 199)).ratio is None
    assert observed(*seen(1.0, 200)).ratio == 1.0


def test_the_largest_shares_count_and_one_odd_token_does_not() -> None:
    assert observed(*seen(0.0, 900), *seen(0.42, 100)).ratio == pytest.approx(0.45)
    assert observed(*seen(0.0, 999), *seen(1.0, 1)).ratio == pytest.approx(0.05)


def test_without_a_guest_step_or_a_model_there_is_nothing_to_divide() -> None:
    blocking = Blocking()
    blocking.observe(seen(1.0, 500), alone_s=ALONE_S, guest_step_s=0.0)
    blocking.observe(seen(1.0, 500), alone_s=0.0, guest_step_s=STEP_S)
    assert blocking.ratio is None


def test_older_tokens_fade() -> None:
    blocking = observed(*seen(1.0, 2000))
    for _ in range(20):
        blocking.observe(seen(0.0, 1000), alone_s=ALONE_S, guest_step_s=STEP_S)
    assert blocking.ratio == pytest.approx(0.05)
    assert sum(blocking.counts) <= 2000.001


@given(st.lists(st.floats(0, 10), min_size=200, max_size=400))
def test_it_is_a_share_whatever_was_seen(itl_s: list[float]) -> None:
    ratio = observed(*itl_s).ratio
    assert ratio is not None
    assert 0 < ratio <= 1


def test_the_slot_counts_tokens_beside_a_stepping_guest_alone(make_scene: Any) -> None:
    scene = make_scene()
    scene.guest = Guest(last_step_s=0.02, steps_finished=1)
    scene.beat()
    for _ in range(60):
        scene.guest = msgspec.structs.replace(
            scene.guest, steps_finished=scene.guest.steps_finished + 1
        )
        scene.latencies(itl=(0.0135,) * 8)
        scene.beat()
    found = scene.policy.blocking.ratio
    assert found == pytest.approx(0.5)
    restored = type(scene.policy)(scene.settings)
    restored.restore(scene.policy.snapshot())
    assert restored.blocking.ratio == found
