"""Counts of the guards, over production whose requests are all alike."""

import pytest

from harvester.policy.durable import GuardMemory
from harvester.policy.guards import Guards
from harvester.policy.production import Latencies, ProductionView
from harvester.policy.settings import ProofSettings, SlotSettings

_BEAT_S = 0.5
_LATE = ProductionView(
    condition=None,
    ttft=Latencies(seen_s=(0.1, 2.0), total=2),
    itl=Latencies(seen_s=(0.01,), total=1),
    itl_late=Latencies(seen_s=(), total=0),
    decoded=4.0,
)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_withheld_requests_stand_for_the_granted_ones_whatever_share_is_withheld(
    share: float,
) -> None:
    """Half of production's first tokens are late by themselves, for half an hour."""
    proof = ProofSettings(seed=1, share_ratio=share, proving_s=0.0)
    memory = GuardMemory()
    guards = Guards(SlotSettings(ttft_slo_s=1.0, proof=proof), memory)
    for beat in range(3600):
        now = 1000.0 + beat * _BEAT_S
        guards.proof.withheld(now=now)
        guards.account(_LATE, beside_step=lambda _: True, now=now)
        guards.prove(_LATE, eligible=True, leased=True, now=now)
    served = memory.served
    assert served.withheld == pytest.approx(served.granted, rel=0.4)
    assert served.withheld_beats == pytest.approx(served.granted_beats, rel=0.4)
    assert served.withheld_misses == pytest.approx(served.withheld / 2, rel=0.05)


def test_an_overload_of_which_half_was_withheld_hides_no_later_harm_from_the_level() -> None:
    """A fifth of the first tokens of the first half hour were late in slices of both kinds, none in
    the two hours after it; then a guest makes a fifth of them late."""
    proof = ProofSettings(seed=1, proving_share_ratio=0.5)
    guards = Guards(SlotSettings(ttft_slo_s=1.0, proof=proof), GuardMemory())

    def beats(seconds: float, *, late: bool, alone: bool) -> None:
        nonlocal now
        for _ in range(int(seconds / _BEAT_S)):
            now += _BEAT_S
            harmed = late and (alone or not guards.proof.withheld(now=now))
            seen_s = (0.1, 0.1, 0.1, 0.1, 1.5 if harmed else 0.1)
            view = ProductionView(condition=None, ttft=Latencies(seen_s=seen_s, total=50))
            guards.account(view, beside_step=lambda _: not alone, now=now)
            guards.prove(view, eligible=True, leased=True, now=now)

    now = 1000.0
    beats(1800.0, late=True, alone=True)
    beats(2 * 3600.0, late=False, alone=True)
    assert guards.step_level.ratio == 1.0
    beats(30.0, late=True, alone=False)
    assert guards.step_level.ratio < 1.0
