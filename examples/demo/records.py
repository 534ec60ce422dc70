"""The demo's observations, as raw facts with their times. `result` draws the verdicts.

Times are CLOCK_MONOTONIC seconds. Files hold one JSON line per record, so that an interrupted run
keeps its records.
"""

from enum import StrEnum

import msgspec

from benchmarks.testbed.production_request import ProductionRequest


class DemoArm(StrEnum):
    SERVING_ONLY = "serving_only"
    FIXED = "fixed"
    HARVEST = "harvest"


class ArmBlock(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """One contiguous stretch of one arm; arms alternate in blocks."""

    arm: DemoArm
    index: int
    start_s: float
    end_s: float
    production_busy_share: float | None = None


class GrantSample(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """The contents of the slot's pages at one moment."""

    t_s: float
    arm: DemoArm
    block: int
    mode: str
    reason: str
    step_tokens_cap: int
    gate_open: bool
    gate_reason: str
    guest_tokens_total: int
    guest_running: int
    production_in_flight: int


class EngineGap(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of |log-probability differences| over tokens, trainer's recomputation against engine."""

    engine: str
    sum_abs: float
    tokens: int


class TrainingStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One step of the RL job."""

    arm: DemoArm
    block: int
    step: int
    end_s: float
    step_s: float
    rollout_s: float
    train_s: float
    publish_s: float
    switch_s: float
    reward_mean: float
    reward_se: float
    rollout_tokens: int
    tokens_by_engine: dict[str, int]
    gaps: tuple[EngineGap, ...]
    stale_tokens: int
    started: int
    completed: int
    lost: int
    duplicated: int
    version: int
    bytes_sent: int
    bytes_dense: int


Record = ArmBlock | ProductionRequest | GrantSample | TrainingStep
