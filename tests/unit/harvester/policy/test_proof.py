import random
from collections.abc import Callable

import pytest

from harvester.policy.proof import Proof
from harvester.policy.settings import ProofSettings

Latency = Callable[[random.Random], float]


def make(settings: ProofSettings | None = None) -> Proof:
    return Proof(settings or ProofSettings(), ttft_slo_s=0.25, itl_slo_s=0.05)


def serve(
    proof: Proof,
    *,
    granted: Latency,
    alone: Latency,
    minutes: float,
    seed: int = 1,
    rate: float = 5,
    begun_s: float = 1000.0,
) -> float | None:
    """Requests by chance, each with its first token later. Returns when harvesting stopped, in
    min."""
    rng, now = random.Random(seed), begun_s
    coming: list[tuple[float, float]] = []
    while now < begun_s + 60.0 * minutes:
        now += 0.1
        withheld = proof.withheld(now=now)
        if rng.random() < rate * 0.1:
            latency_s = (alone if withheld else granted)(rng)
            coming.append((now + latency_s, latency_s))
        told = tuple(latency_s for end_s, latency_s in coming if end_s <= now)
        coming = [each for each in coming if each[0] > now]
        proof.observe(ttft_s=told, itl_s=(), eligible=True, leased=True, now=now)
        if proof.harmful:
            return (now - begun_s) / 60.0
    return None


def lognormal(median_s: float, sigma: float) -> Latency:
    return lambda rng: median_s * rng.lognormvariate(0.0, sigma)


def with_tail(rng: random.Random) -> float:
    """The P99 is doubled, the median is not."""
    return lognormal(0.2, 0.5)(rng) + (1.0 if rng.random() < 0.01 else 0.0)


def test_withholds_the_configured_share_by_seed_and_time_alone() -> None:
    settings = ProofSettings(seed=5, proving_s=0.0)
    one, same = make(settings), make(settings)
    other = make(ProofSettings(seed=6, proving_s=0.0))
    times = [number * 2.0 for number in range(20_000)]
    drawn = [one.withheld(now=now) for now in times]
    assert drawn == [same.withheld(now=now) for now in times]
    assert drawn != [other.withheld(now=now) for now in times]
    assert 0.045 < sum(drawn) / len(drawn) < 0.055


def test_withholds_more_while_little_is_known() -> None:
    proof, settings = make(), ProofSettings()
    serve(proof, granted=lognormal(0.1, 0.3), alone=lognormal(0.1, 0.3), minutes=10)
    assert proof.state.slices[-1].share >= settings.proving_share_ratio
    assert 0 < proof.proving_left_s < settings.proving_s
    proof.state.judged_s = settings.proving_s
    assert proof.proving_left_s == 0
    serve(proof, granted=lognormal(0.1, 0.3), alone=lognormal(0.1, 0.3), minutes=1)
    assert proof.state.slices[-1].share in (settings.share_ratio, 0.5)


@pytest.mark.parametrize("seed", range(3))
def test_finds_a_rise_of_84_percent_soon(seed: int) -> None:
    proof = make(ProofSettings(seed=seed))
    found = serve(
        proof, granted=lognormal(2.2, 0.1), alone=lognormal(1.2, 0.1), minutes=20, seed=seed
    )
    assert found is not None


def test_finds_a_rise_that_begins_after_two_hours() -> None:
    proof, time_s = make(), 0.1

    def beside(rng: random.Random) -> float:
        begun = proof.state.judged_s > 2 * 3600.0
        return lognormal(2 * time_s if begun else time_s, 0.1)(rng)

    found = serve(proof, granted=beside, alone=lognormal(time_s, 0.1), minutes=145)
    assert found is not None
    assert found > 120.0


@pytest.mark.parametrize("share", [0.25, 0.55])
def test_finds_harm_to_requests_that_are_neither_the_median_nor_the_tail(share: float) -> None:
    """The harmed ones stand between a `share` of shorter and the rest of longer ones."""

    def requests(harmed_s: float) -> Latency:
        def latency_s(rng: random.Random) -> float:
            place = rng.random()
            median_s = 0.03 if place < share else harmed_s if place < share + 0.3 else 0.25
            return lognormal(median_s, 0.2)(rng)

        return latency_s

    found = serve(make(), granted=requests(0.15), alone=requests(0.08), minutes=60)
    assert found is not None


def test_finds_a_tail_of_which_the_median_knows_nothing() -> None:
    alone = lognormal(0.2, 0.5)
    found = [
        serve(make(), granted=with_tail, alone=alone, minutes=60, seed=seed) for seed in range(4)
    ]
    assert found.count(None) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_goes_on_when_there_is_no_harm(seed: int) -> None:
    quick = lognormal(0.2, 0.5)
    proof = make(ProofSettings(seed=seed))
    assert serve(proof, granted=quick, alone=quick, minutes=120, seed=seed) is None
    assert proof.evidence < proof.evidence_limit


def test_a_small_rise_within_the_limit_is_no_harm() -> None:
    proof = make(ProofSettings(limit_ratio=0.1))
    granted, alone = lognormal(1.05, 0.05), lognormal(1.0, 0.05)
    assert serve(proof, granted=granted, alone=alone, minutes=120) is None


def test_load_that_changes_from_slice_to_slice_is_no_harm() -> None:
    loads = random.Random(3)

    def loaded(rng: random.Random) -> float:
        # A new load every now and then, for slices of both kinds.
        if loads.random() < 0.02:
            loaded.level = loads.lognormvariate(0.0, 0.7)  # type: ignore[attr-defined]
        return 0.2 * getattr(loaded, "level", 1.0) * rng.lognormvariate(0.0, 0.2)

    assert serve(make(), granted=loaded, alone=loaded, minutes=240) is None


def test_load_that_comes_and_goes_is_seldom_suspected() -> None:
    suspected = []
    for seed in range(8):
        loads, proof = random.Random(seed), make(ProofSettings(proving_s=0.0, seed=seed))
        level = 1.0

        def swinging(rng: random.Random, loads: random.Random = loads) -> float:
            nonlocal level
            level = level**0.995 * loads.lognormvariate(0.0, 0.05)
            return 0.1 * level * rng.lognormvariate(0.0, 0.3)

        for minute in range(120):
            begun_s = 1000.0 + 60.0 * minute
            serve(proof, granted=swinging, alone=swinging, minutes=1, seed=minute, begun_s=begun_s)
            if minute >= 30:
                suspected.append(proof.withheld_share >= 0.5)
    assert sum(suspected) < 0.13 * len(suspected)


def test_a_slice_has_a_length_whenever_it_begins() -> None:
    proof = make(ProofSettings(slice_s=0.1, proving_s=0.0))
    for beat in range(1, 10_000):
        proof.observe(ttft_s=(), itl_s=(), eligible=True, leased=True, now=round(beat * 0.1, 6))
        assert 0.009 < proof.slice_s < 0.111


def test_slices_last_ten_times_the_p99() -> None:
    proof = make()
    serve(proof, granted=lognormal(1.2, 0.1), alone=lognormal(1.2, 0.1), minutes=5)
    assert 14.0 <= proof.state.slices[-1].length_s <= 20.0


def test_a_request_counts_to_the_slice_in_which_it_arrived() -> None:
    """Withheld arrivals take 1 ms, others 1.9 s and end in a later slice: none is mixed up."""
    proof = make(ProofSettings(share_ratio=0.3, limit_ratio=1000.0))
    serve(proof, granted=lambda _rng: 1.9, alone=lambda _rng: 0.001, minutes=30)
    assert proof.state.ttft.withheld.mean == pytest.approx(0.001)
    assert proof.state.ttft.granted.mean == pytest.approx(1.9)


def test_a_request_that_waited_for_minutes_counts_to_the_slice_in_which_it_arrived() -> None:
    proof = make(ProofSettings(share_ratio=0.3, proving_s=0.0))
    sides = {}
    for beat in range(8000):
        now = 1000.0 + beat * 0.1
        sides[now] = proof.withheld(now=now)
        proof.observe(ttft_s=(), itl_s=(), eligible=True, leased=True, now=now)
    late = [at_s for at_s in sides if 60.0 < now - at_s < 500.0]
    found = [(proof.stands_for(at_s), sides[at_s]) for at_s in late]
    assert {stands_for for stands_for, _ in found} == {(1 - 0.3) / 0.3, 0.0, None}
    assert all(stands_for is None or bool(stands_for) is truth for stands_for, truth in found)
    assert proof.stands_for(1000.0) == 0.0, "longer than slices are remembered"
    assert len(proof.state.outlines) == 300


def test_its_interval_covers_a_known_impact_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(20):
        proof = make(ProofSettings(share_ratio=0.3, seed=seed, limit_ratio=10.0))
        serve(proof, granted=lognormal(0.12, 0.3), alone=lognormal(0.1, 0.3), minutes=40, seed=seed)
        impact = proof.impact()["ttft"]
        assert impact is not None
        covered += impact.low <= 0.2 <= impact.high
    assert covered >= 17


def test_a_busy_hour_after_the_first_half_hour_is_no_impact() -> None:
    """A quarter of the quiet slices is withheld, and a twentieth of the busy ones."""
    proof = make(ProofSettings(limit_ratio=10.0))
    serve(proof, granted=lognormal(0.1, 0.3), alone=lognormal(0.1, 0.3), minutes=31)
    serve(proof, granted=lognormal(0.3, 0.3), alone=lognormal(0.3, 0.3), minutes=60, begun_s=2860.0)
    impact = proof.impact()["ttft"]
    assert impact is not None
    assert impact.low <= 0.0 <= impact.high
    assert abs(impact.ratio) < 0.2


def test_tells_no_impact_before_it_has_enough_slices() -> None:
    proof = make(ProofSettings(share_ratio=0.3, minimum_slices=50))
    serve(proof, granted=lognormal(0.1, 0.1), alone=lognormal(0.1, 0.1), minutes=2)
    assert proof.impact() == {"ttft": None, "itl": None}


def test_counts_no_slice_in_which_the_gate_was_shut_for_another_reason() -> None:
    proof = make(ProofSettings(share_ratio=0.3, minimum_slices=2))
    for number in range(4000):
        eligible = number % 20 < 19
        proof.observe(
            ttft_s=(0.01,), itl_s=(0.01,), eligible=eligible, leased=True, now=number * 0.1
        )
    assert proof.impact() == {"ttft": None, "itl": None}
    assert proof.state.judged_s == 0.0


def test_counts_each_slice_with_a_lease_in_some_of_it_and_no_other() -> None:
    proof = make(ProofSettings(share_ratio=0.3))
    for number in range(4000):
        # Slices of 20 beats: one lease ends in each of the first hundred.
        leased = number < 2000 and number % 20 < 5
        proof.observe(ttft_s=(0.01,), itl_s=(0.01,), eligible=True, leased=leased, now=number * 0.1)
    assert proof.state.judged_s == pytest.approx(200.0, abs=4.0)


def test_a_stop_ends_after_its_hold_and_the_proof_begins_anew() -> None:
    proof = make(ProofSettings(hold_s=60.0))
    serve(proof, granted=lognormal(0.4, 0.1), alone=lognormal(0.1, 0.1), minutes=60)
    assert proof.harmful
    stopped_at_s = proof.state.stopped_at_s
    assert stopped_at_s is not None
    proof.observe(ttft_s=(), itl_s=(), eligible=False, leased=True, now=stopped_at_s + 59.0)
    assert proof.harmful
    proof.observe(ttft_s=(), itl_s=(), eligible=False, leased=True, now=stopped_at_s + 61.0)
    assert not proof.harmful
    assert proof.evidence == make().evidence


def test_slices_are_long_enough_for_quartiles_where_few_requests_arrive() -> None:
    """A slice of ten P99 would hold one request in three, and no median for months."""
    slow, fast = make(), make()
    serve(slow, granted=lognormal(0.06, 0.3), alone=lognormal(0.06, 0.3), minutes=20, rate=0.2)
    assert 30.0 < slow.state.slices[-1].length_s < 90.0
    found_min = serve(
        fast, granted=lognormal(0.11, 0.3), alone=lognormal(0.06, 0.3), minutes=60, rate=0.2
    )
    assert found_min is not None


def test_slices_stay_short_where_no_length_would_hold_quartiles() -> None:
    proof = make()
    serve(proof, granted=lognormal(0.06, 0.3), alone=lognormal(0.06, 0.3), minutes=60, rate=0.02)
    assert proof.state.slices[-1].length_s <= 4.0


@pytest.mark.parametrize(("quiet_rate", "quiet_min"), [(0.02, 120.0), (0.1, 0.3)])
def test_a_quiet_time_makes_no_long_slices_of_the_load_after_it(
    quiet_rate: float, quiet_min: float
) -> None:
    proof, alike = make(), lognormal(0.06, 0.3)
    serve(proof, granted=alike, alone=alike, minutes=quiet_min, rate=quiet_rate)
    assert proof.slice_s <= 4.0
    begun_s = 1000.0 + 60.0 * quiet_min
    serve(proof, granted=alike, alone=alike, minutes=10, begun_s=begun_s)
    assert proof.slice_s <= 6.0
