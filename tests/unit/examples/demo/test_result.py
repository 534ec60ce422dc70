from collections.abc import Callable

import msgspec
import pytest

from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.serving_figures import arms_of
from examples.demo.records import ArmBlock, DemoArm, EngineGap, Record, TrainingStep
from examples.demo.result import DemoFacts, as_json, level_of, result_of
from examples.demo.schema import Result, ResultCheck
from examples.demo.session import measured_level
from harvester.contracts.errors import ConfigError

Requests = Callable[..., ProductionRequest]
Steps = Callable[..., TrainingStep]


def check(result: Result, name: str) -> ResultCheck:
    return next(check for check in result.checks if check.name.startswith(name))


def test_figures_of_production_by_hand(request_of: Requests, facts: DemoFacts) -> None:
    records: list[Record] = [
        request_of(trace_index=i, ttft_s=s, itl_s=itl)
        for i, (s, itl) in enumerate([(0.01, (0.002, 0.004)), (0.02, (0.006,)), (0.09, (0.008,))])
    ]
    serving = result_of(records, facts).serving_only
    assert serving.ttft_p50_ms == pytest.approx(20)
    # Linear between the second and third of three: 20 + 0.98 x 70.
    assert serving.ttft_p99_ms == pytest.approx(88.6)
    assert serving.itl_p50_ms == pytest.approx(5)
    assert serving.itl_p99_ms == pytest.approx(7.94)
    # The SLO is 80 and 30 ms.
    assert serving.slo_attainment == pytest.approx(2 / 3)
    assert (serving.requests, serving.failed) == (3, 0)


def test_compares_only_requests_that_every_arm_replayed(
    request_of: Requests, facts: DemoFacts
) -> None:
    records: list[Record] = [
        *(request_of(trace_index=i, ttft_s=0.02) for i in range(10)),
        *(request_of(DemoArm.FIXED, trace_index=i, ttft_s=0.02) for i in range(14)),
        *(request_of(DemoArm.HARVEST, trace_index=i, ttft_s=0.03) for i in range(8)),
        request_of(DemoArm.FIXED, trace_index=14, failed=True),
        request_of(DemoArm.FIXED, block=-1, trace_index=0, ttft_s=9.0),
    ]
    result = result_of(records, facts)
    assert result.serving_only.requests == result.fixed.requests == result.harvest.requests == 8
    assert (result.fixed.requests_sent, result.fixed.failed) == (15, 1)
    assert result.ratios.ttft_p50 == pytest.approx(1.5)
    assert result.fixed_ratios is not None
    assert result.fixed_ratios.ttft_p50 == pytest.approx(1.0)
    failed = check(result, "failed production requests")
    assert (failed.ok, failed.value) == (False, 1)


def test_the_round_and_not_the_request_is_the_unit_of_an_interval(
    request_of: Requests, facts: DemoFacts
) -> None:
    """Beside the guest all requests of a round were as much slower or faster, by the machine."""
    records: list[Record] = [
        request_of(arm, block=block, trace_index=i, ttft_s=slower * 0.01 * 1.05**i)
        for block, slower_beside in enumerate((0.7, 1.3, 1.0, 1.2, 0.8))
        for arm, slower in (
            (DemoArm.SERVING_ONLY, 1.0),
            (DemoArm.FIXED, 1.0),
            (DemoArm.HARVEST, slower_beside),
        )
        for i in range(40)
    ]
    result = result_of(records, facts)
    assert result.intervals.ttft_p50 is not None
    low, high = result.intervals.ttft_p50
    assert low < 0.8 < 1.25 < high
    assert result.fixed_intervals is not None
    assert result.fixed_intervals.ttft_p50 == pytest.approx((1.0, 1.0), abs=0.06)
    assert result.intervals.ttft_p99 is None, "so few requests do not bound it"


def test_the_slo_is_chosen_from_the_requests_that_are_compared(request_of: Requests) -> None:
    """A miss that no other arm replayed must not make room for an SLO that all then attain."""
    shared = [(0.02, i) for i in range(98)] + [(0.3, 98), (0.3, 99)]
    requests = [
        *(request_of(arm, trace_index=i, ttft_s=ttft_s) for arm in DemoArm for ttft_s, i in shared),
        *(request_of(trace_index=100 + i, ttft_s=0.9) for i in range(3)),
    ]
    level = level_of(arms_of(requests, DemoArm))
    assert 0.02 < level.ttft_s < 0.3


def test_without_a_request_in_every_arm_there_is_no_slo(request_of: Requests) -> None:
    requests = [request_of(arm, trace_index=place) for place, arm in enumerate(DemoArm)]
    with pytest.raises(ConfigError, match="longer or busier trace"):
        level_of(arms_of(requests, DemoArm))
    assert measured_level([]) is None, "a round without a request promises nothing new"
    assert measured_level(requests) is not None


def test_time_without_a_request_in_flight_stands_beside_each_arm(
    request_of: Requests, facts: DemoFacts
) -> None:
    blocks: list[Record] = [
        ArmBlock(arm=DemoArm.HARVEST, index=index, start_s=10.0 * index, end_s=10.0 * index + 10.0)
        for index in range(2)
    ]
    busy = [
        request_of(DemoArm.HARVEST, block=index, due_s=10.0 * index + 2.0, ttft_s=3.0, itl_s=(1.0,))
        for index in range(2)
    ]
    warm_up = request_of(DemoArm.HARVEST, block=-1, due_s=11.0, ttft_s=9.0)
    result = result_of([*blocks, *busy, warm_up], facts)
    assert result.nothing_in_flight_share == {DemoArm.HARVEST: pytest.approx(0.6)}


def test_figures_of_the_job_by_hand(step_of: Steps, facts: DemoFacts) -> None:
    records: list[Record] = [
        ArmBlock(arm=DemoArm.SERVING_ONLY, index=0, start_s=0, end_s=30, production_busy_share=0.4),
        ArmBlock(arm=DemoArm.SERVING_ONLY, index=1, start_s=0, end_s=10, production_busy_share=0.8),
        ArmBlock(
            arm=DemoArm.SERVING_ONLY, index=-1, start_s=0, end_s=99, production_busy_share=1.0
        ),
        ArmBlock(arm=DemoArm.HARVEST, index=0, start_s=0, end_s=99, production_busy_share=1.0),
        *(step_of(step=n, step_s=4.0, rollout_s=3.0) for n in range(2, 8)),
        *(
            step_of(DemoArm.HARVEST, step=n, step_s=3.2, rollout_s=2.0, rollout_tokens=3300)
            for n in range(2, 6)
        ),
        step_of(block=-1, step=1, step_s=99.0, rollout_s=98.0),
    ]
    result = result_of(records, facts)
    assert result.production_busy_share == pytest.approx(0.5)
    assert (result.fixed.steps, result.harvest.steps) == (6, 4)
    assert result.fixed.step_s_mean == pytest.approx(4.0)
    assert result.fixed.rollout_share == pytest.approx(0.75)
    assert result.fixed.rollout_tokens_per_s == pytest.approx(1000)
    assert result.ideal_speedup == pytest.approx(1 / (1 - 0.75 + 0.75 / 1.5))
    assert result.ratios.step_speedup == pytest.approx(1.25)
    assert result.ratios.rollout_tokens == pytest.approx(1.1)
    assert result.ratios.step_speedup_per_token == pytest.approx(1.375)
    assert result.ratios.rollout_speedup == pytest.approx(1.5 * 1.1)
    # More than 5 % apart in tokens: the check counts per token and says so.
    assert check(result, "training step speedup per rollout token").value == pytest.approx(1.375)


def test_speeds_are_compared_over_equal_step_numbers(step_of: Steps, facts: DemoFacts) -> None:
    records: list[Record] = [
        *(step_of(step=n, step_s=float(n)) for n in (1, 2, 9)),
        *(step_of(DemoArm.HARVEST, step=n, step_s=1.0) for n in (1, 2)),
    ]
    assert result_of(records, facts).ratios.step_speedup == pytest.approx(1.5)


def test_rewards_are_means_of_three_steps_with_the_error_of_their_difference(
    step_of: Steps, facts: DemoFacts
) -> None:
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    records: list[Record] = [
        step_of(arm, step=n, reward_mean=reward + shift, reward_se=0.03)
        for arm, shift in ((DemoArm.FIXED, 0.0), (DemoArm.HARVEST, 0.06))
        for n, reward in enumerate(rewards)
    ]
    result = result_of(records, facts)
    assert result.fixed.reward_first == pytest.approx(0.2)
    assert result.fixed.reward_last == pytest.approx(0.7)
    se = 0.03 * (2 / 3) ** 0.5
    assert result.fixed.reward_se == pytest.approx(se)
    assert check(result, "reward gained, fixed").value == pytest.approx(0.5 / se)
    distance = check(result, "last reward")
    assert distance.value == pytest.approx(0.06 / se)
    assert not distance.ok


def test_few_steps_are_never_first_and_last_at_once(step_of: Steps, facts: DemoFacts) -> None:
    records: list[Record] = [step_of(step=n, reward_mean=float(n)) for n in (1, 2, 3)]
    result = result_of(records, facts)
    assert (result.fixed.reward_first, result.fixed.reward_last) == (1.0, 3.0)
    one = result_of(records[:1], facts)
    assert one.fixed.reward_first is None
    assert one.fixed.reward_se is None


def test_gaps_are_per_token_and_by_kind_of_engine(step_of: Steps, facts: DemoFacts) -> None:
    def gaps(dedicated: float, guest: float, guest_tokens: int = 50) -> tuple[EngineGap, ...]:
        return (
            EngineGap(engine="dedicated-0", sum_abs=dedicated, tokens=100),
            EngineGap(engine="guest-0", sum_abs=guest, tokens=guest_tokens),
        )

    records: list[Record] = [
        step_of(DemoArm.HARVEST, step=1, gaps=gaps(1.0, 0.4)),
        step_of(DemoArm.HARVEST, step=2, gaps=gaps(3.0, 0.8)),
        step_of(DemoArm.FIXED, step=1, gaps=gaps(50.0, 0.0)),
    ]
    result = result_of(records, facts)
    assert result.onpolicy.logprob_gap_dedicated == pytest.approx(0.02)
    assert result.onpolicy.logprob_gap_harvested == pytest.approx(0.012)
    assert check(result, "log-probability gap").value == pytest.approx(0.6)


def test_a_gap_is_compared_within_its_step(step_of: Steps, facts: DemoFacts) -> None:
    def both(per_token: float, guest_tokens: int) -> tuple[EngineGap, ...]:
        return (
            EngineGap(engine="dedicated-0", sum_abs=per_token * 100, tokens=100),
            EngineGap(engine="guest-0", sum_abs=per_token * guest_tokens, tokens=guest_tokens),
        )

    # Equal in each step; most harvested where the gap is greatest.
    records: list[Record] = [
        step_of(DemoArm.HARVEST, step=1, gaps=both(0.05, 400)),
        step_of(DemoArm.HARVEST, step=2, gaps=both(0.01, 10)),
        step_of(DemoArm.HARVEST, step=3, gaps=both(0.09, 0)),
    ]
    assert check(result_of(records, facts), "log-probability gap").value == pytest.approx(1.0)


def test_lost_duplicated_and_stale_tokens_count_in_warm_up_steps_too(
    step_of: Steps, facts: DemoFacts
) -> None:
    records: list[Record] = [
        step_of(block=-1, step=1, version=1, lost=1, duplicated=2, stale_tokens=3),
        step_of(DemoArm.HARVEST, step=2, version=2),
    ]
    result = result_of(records, facts)
    kept = result.trajectories
    assert (kept.started, kept.completed, kept.lost, kept.duplicated) == (128, 128, 1, 2)
    assert (kept.migrated, result.onpolicy.stale_tokens) == (7, 3)
    assert (result.weights.versions, result.weights.bytes_sent) == (2, 800_000)
    for name in ("trajectories lost", "trajectories duplicated", "stale tokens"):
        assert not check(result, name).ok


def test_a_run_without_records_measures_nothing_and_shows_nothing(facts: DemoFacts) -> None:
    result = result_of([], facts)
    assert result.serving_only.ttft_p50_ms is None
    assert result.ideal_speedup is None
    assert result.intervals.ttft_p99 is None
    passed = {check.name for check in result.checks if check.ok}
    assert passed == {
        "seconds to the first harvested token",
        "seconds in all",
        "weight hash mismatches",
    }


def test_a_good_run_passes_every_check_but_the_bands_it_misses(
    whole_run: tuple[Record, ...], facts: DemoFacts
) -> None:
    # At 55 ms some of production's own requests come late, as an SLO should have it.
    result = result_of(whole_run, msgspec.structs.replace(facts, ttft_slo_s=0.06))
    assert [check.name for check in result.checks if not check.ok] == []


def test_infinite_figures_become_null(whole_run: tuple[Record, ...], facts: DemoFacts) -> None:
    result = result_of(whole_run, msgspec.structs.replace(facts, scale=float("inf")))
    assert as_json(result)["scale"] is None
