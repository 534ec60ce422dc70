"""Streamed text without its stop string, and the identity of a trajectory in many dialects."""

from itertools import pairwise
from typing import Any, cast

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.wire.rollouts import (
    Choice,
    FinishReason,
    GenerateRequest,
    SamplingParams,
)
from scheduler.gateway.text_routes import (
    SESSION_HEADERS,
    StoppedText,
    trajectory_of,
    without_stop,
)


def text(*stops: str, include: bool = False) -> StoppedText:
    sampling = SamplingParams(max_tokens=9, stop=stops, include_stop_str_in_output=include)
    return StoppedText(GenerateRequest(request_id="r", token_ids=(1,), sampling_params=sampling))


def sent(held: StoppedText, pieces: list[str], *, stop: str | None) -> str:
    parts = [held.feed(piece, Choice()) for piece in pieces[:-1]]
    reason = FinishReason.STOP if stop else FinishReason.LENGTH
    parts.append(held.feed(pieces[-1], Choice(finish_reason=reason, stop_reason=stop)))
    return "".join(parts)


@given(
    st.text("abE", max_size=20),
    st.sampled_from(["END", "E", "ENDE"]),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_no_character_of_a_stop_string_is_ever_sent(body: str, stop: str, cuts: list[int]) -> None:
    body = body.replace("E", "e")
    whole = body + stop
    edges = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    pieces = [whole[a:b] for a, b in pairwise(edges)] or [whole]
    assert sent(text(stop), pieces, stop=stop) == body


def test_text_that_only_begins_like_a_stop_string_is_sent_whole() -> None:
    assert sent(text("END"), ["aE", "N", "x"], stop=None) == "aENx"
    assert sent(text("END"), ["aEN"], stop=None) == "aEN"


def test_a_stop_string_that_is_wanted_stays() -> None:
    assert sent(text("END", include=True), ["aEND"], stop=None) == "aEND"
    assert without_stop("aEND", "END") == "a"
    assert without_stop("aEND", 17) == "aEND"


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_a_trajectory_is_named_by_any_framework_s_header(header: str) -> None:
    request = make_mocked_request("POST", "/", headers={header: "episode-7"})
    assert trajectory_of(request, "r", "ignored") == "episode-7"


def test_a_session_in_the_body_or_the_request_itself_names_it_else() -> None:
    request = make_mocked_request("POST", "/")
    assert trajectory_of(request, "r", "s") == "s"
    assert trajectory_of(request, "r") == "r"
    with pytest.raises(PeerProtocolError, match="session_id"):
        trajectory_of(request, "r", cast(Any, 7))
