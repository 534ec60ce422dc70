"""What a running attempt notices of its engine."""

import math

from harvester.contracts.ids import JobId, TrajectoryId
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.policy.trajectories import Turn, TurnCounters
from scheduler.service.turns import RunningAttempt


def _attempt() -> RunningAttempt:
    request = GenerateRequest(
        request_id="t-1", token_ids=(1,), sampling_params=SamplingParams(max_tokens=8)
    )
    turn = Turn(
        request=request,
        job=JobId("job"),
        trajectory=TrajectoryId("t"),
        counters=TurnCounters(),
    )
    return RunningAttempt(turn, began_s=10.0, heard_s=10.0)


def test_only_gaps_beyond_the_limit_are_pauses() -> None:
    attempt = _attempt()
    for now in (10.1, 10.2, 12.2, 12.3):
        attempt.hear(now=now, pause_s=0.5)
    assert math.isclose(attempt.paused_s, 2.0)
    assert attempt.heard_s == 12.3


def test_an_engine_without_a_gate_never_pauses() -> None:
    attempt = _attempt()
    attempt.hear(now=70.0, pause_s=math.inf)
    assert attempt.paused_s == 0.0
