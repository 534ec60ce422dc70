import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks.coserve.arms import (
    ESSENTIAL,
    IN_ROUNDS,
    RECLAIM,
    SETTINGS,
    UNMIXED,
    WITH_PRODUCTION,
    Arm,
    arms_on,
    baseline,
)
from benchmarks.coserve.blocking import StepWatch, blocking_histogram, percentile_of
from benchmarks.coserve.figures import Facts, figures, proving_figures
from benchmarks.coserve.goals import GoalVerdict, verdicts
from benchmarks.coserve.residual import residual_figures
from benchmarks.coserve.round_log import ProvingSlice
from benchmarks.coserve.rounds import ArmSlice
from benchmarks.testbed.gpu_hardware import find_hardware
from benchmarks.testbed.hardware import CpuHardware, HardwareKind
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.serving_figures import idle_s
from benchmarks.testbed.slo import ServiceLevel
from benchmarks.testbed.slot import ServingSlot, SlotPorts
from coserve.guest.guest_slot import GuestSlot
from coserve.guest.isolation import NO_ISOLATION
from harvester.config import SlotConfig
from harvester.config_file import load_agent_config
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.page import Guest
from harvester.policy.settings import SlotSettings
from tests.unit.coserve.conftest import Slot

LEVEL = ServiceLevel(ttft_s=0.25, itl_s=0.05)
FACTS = Facts(trace="given", requests_per_s=2.0, level=LEVEL, arms=tuple(Arm))
SECONDS = 20.0
FRONT_END = 0.1
"""Share of a core, beside the engine's steps."""
GUEST_CORE = {Arm.ROLLOUTS: 1.0, Arm.ROSEMUX: 0.4, Arm.GATE_ONLY: 0.4}


def requests_of(arm: Arm, *, slower: float = 1.0) -> list[ProductionRequest]:
    """Two rounds of fifty; one in fifty is slow."""
    return [
        ProductionRequest(
            arm=arm,
            block=turn,
            due_s=0.0,
            input_tokens=10,
            output_tokens=3,
            ttft_s=slower * (0.3 if index == 7 else 0.05 + 1e-4 * index),
            itl_s=(slower * 0.010, slower * 0.011),
            failed=False,
            trace_index=index,
        )
        for turn in range(2)
        for index in range(50)
    ]


def slices_of(speeds: Mapping[Arm, int], *, busy: float) -> list[ArmSlice]:
    return [
        ArmSlice(
            arm=arm,
            round=turn,
            seconds=SECONDS,
            guest_tokens=round(speeds.get(arm, 0) * SECONDS),
            guest_steps=100 if arm in speeds else 0,
            production_busy_s=busy * SECONDS,
            production_core_s=(busy + FRONT_END) * SECONDS,
            idle_s=0.3 * SECONDS,
            guest_core_s=GUEST_CORE.get(arm, 0.0) * SECONDS,
            step_work_s=0.003 if arm in speeds else 0.0,
            steps_met={0: 45, 1: 5} if arm in speeds else {},
        )
        for arm in Arm
        for turn in range(2)
    ]


FIRST = requests_of(Arm.ROSEMUX)[0]
SPEEDS = {Arm.ROLLOUTS: 1000, Arm.ROSEMUX: 380, Arm.GATE_ONLY: 320}


def given(slower: Mapping[Arm, float] | None = None) -> dict[str, Any]:
    requests = [
        request
        for arm in WITH_PRODUCTION
        for request in requests_of(arm, slower=(slower or {}).get(arm, 1.0))
    ]
    return figures(requests, slices_of(SPEEDS, busy=0.5), FACTS)


def test_the_residual_is_what_steps_and_front_end_leave() -> None:
    result = given()
    assert result["production_busy_share"] == pytest.approx(0.5)
    assert result["production_core_share"] == pytest.approx(0.6)
    assert result["residual_share"] == pytest.approx(0.95)
    assert result["beside"]["gate_only"]["residual_share"] == pytest.approx(0.8)


def test_each_share_stands_beside_the_time_with_nothing_in_flight() -> None:
    for figures_of_arm in given()["beside"].values():
        assert figures_of_arm["nothing_in_flight_share"] == pytest.approx(0.3)


def test_a_slow_guest_differs_from_a_waiting_one() -> None:
    gate = given()["beside"]["gate_only"]
    assert (gate["time_share"], gate["pace_ratio"]) == pytest.approx((1.0, 0.8))
    halved = [
        msgspec.structs.replace(
            each, guest_core_s=(each.guest_core_s or 0.0) / 2, guest_tokens=each.guest_tokens // 2
        )
        if each.arm is Arm.GATE_ONLY
        else each
        for each in slices_of({Arm.ROLLOUTS: 1000, Arm.GATE_ONLY: 400}, busy=0.5)
    ]
    waits = residual_figures(halved, Arm.GATE_ONLY, base=Arm.AWAKE)
    assert (waits["time_share"], waits["pace_ratio"]) == pytest.approx((0.5, 1.0))
    assert waits["residual_share"] == pytest.approx(0.5)


def test_the_time_of_the_proof_has_figures_of_its_own() -> None:
    slices = slices_of(SPEEDS, busy=0.5)
    (one, *_) = [each for each in slices if each.arm is Arm.ROSEMUX]
    halved = msgspec.structs.replace(one, guest_tokens=one.guest_tokens // 2)
    late, in_time = (request_of(ttft_s=ttft_s) for ttft_s in (1.0, 0.1))
    proving = [ProvingSlice(measured=halved, requests=(late, in_time, in_time, in_time))]
    found = proving_figures(proving, slices, FACTS)["proving"]
    after = residual_figures(slices, Arm.ROSEMUX, base=Arm.AWAKE)["residual_share"]
    assert found["residual_share"] == pytest.approx(after / 2, rel=1e-3)
    assert (found["seconds"], found["requests"]) == (SECONDS, 4)
    assert found["slo_attainment"] == 0.75
    assert proving_figures((), slices, FACTS)["proving"]["residual_share"] is None


def request_of(*, ttft_s: float) -> ProductionRequest:
    return msgspec.structs.replace(requests_of(Arm.ROSEMUX)[0], ttft_s=ttft_s)


def test_the_residual_share_has_the_spread_of_its_rounds() -> None:
    alike = slices_of(SPEEDS, busy=0.5)
    low, high = residual_figures(alike, Arm.ROSEMUX, base=Arm.AWAKE)["residual_interval"]
    assert (low, high) == pytest.approx((0.95, 0.95))
    drifting = [
        msgspec.structs.replace(each, guest_tokens=each.guest_tokens * 2)
        if each.arm is Arm.ROLLOUTS and each.round == 1
        else each
        for each in alike
    ]
    found = residual_figures(drifting, Arm.ROSEMUX, base=Arm.AWAKE)
    low, high = found["residual_interval"]
    assert low < found["residual_share"] < high
    assert high - low > 1.0, "two rounds that differ twofold say hardly anything"


def test_one_round_has_no_spread_and_no_rollouts_no_share() -> None:
    one = [each for each in slices_of({}, busy=0.5) if each.round == 0]
    none = residual_figures(one, Arm.ROSEMUX, base=Arm.AWAKE)
    assert none["residual_share"] is none["residual_interval"] is none["pace_ratio"] is None


def test_an_arm_as_fast_as_alone_has_ratios_of_one() -> None:
    result = given()
    assert list(result["ratios"].values()) == pytest.approx([1.0] * 6)
    assert result["ratios"].keys() == result["half_widths"].keys()
    assert result["slo_attainment_drop"] == pytest.approx(0.0)
    assert result["arms"]["alone"]["requests"] == 100


def test_a_slower_arm_shows_in_its_ratios_and_its_attainment() -> None:
    result = given({Arm.GATE_ONLY: 2.0})
    gate = result["beside"]["gate_only"]
    assert (gate["ratios"]["itl_p50"], gate["ratios"]["itl_mean"]) == pytest.approx((2.0, 2.0))
    assert result["ratios"]["itl_p50"] == pytest.approx(1.0)
    slow = figures(
        [r for arm in WITH_PRODUCTION for r in requests_of(arm, slower=1 + 5 * (arm == "rosemux"))],
        slices_of(SPEEDS, busy=0.5),
        FACTS,
    )
    assert slow["slo_attainment_drop"] > 50.0


def test_ratios_are_over_a_core_kept_awake_and_over_no_rosemux_at_all() -> None:
    result = given({Arm.ALONE: 1.1, Arm.STOCK: 0.5})
    assert result["ratios_over"] == Arm.AWAKE
    assert result["ratios"]["ttft_mean"] == pytest.approx(1.0)
    assert result["over_stock"]["rosemux"]["ratios"]["ttft_mean"] == pytest.approx(2.0)
    assert result["over_stock"]["alone"]["ratios"]["ttft_mean"] == pytest.approx(2.2)


def test_all_of_our_work_is_in_a_step_s_overhead() -> None:
    assert given()["step_overhead_us"] == pytest.approx(30.0)


def test_requests_are_counted_by_the_guest_steps_that_they_met() -> None:
    result = given()
    assert result["steps_met"] == {0: 90, 1: 10}
    assert result["steps_met_p99"] == 1
    steps = [(0.0, 1.0), (1.0, 2.0), (5.0, 6.0)]
    waits = [(0.5, 1.0), (2.5, 1.0), (4.0, 1.5), (5.5, 0.1)]
    requests = [
        msgspec.structs.replace(FIRST, due_s=due_s, sent_s=due_s, ttft_s=ttft_s)
        for due_s, ttft_s in waits
    ]
    assert blocking_histogram(requests, steps) == {0: 1, 1: 2, 2: 1}


def test_steps_that_end_while_the_client_is_late_meet_no_request() -> None:
    steps = [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    late = msgspec.structs.replace(FIRST, due_s=0.5, sent_s=2.5, ttft_s=3.0)
    assert blocking_histogram([late], steps) == {1: 1}
    assert blocking_histogram([msgspec.structs.replace(late, sent_s=None)], steps) == {}


def test_a_guest_that_launches_two_steps_after_an_arrival_is_convicted(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "slot")
    slot.grant()
    slot.pulse()
    guest = GuestSlot(slot.directory.path, token_limit=512)
    watch, clock, requests = StepWatch(slot.guest), MonotonicClock(), []
    guest.publish()
    for turn in range(20):
        sent_s = clock.now()
        slot.pulse(in_flight=1, waiting=1, oldest_waiting_arrival_ns=1, requests_total=turn + 1)
        before = slot.guest().steps_finished
        for _ in range(2):
            guest.decide()
            guest.launched(decodes=1, prefill_tokens=0)
            guest.finished()
        ttft_s = clock.now() - sent_s
        slot.pulse(requests_total=turn + 1)
        guest.decide()
        guest.launched(decodes=1, prefill_tokens=0)
        guest.finished()
        guest.publish()
        watch.look(before)
        requests.append(msgspec.structs.replace(FIRST, due_s=sent_s, sent_s=sent_s, ttft_s=ttft_s))
    guest.close()
    met = blocking_histogram(requests, watch.steps_s)
    assert met == {2: 20}
    assert guest.steps.met.counts[2:] == [20, 0, 0], "and it says the same of itself"
    slices = [msgspec.structs.replace(each, steps_met=met) for each in slices_of(SPEEDS, busy=0.5)]
    interval = figures(requests_of(Arm.ROSEMUX), slices, FACTS)["steps_met_beyond_interval"]
    judged = verdicts(measured(steps_met_beyond_interval=interval), requests=5000)
    assert judged["steps_met_p99"] is GoalVerdict.MISSED


def test_a_percentile_of_a_histogram_is_a_number_that_occurs() -> None:
    assert percentile_of({0: 98, 1: 1, 7: 1}, 99) == 1
    assert percentile_of({0: 97, 1: 1, 7: 2}, 99) == 7
    assert percentile_of({}, 99) is None


def test_steps_that_the_page_no_longer_has_are_counted_as_unseen() -> None:
    latest_ns = ((1_000_000_000, 2_000_000_000), (2_500_000_000, 3_000_000_000))
    page = Guest(steps_finished=4, latest_steps_ns=latest_ns)
    watch = StepWatch(lambda: page)
    assert watch.look(4) == 4
    assert (watch.steps_s, watch.missed) == ([], 0)
    assert watch.look(3) == 4
    assert (watch.steps_s, watch.missed) == ([(2.5, 3.0)], 0)
    assert watch.look(0) == 4
    assert (watch.steps_s[1:], watch.missed) == ([(1.0, 2.0), (2.5, 3.0)], 2)


def test_nothing_is_in_flight_between_a_last_token_and_the_next_request() -> None:
    first, second, late = (
        msgspec.structs.replace(
            requests_of(Arm.ALONE)[0], due_s=due_s, ttft_s=1.0, itl_s=(0.5, 0.5)
        )
        for due_s in (1.0, 2.0, 9.0)
    )
    assert idle_s([second, first], start_s=0.0, end_s=10.0) == pytest.approx(7.0)
    assert idle_s([late], start_s=0.0, end_s=10.0) == pytest.approx(9.0)
    assert idle_s([], start_s=0.0, end_s=10.0) == 10.0


def measured(**changes: Any) -> dict[str, Any]:
    names = ("ttft_p50", "ttft_mean", "ttft_p99", "itl_p50", "itl_mean", "itl_p99")
    return {
        "intervals": dict.fromkeys(names, (0.99, 1.01)),
        "half_widths": dict.fromkeys(names, 0.01),
        "residual_interval": (0.93, 0.97),
        "production_busy_share": 0.7,
        "step_overhead_interval_us": (29.0, 31.0),
        "steps_met_beyond_interval": (0.0, 0.002),
        "steps_unseen_ratio": 0.01,
        "orders_balanced": True,
    } | changes


def test_a_verdict_needs_enough_requests_and_a_narrow_interval() -> None:
    assert set(verdicts(measured(), requests=5000).values()) == {GoalVerdict.MET}
    few = verdicts(measured(), requests=4999)
    assert few["ttft_p50"] is few["itl_p99"] is GoalVerdict.OPEN
    blind = verdicts(measured(steps_unseen_ratio=0.8), requests=5000)
    assert blind["steps_met_p99"] is GoalVerdict.OPEN
    wide = measured()
    wide["half_widths"]["itl_mean"] = 0.025
    assert verdicts(wide, requests=5000)["itl_mean"] is GoalVerdict.OPEN


INTERVALS = [
    ({"intervals": {"itl_mean": (1.03, 1.06)}}, {"intervals": {"itl_mean": (1.0, 1.03)}}),
    ({"residual_interval": (0.88, 0.91)}, {"residual_interval": (0.9, 0.97)}),
    ({"step_overhead_interval_us": (41.0, 42.0)}, {"step_overhead_interval_us": (39.0, 42.0)}),
    ({"steps_met_beyond_interval": (0.02, 0.03)}, {"steps_met_beyond_interval": (0.0, 0.03)}),
]
GOALS = ("itl_mean", "residual_share", "step_overhead_us", "steps_met_p99")


@pytest.mark.parametrize(
    ("missed", "open_", "goal"),
    [(*pair, goal) for pair, goal in zip(INTERVALS, GOALS, strict=True)],
)
def test_a_goal_is_missed_beyond_its_interval_and_open_within_it(
    missed: dict[str, Any], open_: dict[str, Any], goal: str
) -> None:
    def verdict(changes: dict[str, Any]) -> GoalVerdict:
        result = measured()
        for name, value in changes.items():
            result[name] = result[name] | value if isinstance(value, dict) else value
        return verdicts(result, requests=5000)[goal]

    assert verdict(missed) is GoalVerdict.MISSED
    assert verdict(open_) is GoalVerdict.OPEN


def test_orders_out_of_balance_or_intervals_that_are_not_there_give_no_verdict() -> None:
    unbalanced = verdicts(measured(orders_balanced=False), requests=5000)
    assert set(unbalanced.values()) == {GoalVerdict.OPEN}
    none = verdicts(
        measured(
            intervals={},
            half_widths={},
            residual_interval=None,
            step_overhead_interval_us=None,
            steps_met_beyond_interval=None,
        ),
        requests=5000,
    )
    assert set(none.values()) == {GoalVerdict.OPEN}


@pytest.mark.parametrize(
    ("busy", "interval", "verdict"),
    [
        (0.5, (0.93, 0.97), GoalVerdict.OPEN),
        (0.5, (0.8, 0.9), GoalVerdict.MISSED),
        (0.68, (0.93, 0.97), GoalVerdict.MET),
        (0.8, (0.8, 0.9), GoalVerdict.OPEN),
    ],
)
def test_a_share_up_to_seventy_percent_busy_is_met_only_by_a_production_so_busy(
    busy: float, interval: tuple[float, float], verdict: GoalVerdict
) -> None:
    result = measured(residual_interval=interval, production_busy_share=busy)
    assert verdicts(result, requests=5000)["residual_share"] is verdict


def test_rounds_of_an_unfinished_cycle_are_left_out() -> None:
    arms = (Arm.AWAKE, Arm.ROSEMUX)
    slices = [
        msgspec.structs.replace(each, round=turn)
        for turn in range(3)
        for each in slices_of(SPEEDS, busy=0.5)
        if each.arm in arms and each.round == 0
    ]
    requests = [
        msgspec.structs.replace(each, block=turn)
        for turn in range(3)
        for arm in arms
        for each in requests_of(arm, slower=5.0 if turn == 2 and arm is Arm.ROSEMUX else 1.0)
        if each.block == 0
    ]
    result = figures(requests, slices, replace(FACTS, arms=arms))
    assert (result["rounds"], result["rounds_of_an_unfinished_cycle"]) == (2, 1)
    assert result["orders_balanced"]
    assert result["ratios"]["ttft_mean"] == pytest.approx(1.0)
    first = [each for each in slices if each.round == 0], [r for r in requests if r.block == 0]
    assert not figures(first[1], first[0], replace(FACTS, arms=arms))["orders_balanced"]


def test_known_speeds_explain_an_arm_that_met_a_slower_machine_more_often() -> None:
    """The machine is 1.8 times slower in one slice of `rosemux` in three, and in one in six of the
    other arm: what is left of the ratio is the arm's own 1.1."""
    arms, rounds = (Arm.AWAKE, Arm.ROSEMUX), range(12)
    slow = {Arm.AWAKE: (0, 6), Arm.ROSEMUX: (1, 4, 7, 10)}
    speed = {(arm, turn): 1.8 if turn in slow[arm] else 1.0 for arm in arms for turn in rounds}
    slices = [
        msgspec.structs.replace(each, round=turn, loops_s=(0.004 * speed[each.arm, turn],) * 2)
        for turn in rounds
        for each in slices_of(SPEEDS, busy=0.5)
        if each.arm in arms and each.round == 0
    ]
    requests = [
        msgspec.structs.replace(each, block=turn)
        for arm in arms
        for turn in rounds
        for each in requests_of(arm, slower=speed[arm, turn] * (1.1 if arm is Arm.ROSEMUX else 1.0))
        if each.block == 0
    ]
    result = figures(requests, slices, replace(FACTS, arms=arms))
    assert result["machine_slower_ratio"] == pytest.approx(1.8 ** (2 / 12))
    adjusted, measured_as_it_was = result["half_widths"], result["unadjusted"]["half_widths"]
    assert result["ratios"]["ttft_mean"] == pytest.approx(1.1, abs=0.02)
    assert result["unadjusted"]["ratios"]["ttft_mean"] > 1.15
    assert adjusted["ttft_mean"] < measured_as_it_was["ttft_mean"] / 2


def test_attainment_is_of_all_requests_with_an_interval_over_rounds() -> None:
    late = [
        msgspec.structs.replace(each, ttft_s=1.0)
        if each.block == 1 and (each.trace_index or 0) < 5
        else each
        for each in requests_of(Arm.ROSEMUX)
    ]
    others = [r for arm in WITH_PRODUCTION if arm is not Arm.ROSEMUX for r in requests_of(arm)]
    result = figures([*others, *late], slices_of(SPEEDS, busy=0.5), FACTS)
    assert result["slo_attainment_drop"] == pytest.approx(5.0)
    low, high = result["slo_attainment_drop_interval"]
    assert low < 0.0 < 5.0 < high, "two rounds that differ say hardly anything"


def test_latencies_rest_on_requests_that_every_arm_replayed() -> None:
    requests = [r for arm in WITH_PRODUCTION for r in requests_of(arm)]
    late = replace_index(requests_of(Arm.ROSEMUX)[0], index=50)
    result = figures([*requests, late], slices_of(SPEEDS, busy=0.5), FACTS)
    assert result["arms"]["rosemux"]["requests"] == 100


def replace_index(request: ProductionRequest, *, index: int) -> ProductionRequest:
    return msgspec.structs.replace(request, trace_index=index, ttft_s=30.0)


@pytest.mark.parametrize("policy", [*(IN_ROUNDS[arm].policy for arm in Arm), RECLAIM])
def test_the_agent_takes_every_arms_policy(policy: dict[str, Any]) -> None:
    settings = SlotConfig(name="slot", policy=policy).policy
    plain = {name: value for name, value in policy.items() if not isinstance(value, dict)}
    assert {name: getattr(settings, name) for name in plain} == plain


def test_production_alone_means_no_rollouts() -> None:
    assert all(not SETTINGS[arm].rollouts and SETTINGS[arm].production for arm in UNMIXED)


@pytest.mark.parametrize("changes", [each.policy for each in SETTINGS.values()] + [RECLAIM])
def test_the_agent_takes_the_rule_of_every_arm(changes: dict[str, Any], tmp_path: Path) -> None:
    paths = SimpleNamespace(pages=tmp_path, run=tmp_path)
    slot = ServingSlot(
        parts=SimpleNamespace(paths=paths),  # type: ignore[arg-type]
        ports=SlotPorts(production=1, guest=2, agent=3),
        isolation=NO_ISOLATION,
        vllm=None,  # type: ignore[arg-type]
    )
    slot.shipped = False
    slot._write_agent_config(slot.experiment(ServiceLevel(ttft_s=0.25, itl_s=0.05)) | changes)
    assert load_agent_config(tmp_path / "agent.yaml", environment={}).unsafe_experiments


def slot_in(folder: Path) -> ServingSlot:
    return ServingSlot(
        parts=SimpleNamespace(paths=SimpleNamespace(pages=folder, run=folder)),  # type: ignore[arg-type]
        ports=SlotPorts(production=1, guest=2, agent=3),
        isolation=NO_ISOLATION,
        vllm=None,  # type: ignore[arg-type]
    )


def test_the_shipped_agent_has_every_default_but_the_slo(
    tmp_path: Path,
) -> None:
    slot = slot_in(tmp_path)
    slot._write_agent_config(slot.policy(LEVEL))
    config = load_agent_config(tmp_path / "agent.yaml", environment={})
    assert not config.unsafe_experiments
    settings = config.slots[0].policy
    shipped = SlotSettings()
    assert settings.budget.enforced
    assert settings == replace(shipped, ttft_slo_s=LEVEL.ttft_s, itl_slo_s=LEVEL.itl_s)
    assert [arm for arm in Arm if IN_ROUNDS[arm].shipped] == [*UNMIXED, Arm.ROSEMUX]
    assert not any(IN_ROUNDS[arm].policy for arm in Arm if IN_ROUNDS[arm].shipped)


def test_other_rules_teach_the_shipped_agent_nothing(tmp_path: Path) -> None:
    slot = slot_in(tmp_path)
    folders = set()
    for shipped in (False, True):
        slot.shipped = shipped
        slot._write_agent_config(slot.policy(LEVEL))
        folders.add(load_agent_config(tmp_path / "agent.yaml", environment={}).state_dir)
    assert len(folders) == 2


def test_the_shipped_agent_s_state_can_outlive_the_run(tmp_path: Path) -> None:
    slot = slot_in(tmp_path)
    slot.shipped_state = tmp_path / "kept"
    for slot.shipped in (False, True):
        slot._write_agent_config(slot.policy(LEVEL))
        state = load_agent_config(tmp_path / "agent.yaml", environment={}).state_dir
        assert (state == slot.shipped_state) is slot.shipped


def test_a_gpu_has_no_room_for_a_third_engine() -> None:
    gpu = find_hardware(HardwareKind.REHEARSAL)
    assert arms_on(CpuHardware(), ESSENTIAL) == ESSENTIAL
    assert arms_on(gpu, tuple(Arm))[0] is Arm.ALONE
    assert baseline(arms_on(gpu, tuple(Arm))) is Arm.ALONE
    assert baseline(ESSENTIAL) is Arm.AWAKE


def test_a_gpu_s_residual_is_what_steps_leave_and_its_time_share_is_not_known() -> None:
    on_gpu = [
        msgspec.structs.replace(each, production_core_s=each.production_busy_s, guest_core_s=None)
        for each in slices_of(SPEEDS, busy=0.5)
    ]
    found = residual_figures(on_gpu, Arm.ROSEMUX, base=Arm.ALONE)
    assert found["residual_share"] == pytest.approx(0.76)
    assert found["time_share"] is found["pace_ratio"] is None
    assert json.dumps(found, allow_nan=False)
