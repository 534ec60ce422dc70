"""Our side of the engine's protocol against vLLM's own models of it. Starts no engine."""

from importlib import import_module

import msgspec
import pytest

from coserve.vllm.capabilities import capabilities, installed_vllm_version
from harvester.contracts.ids import EngineId, JobId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import GenerateRequest, SamplingParams
from scheduler.gateway.engines.generate_body import generate_body
from scheduler.gateway.engines.stream import EventStream
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.requests import REFUSED_FIELDS, REFUSED_SAMPLING_FIELDS
from tests.compat.upstream_versions import UPSTREAM_VERSIONS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def protocol():
    pytest.importorskip("vllm")
    version = capabilities(installed_vllm_version()).version
    routes = UPSTREAM_VERSIONS[version].token_routes_module
    return import_module(routes.replace("api_router", "protocol"))


def stream_models(protocol):
    """Upstream's chunk and its choice, which have these names from 0.32, and before it others."""
    if hasattr(protocol, "GenerateTokensStreamChoice"):
        return protocol.GenerateTokensStreamResponse, protocol.GenerateTokensStreamChoice
    return protocol.GenerateStreamResponse, protocol.GenerateResponseStreamChoice


def test_reads_a_chunk_as_vllm_writes_it(protocol) -> None:
    response_model, choice_model = stream_models(protocol)
    # Before 0.32 a log-probability names its token by text alone.
    entry = {"token_id": 7, "token": "token_id:7", "logprob": -0.25, "rank": 1}
    choice = choice_model(
        index=0,
        token_ids=[7],
        finish_reason="length",
        logprobs={"content": [{**entry, "top_logprobs": [entry]}]},
    )
    chunk = response_model(request_id="r", choices=[choice])
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
    assert taken.cache_salt == body["cache_salt"] != ""
    assert params.extra_args == {"rosemux_trajectory": "job/t"}


def test_every_field_of_vllms_request_is_honoured_or_refused_by_name(protocol) -> None:
    """A field that vLLM adds is decided on here before its version is supported."""
    sampling = import_module("vllm.sampling_params").SamplingParams.__struct_fields__
    ours = {
        GenerateRequest: (set(protocol.GenerateRequest.model_fields), REFUSED_FIELDS),
        SamplingParams: (set(sampling), REFUSED_SAMPLING_FIELDS),
    }
    for struct, (theirs, refused) in ours.items():
        public = {name for name in theirs if not name.startswith("_")}
        assert public <= {*struct.__struct_fields__, *refused}
        assert not {*struct.__struct_fields__} & {*refused}
