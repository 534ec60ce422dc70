"""Requests that the gateway accepts, and its messages about the others."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import PeerProtocolError
from scheduler.gateway.requests import (
    REFUSED_FIELDS,
    REFUSED_SAMPLING_FIELDS,
    UNKNOWN_VOCABULARY_TOKENS,
    checked_trajectory,
    decode_generate,
)

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


@pytest.mark.parametrize("given", [b"5", b'"greedy"', b"[1]", b"true"])
def test_sampling_that_is_no_object_is_refused_by_its_name(given: bytes) -> None:
    body = b'{"token_ids": [1], "sampling_params": ' + given + b"}"
    with pytest.raises(PeerProtocolError, match=r"Expected `object`.* at `\$\.sampling_params`"):
        decode_generate(body)


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
        ({"request_id": "x" * 201}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"weight_version": {"newest": 1}}, r"weight_version\.newest: no such field"),
        ({"weight_version": {"minimun": 1}}, r"weight_version\.minimun: .* mean 'minimum'"),
        ({"weight_version": 3}, r'weight_version: 3 is no object; send {"exact": 3} for'),
        ({"weight_version": "3"}, r'weight_version: "3" is no object; send {"exact": 3} for'),
        ({"weight_version": True}, r'weight_version: true is no object; send {"exact": N} for'),
        ({"weight_version": "x" * 999}, r'weight_version: "x{63} is no object'),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"seed": -1}}, "seed"),
        ({"sampling_params": {"n": 0}}, "n: between"),
        ({"sampling_params": {"n": 1 << 20}}, "n: between"),
        ({"sampling_params": {"top_k": -2}}, "top_k"),
        ({"sampling_params": {"min_p": 1.5}}, "min_p"),
        ({"sampling_params": {"logprobs": 21}}, "logprobs: between"),
        ({"sampling_params": {"presence_penalty": 2.5}}, "presence_penalty"),
        ({"sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"sampling_params": {"min_tokens": 1000}}, "min_tokens"),
        ({"sampling_params": {"stop": ["a", ""]}}, "stop"),
        ({"sampling_params": {"bad_words": ["x"] * 257}}, "bad_words"),
        ({"sampling_params": {"stop": ["x" * 1025]}}, "stop, bad_words"),
        ({"sampling_params": {"extra_args": {"rosemux_emitted_tokens": [1]}}}, "gateway's own"),
        ({"sampling_params": {"extra_args": {"kv_transfer_params": {}}}}, "gateway's own"),
        ({"sampling_params": {"extra_args": {"a": "x" * 65536}}}, "at most 64, of 65536 bytes"),
        ({"sampling_params": {"extra_args": {str(a): 1 for a in range(65)}}}, "at most 64, of"),
        ({"sampling_params": {"stop_token_ids": [-4]}}, "stop_token_ids"),
        ({"sampling_params": {"stop_token_ids": list(range(300))}}, "stop_token_ids"),
        ({"sampling_params": {"stop_token_ids": [1 << 20]}}, "stop_token_ids"),
        ({"sampling_params": {"max_tokns": 2}}, "did you mean 'max_tokens'"),
        ({"sampling_params": {"n": True}}, r"sampling_params\.n"),
        ({"max_tokens": 4}, "max_tokens: send it in sampling_params"),
        ({"weight_versoin": {"exact": 3}}, "did you mean 'weight_version'"),
        ({"weight_version": {"exact": 3, "minimum": 5}}, "exact 3 is older than minimum 5"),
        ({"weight_version": {"exact_version": 3, "min_version": 5}}, "exact 3 is older"),
        ({"weight_version": {"exact": 3, "exact_version": 4}}, "differ; send one"),
        ({"weight_version": {"exact": 3, "max_lag": 1}}, "max_lag goes with no exact version"),
        ({"weight_version": {"wait_s": -1}}, r"wait_s: between 0 and 3600"),
        ({"weight_version": {"max_lag": -1}}, r"weight_version\.max_lag: between 0 and"),
        ({"equal_numerics": ""}, "equal_numerics: true, false, or a label"),
        ({"weight_version": {"exact": -3}}, r"weight_version\.exact: between 0 and"),
        ({"priority": 1 << 63}, "priority"),
        ({"nothing of the kind": 1}, "nothing of the kind: no such field"),
    ],
)
def test_names_the_field_that_is_wrong(changes, named) -> None:
    with pytest.raises(PeerProtocolError, match=named):
        decode_generate(_with(**changes))


_REFUSED = [
    *(({}, name, rule) for name, rule in REFUSED_FIELDS.items()),
    *(({"max_tokens": 4}, name, rule) for name, rule in REFUSED_SAMPLING_FIELDS.items()),
]


@pytest.mark.parametrize(("sampling", "name", "rule"), _REFUSED, ids=lambda of: str(of)[:30])
def test_every_field_of_vllm_that_is_not_honoured_is_refused_by_name_unless_it_changes_nothing(
    sampling, name, rule
) -> None:
    def body(value: Any) -> bytes:
        return _with(sampling_params={name: value}) if sampling else _with(**{name: value})

    for neutral in rule.may_be:
        assert decode_generate(body(neutral)).token_ids == (1, 2)
    for other in ("x", 7, {"a": 1}, ["long" * 100]):
        if not rule.may_be:
            assert decode_generate(body(other)).token_ids == (1, 2)
            continue
        with pytest.raises(PeerProtocolError, match=f"{name}: "):
            decode_generate(body(other))


@given(st.integers(1, 1 << 18), st.integers(-3, 3), st.booleans())
def test_no_engine_sees_an_id_that_its_vocabulary_does_not_have(vocabulary, beside, stop) -> None:
    token_id = vocabulary + beside
    sampling = {"stop_token_ids": [token_id if stop else 0]}
    body = _with(token_ids=[0, 0 if stop else token_id], sampling_params=sampling)
    if 0 <= token_id < vocabulary:
        assert decode_generate(body, vocabulary_tokens=vocabulary)
    else:
        with pytest.raises(PeerProtocolError, match=f"between 0 and {vocabulary - 1}"):
            decode_generate(body, vocabulary_tokens=vocabulary)


def test_says_so_where_no_vocabulary_is_known_yet() -> None:
    assert decode_generate(_with(token_ids=[UNKNOWN_VOCABULARY_TOKENS - 1]))
    with pytest.raises(PeerProtocolError, match="no engine has reported its vocabulary"):
        decode_generate(_with(token_ids=[UNKNOWN_VOCABULARY_TOKENS]))


NESTED = b"[" * 5000 + b"]" * 5000


@pytest.mark.parametrize(
    "deep",
    [
        b"[" * 100_000,
        b'{"features":' + b"[" * 100_000,
        b'{"request_id":"r","token_ids":[1],"sampling_params":{"max_tokens":1,"extra_args":{"a":'
        + NESTED
        + b"}}}",
    ],
)
def test_too_deep_nesting_is_a_protocol_error(deep: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        decode_generate(deep)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_protocol_error(body: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        decode_generate(body)


def test_a_session_is_the_header_or_the_request_id_and_bounded() -> None:
    assert checked_trajectory(None, request_id="r") == "r"
    assert checked_trajectory("s/1", request_id="r") == "s/1"
    with pytest.raises(PeerProtocolError, match="X-Session-ID"):
        checked_trajectory("x" * 201, request_id="r")
