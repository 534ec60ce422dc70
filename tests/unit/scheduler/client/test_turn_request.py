"""Wrong arguments of a client's calls: the caller's own error, with field and value."""

from typing import Any

import numpy as np
import pytest

from harvester.contracts.errors import ConfigError
from harvester.contracts.wire.rollouts import SamplingParams, VersionPin
from scheduler.client.rollout_client import AsyncRolloutClient
from scheduler.client.turn_request import announcement_of, request_of, trajectory_of

PROMPT, SAMPLING = [4, 5], {"max_tokens": 3}


@pytest.mark.parametrize(
    "token_ids",
    [
        np.array([4, 5, 6]),
        np.array([4, 5, 6], dtype=np.uint8),
        [np.int64(4), 5, np.int32(6)],
        range(4, 7),
        iter((4, 5, 6)),
    ],
)
def test_integers_of_any_kind_are_token_ids(token_ids: Any) -> None:
    assert request_of(token_ids, SAMPLING, {})[0].token_ids == (4, 5, 6)


@pytest.mark.parametrize(
    ("token_ids", "why"),
    [
        (None, "token_ids: give a sequence of token ids, not None"),
        (5, "token_ids: give a sequence of token ids, not 5"),
        (np.array(5), r"token_ids: give a sequence of token ids, not array\(5\)"),
        ("45", "token_ids: give a sequence of token ids, not '45'"),
        (b"45", "token_ids: give a sequence of token ids, not b'45'"),
        ({4: 5}, r"token_ids: give a sequence of token ids, not \{4: 5\}"),
        ({4, 5}, "token_ids: give a sequence of token ids"),
        (["a"], r"token_ids\[0\]`; given: 'a'"),
        ([4, 1.5], r"token_ids\[1\]`; given: 1.5"),
        (np.array([4.0]), r"token_ids\[0\]`; given: 4.0"),
        ([4, None], r"got `null` - at `\$.token_ids\[1\]"),
        ([True], r"token_ids\[0\]`; given: True"),
        (np.array([[4, 5]]), r"token_ids\[0\]`; given: \[4, 5\]"),
        ([object()], "token_ids: object is no JSON value"),
        ([], r"token_ids: 0 tokens, .*; given: \[\]"),
        ([-1], r"token_ids: ids lie between .*; given: \[-1\]"),
        ([4] * 100 + [1 << 40], r"token_ids: ids lie between .*; given: \[4, 4, .*\.\.\.$"),
    ],
)
def test_a_value_that_is_no_prompt_is_named(token_ids: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        request_of(token_ids, SAMPLING, {})


def test_numbers_of_numpy_are_sampling_parameters_and_options() -> None:
    sampling = {
        "max_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "stop_token_ids": np.array([7, 8]),
        "seed": np.uint32(1),
    }
    options = {"weight_version": np.int64(0), "priority": np.int16(2)}
    request, *_ = request_of(PROMPT, sampling, options)
    assert request.weight_version.exact == 0, "no pin would take any version"
    given = request.sampling_params
    assert (given.max_tokens, given.temperature, given.seed) == (3, 0.5, 1)
    assert (given.stop_token_ids, request.priority) == ((7, 8), 2)


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (None, "sampling: give SamplingParams or a mapping, not None"),
        ("x", "sampling: give SamplingParams or a mapping, not 'x'"),
        ({"max_tokens": "3"}, "sampling_params.max_tokens`; given: '3'"),
        ({"max_tokens": 0}, "sampling_params.max_tokens: between .*; given: 0"),
        ({"max_tokens": 3, "stop": [4]}, r"sampling_params.stop\[0\]`; given: 4"),
        ({"max_tokens": 3, "top_q": 0.5}, "sampling_params.top_q: no such field.*; given: 0.5"),
        ({"max_tokens": 3, "temperature": float("nan")}, "sampling_params: .*nan"),
        ({"max_tokens": 3, "temperature": np.float32("inf")}, "sampling_params: .*inf"),
        (SamplingParams(max_tokens=3, top_p=float("nan")), "sampling_params: .*nan"),
        ({"max_tokens": 3, "logit_bias": {(1, 2): 1.0}}, r"sampling_params: .*\(1, 2\)"),
        ({"max_tokens": 3, "n": 2}, "sampling_params.n: one turn per call"),
    ],
)
def test_a_value_that_is_no_sampling_is_named_and_no_number_is_left_out(
    sampling: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        request_of(PROMPT, sampling, {})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"weight_version": ""}, "weight_version: .*; given: ''"),
        ({"weight_version": []}, r"weight_version: .*; given: \[\]"),
        ({"weight_version": 1.0}, "weight_version: .*; given: 1.0"),
        ({"weight_version": True}, "weight_version.exact`; given: True"),
        ({"weight_version": -1}, "weight_version.exact: between .*; given: -1"),
        ({"weight_version": {"minimun": 1}}, "did you mean 'minimum'.*; given: 1"),
        ({"request_id": 5}, "request_id`; given: 5"),
        ({"request_id": "a\nb"}, "request_id: .*; given: 'a"),
        ({"trajectory": 5}, "trajectory: give a string; given: 5"),
        ({"trajectory": "a\nb"}, "trajectory: .*; given: 'a"),
        ({"priority": "high"}, "priority`; given: 'high'"),
        ({"on_interrupt": "stop"}, "on_interrupt`; given: 'stop'"),
    ],
)
def test_a_value_that_is_no_option_is_named(options: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        request_of(PROMPT, SAMPLING, options)


def test_values_none_and_an_empty_name_stand_for_the_default() -> None:
    request, trajectory, _ = request_of(
        PROMPT, SAMPLING, {"request_id": "", "trajectory": None, "weight_version": None}
    )
    assert (request.weight_version, trajectory) == (VersionPin(), request.request_id)
    assert request.request_id


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"version": None}, "got `null` - at `\\$.version`"),
        ({"version": 1.0}, "version`; given: 1.0"),
        ({"version": 0}, "version`; given: 0"),
        ({"store": 5}, "store`; given: 5"),
        ({"store": "a/b"}, "store 'a/b': use 1 to 64 letters"),
        ({"state_hash": object()}, "state_hash: object is no JSON value"),
    ],
)
def test_a_value_that_is_no_announcement_is_named(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        announcement_of(**{"version": 1, "store": "s", **given})


def test_a_version_of_numpy_is_announced() -> None:
    assert announcement_of(version=np.int64(7), store="s").version == 7


@pytest.mark.parametrize("name", [None, 5, "", "a\nb"])
def test_a_value_that_names_no_trajectory_is_named(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"trajectory: .*; given: "):
        trajectory_of(name)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"gateway": None}, "gateway None: give a URL"),
        ({"gateway": "http://"}, "gateway 'http://': give a URL"),
        ({"gateway": "http://g:99999"}, "gateway 'http://g:99999': give a URL"),
        ({"gateway": "http://a b"}, "gateway 'http://a b': give a URL"),
        ({"gateway": "http://user:word@g"}, "give a URL"),
        ({"job": 5}, "job 5: use 1 to 64 letters"),
        ({"job": "a b"}, "job 'a b': use 1 to 64 letters"),
        ({"silence_s": "2"}, "silence_s: '2'"),
        ({"silence_s": float("nan")}, "silence_s: .*nan"),
        ({"retries": 5}, "retries: 5"),
        ({"engines": "token"}, "engines: 'token'"),
        ({"dedicated": ["http://e"]}, "dedicated: .*http://e"),
        ({"dedicated": {"e": "e:8000"}}, "dedicated: e 'e:8000': give a URL"),
        ({"fallback": "no"}, "fallback: 'no'"),
    ],
)
async def test_a_value_that_is_no_setting_of_a_client_is_named(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        AsyncRolloutClient(**{"gateway": "http://127.0.0.1:1", "job": "job", **given})
