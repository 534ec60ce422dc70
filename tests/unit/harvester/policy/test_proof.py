import random

from harvester.policy.proof import ProofSlices
from harvester.policy.settings import ProofSettings


def run(proof: ProofSlices, *, granted_s: float, alone_s: float, slices: int, seed: int = 1):
    """Ten samples per slice around the given mean, with a spread between slices too."""
    rng = random.Random(seed)
    for number in range(slices):
        start_s = 1000.0 + number * 2.0
        mean_s = alone_s if proof.withheld(now=start_s) else granted_s
        mean_s *= rng.uniform(0.7, 1.3)
        for beat in range(10):
            latencies = (mean_s * rng.uniform(0.5, 1.5),)
            proof.observe(latencies_s=latencies, eligible=True, now=start_s + 1.0 + beat * 0.09)


def test_withholds_the_configured_share_by_seed_and_time_alone() -> None:
    one, same = ProofSlices(ProofSettings(seed=5)), ProofSlices(ProofSettings(seed=5))
    other = ProofSlices(ProofSettings(seed=6))
    times = [number * 2.0 for number in range(20_000)]
    drawn = [one.withheld(now=now) for now in times]
    assert drawn == [same.withheld(now=now) for now in times]
    assert drawn != [other.withheld(now=now) for now in times]
    assert 0.045 < sum(drawn) / len(drawn) < 0.055


def test_its_interval_covers_a_known_impact_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(40):
        proof = ProofSlices(ProofSettings(share_ratio=0.3, seed=seed, limit_ratio=10.0))
        run(proof, granted_s=0.012, alone_s=0.010, slices=400, seed=seed)
        impact = proof.impact()
        assert impact is not None
        covered += impact.low <= 0.2 <= impact.high
    assert covered >= 34


def test_stops_harvesting_that_surely_harms() -> None:
    proof = ProofSlices(ProofSettings(share_ratio=0.3, limit_ratio=0.1))
    run(proof, granted_s=0.02, alone_s=0.01, slices=400)
    assert proof.harmful


def test_goes_on_when_there_is_no_harm() -> None:
    proof = ProofSlices(ProofSettings(share_ratio=0.3, limit_ratio=0.1))
    run(proof, granted_s=0.01, alone_s=0.01, slices=1000)
    assert not proof.harmful


def test_says_nothing_before_it_has_enough_slices() -> None:
    proof = ProofSlices(ProofSettings(share_ratio=0.3, minimum_slices=50))
    run(proof, granted_s=0.05, alone_s=0.01, slices=60)
    assert proof.impact() is None
    assert not proof.harmful


def test_leaves_out_a_latency_that_began_before_its_slice() -> None:
    proof = ProofSlices(ProofSettings(share_ratio=0.3, minimum_slices=2, limit_ratio=100))
    for number in range(400):
        start_s = number * 2.0
        proof.observe(latencies_s=(0.01,), eligible=True, now=start_s + 1.0)
        if not proof.withheld(now=start_s):
            proof.observe(latencies_s=(1.9,), eligible=True, now=start_s + 1.5)
    impact = proof.impact()
    assert impact is not None
    assert abs(impact.ratio) < 1e-9


def test_counts_no_slice_in_which_the_gate_was_shut_for_another_reason() -> None:
    proof = ProofSlices(ProofSettings(share_ratio=0.3, minimum_slices=2))
    for number in range(400):
        proof.observe(latencies_s=(0.01,), eligible=number % 2 == 0, now=number * 1.0)
    assert proof.impact() is None


def test_remembers_a_bounded_number_of_slices() -> None:
    settings = ProofSettings(share_ratio=0.3, window_slices=100, limit_ratio=100, minimum_slices=5)
    proof = ProofSlices(settings)
    run(proof, granted_s=0.05, alone_s=0.01, slices=300)
    for number in range(1000, 1400):
        start_s = 1000.0 + number * 2.0
        proof.observe(latencies_s=(0.01,), eligible=True, now=start_s + 1.0)
    impact = proof.impact()
    assert impact is not None
    assert impact.slices_granted + impact.slices_withheld == 100
    assert abs(impact.ratio) < 1e-6
