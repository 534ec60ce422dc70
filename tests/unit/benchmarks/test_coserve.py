import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks.coserve.arms import ALONE, IN_ROUNDS, RECLAIM, SETTINGS, WITH_PRODUCTION, Arm
from benchmarks.coserve.figures import Facts, figures, inconclusive
from benchmarks.coserve.residual import residual_figures
from benchmarks.coserve.rounds import Slice
from benchmarks.testbed.gpu_hardware import find_hardware
from benchmarks.testbed.hardware import CpuHardware, Kind
from benchmarks.testbed.production_request import ProductionRequest
from benchmarks.testbed.rotation import rotated
from benchmarks.testbed.slo import ServiceLevel
from benchmarks.testbed.slot import ServingSlot, SlotPorts
from coserve.guest.isolation import NO_ISOLATION
from harvester.config import SlotConfig, load_agent_config
from harvester.policy.settings import SlotSettings

FACTS = Facts(trace="given", requests_per_s=2.0, seed=1)
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


def slices_of(speeds: dict[Arm, int], *, busy: float) -> list[Slice]:
    return [
        Slice(
            arm=arm,
            round=turn,
            seconds=SECONDS,
            guest_tokens=round(speeds.get(arm, 0) * SECONDS),
            production_busy_s=busy * SECONDS,
            production_core_s=(busy + FRONT_END) * SECONDS,
            guest_core_s=GUEST_CORE.get(arm, 0.0) * SECONDS,
            decide_s_mean=1e-5,
        )
        for arm in Arm
        for turn in range(2)
    ]


def given(slower: dict[Arm, float] | None = None) -> dict[str, Any]:
    requests = [
        request
        for arm in WITH_PRODUCTION
        for request in requests_of(arm, slower=(slower or {}).get(arm, 1.0))
    ]
    speeds = {Arm.ROLLOUTS: 1000, Arm.ROSEMUX: 380, Arm.GATE_ONLY: 320}
    return figures(requests, slices_of(speeds, busy=0.5), FACTS)


def test_the_residual_is_what_steps_and_front_end_leave() -> None:
    result = given()
    assert result["production_busy_share"] == pytest.approx(0.5)
    assert result["production_core_share"] == pytest.approx(0.6)
    assert result["residual_share"] == pytest.approx(0.95)
    assert result["gate_only_residual_share"] == pytest.approx(0.8)


def test_a_slow_guest_differs_from_a_waiting_one() -> None:
    gate = given()["beside"]["gate_only"]
    assert (gate["time_share"], gate["pace_ratio"]) == pytest.approx((1.0, 0.8))
    halved = [
        replace(each, guest_core_s=each.guest_core_s / 2, guest_tokens=each.guest_tokens // 2)
        if each.arm is Arm.GATE_ONLY
        else each
        for each in slices_of({Arm.ROLLOUTS: 1000, Arm.GATE_ONLY: 400}, busy=0.5)
    ]
    waits = residual_figures(halved, Arm.GATE_ONLY, seed=1)
    assert (waits["time_share"], waits["pace_ratio"]) == pytest.approx((0.5, 1.0))
    assert waits["residual_share"] == pytest.approx(0.5)


def test_the_residual_share_has_the_spread_of_its_rounds() -> None:
    speeds = {Arm.ROLLOUTS: 1000, Arm.ROSEMUX: 380}
    alike = slices_of(speeds, busy=0.5)
    low, high = residual_figures(alike, Arm.ROSEMUX, seed=1)["residual_interval"]
    assert (low, high) == pytest.approx((0.95, 0.95))
    drifting = [
        replace(each, guest_tokens=each.guest_tokens * 2)
        if each.arm is Arm.ROLLOUTS and each.round == 1
        else each
        for each in alike
    ]
    found = residual_figures(drifting, Arm.ROSEMUX, seed=1)
    low, high = found["residual_interval"]
    assert (low, high) == pytest.approx((0.475, 0.95))
    assert low < found["residual_share"] < high


def test_one_round_has_no_spread_and_no_rollouts_no_share() -> None:
    one = [each for each in slices_of({}, busy=0.5) if each.round == 0]
    none = residual_figures(one, Arm.ROSEMUX, seed=1)
    assert none["residual_share"] is none["residual_interval"] is none["pace_ratio"] is None


def test_an_arm_as_fast_as_alone_has_ratios_of_one() -> None:
    result = given()
    assert list(result["ratios"].values()) == pytest.approx([1.0] * 4)
    assert result["slo_attainment_drop"] == pytest.approx(0.0)
    assert result["aa_p95"]["ttft_p99"] >= 1.0
    assert result["arms"]["alone"]["requests"] == 100


def test_a_slower_arm_shows_in_its_ratios_and_its_attainment() -> None:
    result = given({Arm.GATE_ONLY: 2.0})
    assert result["gate_only_ratios"]["itl_p50"] == pytest.approx(2.0)
    assert result["ratios"]["itl_p50"] == pytest.approx(1.0)
    assert result["gate_only_slo_attainment_drop"] > 50.0


def test_latencies_rest_on_requests_that_every_arm_replayed() -> None:
    requests = [r for arm in WITH_PRODUCTION for r in requests_of(arm)]
    late = replace_index(requests_of(Arm.ROSEMUX)[0], index=50)
    result = figures([*requests, late], slices_of({Arm.ROLLOUTS: 1}, busy=0.5), FACTS)
    assert result["arms"]["rosemux"]["requests"] == 100


def replace_index(request: ProductionRequest, *, index: int) -> ProductionRequest:
    return msgspec.structs.replace(request, trace_index=index, ttft_s=30.0)


def test_intervals_that_are_too_wide_are_named() -> None:
    intervals = {"ttft_p50": (0.98, 1.02), "ttft_p99": (0.9, 1.2), "itl_p99": None}
    assert inconclusive(intervals) == ["ttft_p99", "itl_p99"]


@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_every_arm_comes_once_in_each_round(rounds: int) -> None:
    plan: Sequence[tuple[Arm, int]] = list(rotated(tuple(Arm), rounds))
    assert len(set(plan)) == len(plan) == rounds * len(Arm)
    assert len({arm for arm, turn in plan[:: len(Arm)]}) == min(rounds, len(Arm))


@pytest.mark.parametrize("policy", [*(IN_ROUNDS[arm].policy for arm in Arm), RECLAIM])
def test_the_agent_takes_every_arms_policy(policy: dict[str, Any]) -> None:
    settings = SlotConfig(name="slot", policy=policy).policy
    plain = {name: value for name, value in policy.items() if not isinstance(value, dict)}
    assert {name: getattr(settings, name) for name in plain} == plain


def test_production_alone_means_no_rollouts() -> None:
    assert all(not SETTINGS[arm].rollouts and SETTINGS[arm].production for arm in ALONE)


@pytest.mark.parametrize("changes", [each.policy for each in SETTINGS.values()] + [RECLAIM])
def test_the_agent_takes_the_rule_of_every_arm(changes: dict[str, Any], tmp_path: Path) -> None:
    paths = SimpleNamespace(pages=tmp_path, run=tmp_path)
    slot = ServingSlot(
        parts=SimpleNamespace(paths=paths),  # type: ignore[arg-type]
        ports=SlotPorts(production=1, guest=2, agent=3),
        isolation=NO_ISOLATION,
        vllm=None,  # type: ignore[arg-type]
    )
    slot._write_agent_config(slot.policy(ServiceLevel(ttft_s=0.25, itl_s=0.05)) | changes)
    assert load_agent_config(tmp_path / "agent.yaml", environment={}).unsafe_experiments


def test_the_rounds_measure_the_shipped_rule_on_any_hardware() -> None:
    gpu = find_hardware(Kind.REHEARSAL)
    assert gpu.policy["epsilon"] > SlotSettings().epsilon, "the slot's own lets the guest step"
    assert IN_ROUNDS[Arm.ROSEMUX].policy["epsilon"] == SlotSettings().epsilon
    assert "epsilon" not in SETTINGS[Arm.ROSEMUX].policy, "other parts keep the slot's own"
    assert "epsilon" not in CpuHardware().policy


def test_a_gpu_s_residual_is_what_steps_leave_and_its_time_share_is_not_known() -> None:
    speeds = {Arm.ROLLOUTS: 1000, Arm.ROSEMUX: 380}
    on_gpu = [
        replace(each, production_core_s=each.production_busy_s, guest_core_s=math.nan)
        for each in slices_of(speeds, busy=0.5)
    ]
    found = residual_figures(on_gpu, Arm.ROSEMUX, seed=1)
    assert found["residual_share"] == pytest.approx(0.76)
    assert found["time_share"] is found["pace_ratio"] is None
    assert json.dumps(found, allow_nan=False)
