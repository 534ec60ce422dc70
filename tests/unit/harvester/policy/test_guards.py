"""Counts of the guards, over production whose requests are all alike."""

import pytest

from harvester.policy.guards import GuardMemory, Guards
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
