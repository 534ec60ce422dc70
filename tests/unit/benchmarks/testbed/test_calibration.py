from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.testbed.bursts import Bursts, generated_trace
from benchmarks.testbed.calibration import (
    MeasuredReplay,
    busy_share,
    mean_busy_share,
    measured_ratio,
    rate_for,
    scaled,
)
from benchmarks.testbed.excerpt import Excerpt, TokenScale, excerpts_of
from benchmarks.testbed.trace import Arrival
from harvester.contracts.page import ProductionModel

MODELS = {
    "small": ProductionModel(
        prefill_base_s=0.01,
        prefill_s_per_token=4e-5,
        decode_base_s=0.006,
        decode_s_per_request=3e-4,
    ),
    "slow": ProductionModel(
        prefill_base_s=0.2, prefill_s_per_token=1e-3, decode_base_s=0.05, decode_s_per_request=0.01
    ),
    "decode only": ProductionModel(decode_base_s=0.02),
}
SCALE = TokenScale(input_scale=0.25, output_scale=0.25, input_max=1024, output_max=128)
TRACE = generated_trace(Bursts(), duration_s=900.0, seed=2)


EXCERPTS = excerpts_of(TRACE, count=3, duration_s=20.0, rate=4.0)


def excerpts_at(rate: float) -> list[Excerpt]:
    """The same requests at any rate: time is stretched."""
    return [excerpt.sized(SCALE).scaled(rate=rate) for excerpt in EXCERPTS]


def share_at(rate: float, model: ProductionModel) -> float:
    return mean_busy_share(excerpts_at(rate), model)


def test_one_request_is_busy_for_its_prefill_and_its_other_tokens() -> None:
    model = MODELS["small"]
    arrival = Arrival(index=0, t_s=1.0, input_tokens=100, output_tokens=11)
    expected_s = model.prefill_s(100) + 3e-4 + 10 * model.decode_s(1)
    assert busy_share([arrival], model, excerpt_s=10.0) == pytest.approx(expected_s / 10.0)


def test_requests_that_overlap_share_their_steps() -> None:
    model = MODELS["decode only"]
    one = Arrival(index=0, t_s=0.0, input_tokens=1, output_tokens=50)
    apart = busy_share([one, replace(one, t_s=5.0)], model, excerpt_s=10.0)
    together = busy_share([one, one], model, excerpt_s=10.0)
    assert apart == pytest.approx(0.2)
    assert together == pytest.approx(0.1)


def test_nothing_to_serve_is_idle() -> None:
    assert busy_share([], MODELS["small"], excerpt_s=10.0) == 0.0


@given(
    st.lists(
        st.tuples(st.floats(0, 60), st.integers(1, 5000), st.integers(1, 200)),
        max_size=30,
    )
)
def test_a_share_is_between_nothing_and_all(rows: list[tuple[float, int, int]]) -> None:
    arrivals = [
        Arrival(index=index, t_s=t_s, input_tokens=given_, output_tokens=asked)
        for index, (t_s, given_, asked) in enumerate(sorted(rows))
    ]
    assert 0.0 <= busy_share(arrivals, MODELS["small"], excerpt_s=60.0) <= 1.0 + 1e-9


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_faster_the_replay_the_busier_the_engine(model: ProductionModel) -> None:
    shares = [share_at(2.0**power, model) for power in range(-5, 8)]
    assert shares[0] < shares[-1]
    assert all(later > earlier - 0.01 for earlier, later in pairwise(shares))


@pytest.mark.parametrize("target", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_chosen_rate_hits_its_target(model: ProductionModel, target: float) -> None:
    rate = rate_for(excerpts_at, model, measured_ratio=1.0, target=target)
    assert share_at(rate, model) == pytest.approx(target, abs=0.02)


def replayed(model: ProductionModel, rate: float) -> MeasuredReplay:
    """Measurement of an engine with these step times."""
    excerpt = excerpts_at(rate)[0]
    share = busy_share(excerpt.arrivals, model, excerpt_s=excerpt.duration_s)
    busy_s = share * excerpt.duration_s
    return MeasuredReplay(arrivals=excerpt.arrivals, seconds=excerpt.duration_s, busy_s=busy_s)


@pytest.mark.parametrize("rate", [2.0, 30.0], ids=["quiet", "near saturation"])
@pytest.mark.parametrize("ratio", [0.4, 1.0, 2.0])
def test_the_measured_ratio_is_that_of_the_steps(ratio: float, rate: float) -> None:
    model = MODELS["small"]
    replay = replayed(scaled(model, ratio), rate)
    assert measured_ratio([replay], model) == pytest.approx(ratio, rel=0.02)


def test_the_measured_ratio_is_over_all_replays() -> None:
    model = MODELS["small"]
    replays = [replayed(scaled(model, ratio), 2.0) for ratio in (1.0, 2.0)]
    assert 1.3 < measured_ratio(replays, model) < 1.7


@pytest.mark.parametrize("busy_s", [0.0, 3.0])
def test_replays_in_which_nothing_came_say_nothing(busy_s: float) -> None:
    quiet = MeasuredReplay(arrivals=(), seconds=10.0, busy_s=busy_s)
    assert measured_ratio([quiet], MODELS["small"]) == 1.0


@pytest.mark.parametrize("ratio", [0.4, 1.25])
def test_the_measured_ratio_corrects_the_computed_load(ratio: float) -> None:
    model = MODELS["small"]
    rate = rate_for(excerpts_at, model, measured_ratio=ratio, target=0.5)
    assert share_at(rate, scaled(model, ratio)) == pytest.approx(0.5, abs=0.02)
