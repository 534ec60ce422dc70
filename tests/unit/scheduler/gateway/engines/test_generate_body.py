"""The request to an engine: a prefix of one job, version and adapter is no other's."""

from typing import Any

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.gateway.engines.generate_body import generate_body
from scheduler.gateway.policy.turn_ledger import TurnLedger


def body(
    *,
    job: str = "a",
    version: int = 1,
    trajectory: str = "t",
    adapter: str | None = None,
    ended: tuple[str, ...] = (),
    state_hash: str = "",
) -> dict[str, Any]:
    sampling = SamplingParams(max_tokens=9)
    request = GenerateRequest(request_id="r", token_ids=(1, 2), sampling_params=sampling)
    turn = TurnLedger(JobId(job)).open(request, trajectory=TrajectoryId(trajectory))
    assert turn is not None
    attempt = turn.begin(engine=EngineId("e"), version=WeightVersion(version), numerics="")
    return generate_body(attempt, "r", 0, adapter, ended, state_hash=state_hash)


def test_job_version_and_adapter_each_have_a_salt_of_their_own() -> None:
    asked = (
        body(),
        body(job="b"),
        body(version=2),
        body(adapter="x"),
        body(adapter="x", version=2),
    )
    assert len({one["cache_salt"] for one in asked}) == len(asked)


def test_a_version_of_another_run_has_another_salt() -> None:
    """vLLM's tiers of KV on disk outlive the engines, and their files are named by these hashes."""
    runs = [body(state_hash=each)["cache_salt"] for each in ("", "0" * 32, "1" * 32)]
    assert len({*runs}) == 3
    assert body(state_hash="1" * 32)["cache_salt"] == runs[-1], "at every engine that holds it"


def test_trajectories_of_one_version_share_their_beginnings() -> None:
    one, other = body(trajectory="t"), body(trajectory="u")
    assert one["cache_salt"] == other["cache_salt"]


def test_a_request_names_the_job_and_trajectory_of_its_turn() -> None:
    said = body(job="a", trajectory="t7")["sampling_params"]["extra_args"]
    assert said == {"rosemux_trajectory": "a/t7"}, "sessions of two jobs may have one name"


def test_ended_trajectories_are_reported_with_the_engine_s_next_request() -> None:
    said = body(trajectory="t7", ended=("a/t5", "a/t6"))["sampling_params"]["extra_args"]
    assert said["rosemux_ended_trajectories"] == ("a/t5", "a/t6")
