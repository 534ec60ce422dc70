import random

from hypothesis import given
from hypothesis import strategies as st

from harvester.policy.level import Level, MissWindow
from harvester.policy.settings import LevelSettings, MissSettings


def test_shrinks_at_most_once_per_interval() -> None:
    level = Level(LevelSettings(shrink_ratio=0.5, shrink_interval_s=1.0))
    ratios = [level.observe(breached=True, now=now) for now in (10.0, 10.1, 10.9, 11.0)]
    assert ratios == [0.5, 0.5, 0.5, 0.25]


def test_never_falls_below_its_floor() -> None:
    level = Level(LevelSettings(floor_ratio=0.2))
    for now in range(100):
        level.observe(breached=True, now=float(now))
    assert level.ratio == 0.2


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 2.0)), max_size=200))
def test_grows_only_after_quiet_time_and_only_by_its_step(beats: list[tuple[bool, float]]) -> None:
    settings = LevelSettings()
    level, now, breached_at = Level(settings), 0.0, float("-inf")
    for breached, elapsed_s in beats:
        now += elapsed_s
        before = level.ratio
        ratio = level.observe(breached=breached, now=now)
        assert settings.floor_ratio <= ratio <= 1.0
        assert ratio <= before + settings.grow_ratio + 1e-12
        if ratio > before:
            assert now - breached_at >= settings.quiet_s
        if breached:
            breached_at = now


def test_old_misses_fade() -> None:
    window = MissWindow(MissSettings(window_s=10.0, minimum_misses=3, limit_ratio=0.01))
    assert not window.observe(samples=2, misses=2, now=0.0)
    assert not window.observe(samples=2, misses=2, now=60.0)
    assert window.observe(samples=2, misses=2, now=60.1)


def test_counts_anew_after_a_breach() -> None:
    window = MissWindow(MissSettings(minimum_misses=3))
    assert window.observe(samples=3, misses=3, now=0.0)
    assert not window.observe(samples=1, misses=1, now=0.1)


def test_misses_that_production_has_by_itself_are_no_breach() -> None:
    window, rng = MissWindow(MissSettings()), random.Random(3)
    breaches = 0
    for beat in range(200_000):
        misses = sum(rng.random() < 0.03 for _ in range(5))
        own = beat % 10 == 0
        breaches += window.observe(
            samples=5,
            misses=0 if own else misses,
            own_samples=5 * own,
            own_misses=misses * own,
            now=float(beat),
        )
    assert breaches <= 2
    acted = [window.observe(samples=5, misses=5, now=200_000.0 + beat) for beat in range(10)]
    assert acted.index(True) <= 4, "harm is still told apart within seconds"


def test_a_miss_alone_excuses_no_harm() -> None:
    window = MissWindow(MissSettings())
    window.observe(samples=10, misses=0, own_samples=10, own_misses=1, now=0.0)
    assert any(window.observe(samples=5, misses=5, now=float(beat)) for beat in range(1, 5))
