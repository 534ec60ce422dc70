"""What the gateway takes from a job, and what it says about the rest."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import PeerProtocolError
from scheduler.service.requests import checked_trajectory, decode_generate

GOOD: dict[str, Any] = {
    "request_id": "r",
    "token_ids": [1, 2],
    "sampling_params": {"max_tokens": 4, "temperature": 1.0, "seed": 3, "stop_token_ids": [7]},
    "weight_version": {"exact": 3},
}


def _with(**changes: Any) -> bytes:
    body = {**GOOD, **changes}
    sampling = changes.get("sampling_params")
    if sampling is not None:
        body["sampling_params"] = {**GOOD["sampling_params"], **sampling}
    return msgspec.json.encode(body)


def test_takes_a_request_and_what_is_always_so() -> None:
    request = decode_generate(_with(sampling_params={"n": 1, "logprobs": 1, "detokenize": False}))
    assert request.token_ids == (1, 2)
    assert request.weight_version.exact == 3


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [1 << 31]}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"weight_version": {"newest": 1}}, "newest"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"seed": -1}}, "seed"),
        ({"sampling_params": {"n": 2}}, "n"),
        ({"sampling_params": {"top_k": 5}}, "top_k"),
        ({"sampling_params": {"logprobs": None}}, "logprobs"),
        ({"sampling_params": {"stop_token_ids": [-4]}}, "stop_token_ids"),
        ({"sampling_params": {"stop_token_ids": list(range(300))}}, "stop_token_ids"),
    ],
)
def test_names_the_field_that_is_wrong(changes, named) -> None:
    with pytest.raises(PeerProtocolError, match=named):
        decode_generate(_with(**changes))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_protocol_error(body: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        decode_generate(body)


def test_a_session_is_the_header_or_the_request_id_and_bounded() -> None:
    assert checked_trajectory(None, request_id="r") == "r"
    assert checked_trajectory("s/1", request_id="r") == "s/1"
    with pytest.raises(PeerProtocolError, match="X-Session-ID"):
        checked_trajectory("x" * 201, request_id="r")
