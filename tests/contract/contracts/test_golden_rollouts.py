"""The bytes between RL job, gateway and rollout engines."""

import msgspec
import pytest

from harvester.contracts.ids import EngineId, WeightVersion
from harvester.contracts.journal import Decided, Opened
from harvester.contracts.wire.rollouts import (
    AnnouncedVersion,
    Choice,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Logprobs,
    SamplingParams,
    Span,
    TokenLogprob,
    VersionPin,
    VersionSwitched,
    VersionSwitchState,
)

GOLDEN: list[tuple[msgspec.Struct, bytes]] = [
    (
        GenerateRequest(
            request_id="r",
            token_ids=(1, 2),
            sampling_params=SamplingParams(max_tokens=8, seed=3, stop_token_ids=(0,)),
            stream=True,
            weight_version=VersionPin(exact=WeightVersion(4)),
        ),
        (
            b'{"request_id":"r","token_ids":[1,2],"sampling_params":{"max_tokens":8,"seed":3,'
            b'"stop_token_ids":[0]},"stream":true,"weight_version":{"exact":4}}'
        ),
    ),
    (
        GenerateReply(
            request_id="r",
            choices=(
                Choice(
                    token_ids=(5,),
                    logprobs=Logprobs((TokenLogprob(5, -0.5),)),
                    finish_reason=FinishReason.STOP,
                    spans=(
                        Span(
                            start=0,
                            end=1,
                            version=WeightVersion(4),
                            engine=EngineId("e"),
                            numerics="n",
                        ),
                    ),
                ),
            ),
        ),
        (
            b'{"request_id":"r","choices":[{"index":0,"token_ids":[5],"logprobs":{"content":'
            b'[{"token_id":5,"logprob":-0.5}]},"finish_reason":"stop","stop_reason":null,"spans":[{"start":0,"end":1,'
            b'"version":4,"engine":"e","numerics":"n"}],"fault":"","weight_versions":null,"immovable":[],"routed_experts":null,"sampling_mask":null}]}'
        ),
    ),
    (
        AnnouncedVersion(version=WeightVersion(5), store="/store/job"),
        b'{"version":5,"store":"/store/job","state_hash":"","cut_open_turns":false}',
    ),
    (
        VersionSwitched(
            version=WeightVersion(5), engines={EngineId("e"): VersionSwitchState.SWITCHED}
        ),
        b'{"version":5,"engines":{"e":"switched"},"active":true}',
    ),
    (
        Opened(actor="a", policy="p", config={"k": 1}, config_hash="h", wall="w", version="1"),
        (
            b'{"type":"opened","schema":1,"actor":"a","policy":"p","config":{"k":1},"config_hash":"h",'
            b'"snapshot":null,"wall":"w","restart_needed":[],"missing":0,"t_s":null,"version":"1"}'
        ),
    ),
    (
        Decided(t_s=1.5, config_hash="h", sample={"k": 1}, effects=({"type": "x"},)),
        b'{"type":"decided","t_s":1.5,"config_hash":"h","sample":{"k":1},"effects":[{"type":"x"}]}',
    ),
]


@pytest.mark.parametrize(("record", "wire"), GOLDEN, ids=lambda value: type(value).__name__)
def test_writes_and_reads_the_agreed_bytes(record: msgspec.Struct, wire: bytes) -> None:
    assert msgspec.json.encode(record) == wire
    assert msgspec.json.decode(wire, type=type(record)) == record


def test_a_request_of_an_older_client_is_read_with_defaults() -> None:
    wire = b'{"request_id":"r","token_ids":[1],"sampling_params":{"max_tokens":2}}'
    request = msgspec.json.decode(wire, type=GenerateRequest)
    assert (request.weight_version, request.stream) == (VersionPin(), False)


@pytest.mark.parametrize("kind", [VersionPin, AnnouncedVersion])
def test_a_field_that_would_be_ignored_is_refused(kind: type[msgspec.Struct]) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"version":1,"store":"s","at_least":3}', type=kind)
