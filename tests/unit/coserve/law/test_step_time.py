"""The guest's own step times, learned from steps whose law the test knows."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.law.step_time import StepTimeModel

Law = Callable[[int, int], float]

models = st.builds(
    StepTimeModel,
    base_s=st.floats(0.0, 0.5),
    decode_s=st.floats(1e-6, 0.05),
    prefill_s=st.floats(1e-6, 0.05),
    context_s=st.floats(0.0, 0.01),
    factor=st.floats(1.0, 4.0),
)


def slow(decodes: int, prefill_tokens: int) -> float:
    return 0.006 + 0.0005 * decodes + 0.00005 * prefill_tokens


def fast(decodes: int, prefill_tokens: int) -> float:
    return slow(decodes, prefill_tokens) / 5


def mixed_steps(
    model: StepTimeModel, law: Law, count: int, *, seed: int = 1, noise: float = 0.05
) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        decodes, prefill = rng.randint(1, 32), rng.choice((0, 0, 0, 128, 512))
        step_s = law(decodes, prefill) * rng.uniform(1 - noise, 1 + noise)
        model.observe(decodes=decodes, prefill_tokens=prefill, context_tokens=0, step_s=step_s)


def mean_s(model: StepTimeModel, decodes: int, prefill_tokens: int) -> float:
    return (
        model.predict_s(decodes=decodes, prefill_tokens=prefill_tokens, context_tokens=0)
        / model.factor
    )


@pytest.mark.parametrize(("decodes", "prefill"), [(1, 0), (32, 0), (8, 512), (0, 1024)])
def test_converges_on_the_law_of_the_steps(decodes: int, prefill: int) -> None:
    model = StepTimeModel()
    mixed_steps(model, slow, 1000)
    assert mean_s(model, decodes, prefill) == pytest.approx(slow(decodes, prefill), rel=0.1)


@pytest.mark.parametrize(("before", "after"), [(slow, fast), (fast, slow)])
def test_follows_a_change_of_hardware(before: Law, after: Law) -> None:
    model = StepTimeModel()
    mixed_steps(model, before, 2000)
    mixed_steps(model, after, 1500, seed=2)
    for decodes, prefill in ((1, 0), (16, 0), (8, 512)):
        assert mean_s(model, decodes, prefill) == pytest.approx(after(decodes, prefill), rel=0.15)


def test_hours_of_one_batch_size_neither_run_away_nor_make_it_deaf() -> None:
    rng = random.Random(3)
    model = StepTimeModel()
    for phase in range(40):
        decodes, prefill = rng.choice((1, 4, 8, 16, 32)), rng.choice((0, 0, 0, 256))
        for _ in range(2000):
            step_s = slow(decodes, prefill) * rng.uniform(0.9, 1.1)
            model.observe(decodes=decodes, prefill_tokens=prefill, context_tokens=0, step_s=step_s)
        found = mean_s(model, decodes, prefill)
        assert found == pytest.approx(slow(decodes, prefill), rel=0.05), f"phase {phase}"


def test_keeps_what_it_knows_of_prefills_while_there_are_none() -> None:
    model = StepTimeModel()
    mixed_steps(model, slow, 1000)
    for _ in range(20_000):
        model.observe(decodes=8, prefill_tokens=0, context_tokens=0, step_s=slow(8, 0))
    assert mean_s(model, 8, 512) == pytest.approx(slow(8, 512), rel=0.1)


def attending(decodes: int, context_tokens: int) -> float:
    """As where a step reads the KV of its requests: 32k of it take longer than all the rest."""
    return 0.006 + 0.0001 * decodes + 0.0004 * context_tokens / 1024


def attending_steps(model: StepTimeModel, count: int, *, seed: int = 5) -> None:
    """Requests that grow, and come and go, so that the same batch has one context or another."""
    rng = random.Random(seed)
    contexts = [rng.randint(0, 4096) for _ in range(16)]
    for _ in range(count):
        contexts = [
            length + 1 if rng.random() > 0.005 else rng.randint(0, 4096) for length in contexts
        ]
        if rng.random() < 0.01:
            contexts = [rng.randint(0, 4096) for _ in range(rng.randint(1, 32))]
        decodes, context = len(contexts), sum(contexts)
        step_s = attending(decodes, context) * rng.uniform(0.95, 1.05)
        model.observe(decodes=decodes, prefill_tokens=0, context_tokens=context, step_s=step_s)


def test_a_request_of_long_context_is_foreseen_and_not_met_by_surprise() -> None:
    model = StepTimeModel()
    attending_steps(model, 2000)
    for decodes, context in ((1, 1024), (8, 32_768), (16, 65_536)):
        predicted_s = model.predict_s(decodes=decodes, prefill_tokens=0, context_tokens=context)
        wanted_s = attending(decodes, context)
        assert predicted_s / model.factor == pytest.approx(wanted_s, rel=0.1), (decodes, context)
    short, long = (
        model.tokens_within_s(0.03, decodes=8, context_tokens=tokens, cap=512)
        for tokens in (0, 65_536)
    )
    assert short > 8
    assert long == 0, "whatever it holds is read by its first token"


def test_where_context_costs_nothing_it_is_learned_to_be_nothing() -> None:
    model = StepTimeModel()
    rng = random.Random(6)
    for _ in range(3000):
        decodes = rng.randint(1, 32)
        model.observe(
            decodes=decodes,
            prefill_tokens=0,
            context_tokens=decodes * rng.randint(100, 2000),
            step_s=slow(decodes, 0) * rng.uniform(0.95, 1.05),
        )
    long_s = model.predict_s(decodes=8, prefill_tokens=0, context_tokens=16_384) / model.factor
    assert long_s == pytest.approx(slow(8, 0), rel=0.1)


@pytest.mark.parametrize("law", [lambda d, p: 0.0005 * d, lambda d, p: 1e-6 * d * d + 1e-6 * p])
def test_stays_finite_and_positive_on_steps_that_its_law_fits_badly(law: Law) -> None:
    model = StepTimeModel()
    mixed_steps(model, law, 5000, noise=0.5)
    assert min(model.base_s, model.decode_s, model.prefill_s, model.context_s) >= 0.0
    assert 0.2 < mean_s(model, 16, 0) / law(16, 0) < 5.0


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_the_configured_share_of_steps_is_within_the_prediction(quantile: float) -> None:
    rng = random.Random(4)
    model = StepTimeModel(quantile=quantile)

    def step() -> bool:
        decodes, prefill = rng.randint(1, 32), rng.choice((0, 0, 0, 128, 512))
        step_s = slow(decodes, prefill) * rng.lognormvariate(0.0, 0.2)
        predicted_s = model.predict_s(decodes=decodes, prefill_tokens=prefill, context_tokens=0)
        model.observe(decodes=decodes, prefill_tokens=prefill, context_tokens=0, step_s=step_s)
        return step_s <= predicted_s

    for _ in range(2000):
        step()
    within = sum(step() for _ in range(4000)) / 4000
    # The margin never goes below the mean, which of a skewed law is above its median.
    assert quantile - 0.03 <= within <= quantile + 0.06


def test_one_slow_call_does_not_spoil_what_was_learned() -> None:
    model = StepTimeModel()
    mixed_steps(model, slow, 1000)
    before_s = model.predict_s(decodes=8, prefill_tokens=0, context_tokens=0)
    model.observe(decodes=8, prefill_tokens=0, context_tokens=0, step_s=5.0)
    assert model.predict_s(decodes=8, prefill_tokens=0, context_tokens=0) < 1.2 * before_s


def test_a_first_step_of_two_seconds_is_forgotten_within_a_few_steps() -> None:
    model = StepTimeModel()
    model.observe(decodes=16, prefill_tokens=0, context_tokens=0, step_s=2.0)
    mixed_steps(model, slow, 50)
    assert model.predict_s(decodes=8, prefill_tokens=0, context_tokens=0) < 3 * slow(8, 0)


@given(
    model=models,
    budget_s=st.floats(0.0, 5.0),
    decodes=st.integers(0, 256),
    context=st.integers(0, 1 << 20),
    cap=st.integers(1, 8192),
)
def test_tokens_within_a_time_is_the_inverse_of_the_prediction(
    model: StepTimeModel, budget_s: float, decodes: int, context: int, cap: int
) -> None:
    def predicted_s(tokens: int) -> float:
        running = min(decodes, tokens)
        return model.predict_s(
            decodes=running, prefill_tokens=tokens - running, context_tokens=context
        )

    tokens = model.tokens_within_s(budget_s, decodes=decodes, context_tokens=context, cap=cap)
    assert 0 <= tokens <= cap
    rounding_s = 1e-9
    if tokens > 0:
        assert predicted_s(tokens) <= budget_s + rounding_s
    if tokens < cap:
        assert predicted_s(tokens + 1) > budget_s - rounding_s


@pytest.mark.parametrize("budget_s", [-math.inf, -1.0, 0.0, math.nan])
def test_no_time_or_an_unknown_one_admits_nothing(budget_s: float) -> None:
    assert StepTimeModel().tokens_within_s(budget_s, decodes=4, context_tokens=0, cap=512) == 0


def test_unlimited_time_admits_the_cap() -> None:
    assert StepTimeModel().tokens_within_s(math.inf, decodes=4, context_tokens=0, cap=512) == 512


def test_says_how_often_steps_took_longer_than_predicted() -> None:
    model = StepTimeModel()
    mixed_steps(model, slow, 3000, noise=0.2)
    assert 0.03 < model.over_ratio < 0.2, "the tenth that its quantile promises"
    for number in range(50):
        step_s = 1.1**number * slow(8, 0)
        model.observe(decodes=8, prefill_tokens=0, context_tokens=0, step_s=step_s)
    assert model.over_ratio > 0.2, "a machine that becomes ever slower shows"


def test_a_machine_that_became_slower_shows_within_eight_steps() -> None:
    model = StepTimeModel()
    mixed_steps(model, slow, 1000)
    for _ in range(8):
        model.observe(decodes=8, prefill_tokens=0, context_tokens=0, step_s=10 * slow(8, 0))
    assert model.predict_s(decodes=8, prefill_tokens=0, context_tokens=0) >= 9.5 * slow(8, 0)


@pytest.mark.parametrize("after", [0, 1000], ids=["at the start", "later"])
def test_steps_of_seconds_are_outgrown_a_few_normal_steps_later(after: int) -> None:
    """A first call of each shape, or a machine that was stopped."""
    model = StepTimeModel()
    mixed_steps(model, slow, after)
    for number in range(30):
        prefill = 24 * (number % 2)
        model.observe(decodes=16, prefill_tokens=prefill, context_tokens=400, step_s=2.0)
    mixed_steps(model, slow, 60)
    assert model.predict_s(decodes=8, prefill_tokens=0, context_tokens=0) < 3 * slow(8, 0)


# Decodes, prefill tokens, tokens of context, milliseconds of a real guest's first steps.
FIRST_STEPS = [
    (0, 96, 0, 128.3),
    (1, 78, 96, 84.0),
    (1, 53, 224, 60.1),
    (2, 23, 288, 27.4),
    (2, 16, 320, 32.0),
    (2, 11, 352, 30.6),
    (2, 0, 352, 10.6),
    (2, 0, 352, 11.0),
    (2, 2, 352, 13.3),
    (2, 3, 352, 15.6),
    (2, 5, 352, 15.2),
    (3, 6, 352, 18.9),
    (3, 7, 384, 19.4),
    (3, 7, 416, 18.9),
    (3, 4, 416, 17.2),
    (3, 2, 416, 12.2),
    (3, 39, 416, 50.9),
    (3, 45, 480, 60.9),
    (4, 51, 512, 66.2),
    (4, 56, 608, 72.8),
    (5, 62, 640, 79.9),
    (5, 67, 736, 80.9),
    (6, 73, 800, 79.4),
    (7, 78, 928, 92.4),
    (8, 81, 1024, 98.8),
    (9, 82, 1152, 124.9),
    (9, 80, 1248, 96.3),
    (10, 75, 1344, 97.8),
    (11, 67, 1440, 87.7),
    (12, 54, 1536, 103.9),
    (12, 44, 1632, 66.5),
    (13, 24, 1664, 48.6),
    (13, 7, 1728, 31.5),
    (1, 0, 1728, 7.4),
    (4, 0, 1760, 12.1),
    (10, 0, 1760, 19.0),
    (13, 17, 1760, 46.0),
    (13, 17, 1824, 40.8),
    (13, 17, 1824, 41.8),
    (14, 18, 1856, 41.8),
    (14, 18, 1888, 42.9),
    (14, 19, 1920, 34.9),
    (14, 20, 1920, 47.0),
    (14, 20, 1952, 48.9),
    (15, 20, 1984, 45.5),
    (15, 21, 2016, 45.5),
    (15, 21, 2080, 44.6),
    (15, 22, 2112, 49.9),
    (15, 7, 2112, 38.1),
    (16, 0, 2112, 28.6),
    (16, 0, 2144, 52.5),
    (16, 0, 2144, 27.6),
    (16, 0, 2176, 28.0),
    (16, 0, 2176, 26.7),
    (16, 0, 2176, 29.8),
    (16, 0, 2208, 30.8),
]


def test_the_first_steps_of_a_real_guest_are_followed() -> None:
    """A fit whose minima were kept one after the other came to predict sixteen times the truth."""
    model = StepTimeModel()
    for count, (decodes, prefill, context, step_ms) in enumerate(FIRST_STEPS):
        predicted_s = model.predict_s(
            decodes=decodes, prefill_tokens=prefill, context_tokens=context
        )
        if count >= 10:
            assert 0.6 < predicted_s / (step_ms * 1e-3) < 5.0
        model.observe(
            decodes=decodes, prefill_tokens=prefill, context_tokens=context, step_s=step_ms * 1e-3
        )
