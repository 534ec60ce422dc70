"""Our side of the engine's protocol against vLLM's own models of it. Starts no engine."""

import msgspec
import pytest

from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.policy.trajectories import TurnLedger
from scheduler.service.engine import generate_body
from scheduler.service.stream import EventStream

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def protocol():
    return pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")


def test_reads_a_chunk_as_vllm_writes_it(protocol) -> None:
    entry = {"token_id": 7, "logprob": -0.25, "rank": 1}
    choice = protocol.GenerateTokensStreamChoice(
        index=0,
        token_ids=[7],
        finish_reason="length",
        logprobs={"content": [{**entry, "top_logprobs": [entry]}]},
    )
    chunk = protocol.GenerateTokensStreamResponse(request_id="r", choices=[choice])
    (read,) = EventStream().feed(f"data: {chunk.model_dump_json()}\n\n".encode())
    (got,) = read.choices
    assert (got.token_ids, got.finish_reason, read.fault) == ([7], "length", "")
    assert got.logprobs is not None
    assert got.logprobs.content is not None
    assert (got.logprobs.content[0].token_id, got.logprobs.content[0].logprob) == (7, -0.25)


def test_vllm_takes_the_request_that_we_send(protocol) -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.5, seed=3, stop_token_ids=(5,))
    request = GenerateRequest(request_id="r", token_ids=(1, 2), sampling_params=sampling)
    turn = TurnLedger(JobId("job")).open(request, trajectory=TrajectoryId("t"))
    assert turn is not None
    attempt = turn.begin(engine=EngineId("e"), version=WeightVersion(1), numerics="")
    body = msgspec.json.decode(msgspec.json.encode(generate_body(attempt, "r", 0)))
    taken = protocol.GenerateRequest.model_validate(body)
    assert taken.token_ids == [1, 2]
    assert taken.stream
    params = taken.sampling_params
    assert (params.max_tokens, params.temperature, params.seed) == (9, 0.5, 3)
    assert (params.logprobs, params.detokenize, params.stop_token_ids) == (1, False, [5])
