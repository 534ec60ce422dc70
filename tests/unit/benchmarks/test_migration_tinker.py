"""Turns by Tinker's route before the judge of benchmarks.migration.faults."""

import base64
import json
import struct
from collections.abc import Callable
from copy import deepcopy

import pytest

from benchmarks.migration.pin_judge import Announcement, PinExcuse
from benchmarks.migration.rollout_routes import RolloutRoute, sent
from benchmarks.migration.tap_spans import with_tap_spans
from benchmarks.migration.tinker_reply import sequences
from tests.unit.benchmarks.migration_case import LOGPROB, OUTPUT, SPANS, Case, sampling

NAME = "0123456789abcdef.3..0"
PINNED = "0123456789abcdef.3.1.0"


def message(field: int, content: bytes) -> bytes:
    """A protobuf field of less than 128 bytes."""
    return bytes((field << 3 | 2, len(content))) + content


def sequence(ids: list[int], *, is_length: bool = True, logprobs: int | None = None) -> bytes:
    scored = [LOGPROB] * (len(ids) if logprobs is None else logprobs)
    told = bytes((1 << 3, is_length)) + message(2, struct.pack(f"<{len(ids)}i", *ids))
    return message(1, told + message(3, struct.pack(f"<{len(scored)}f", *scored)))


def encoded(reply: bytes) -> str:
    return base64.b64encode(reply).decode()


def error(category: str, reason: str = "version 1 is past") -> str:
    return json.dumps({"error": reason, "category": category})


def sampled(case: Case, *replies: bytes, name: str = NAME) -> None:
    """The case's turn, asked for by Tinker's route, whose reply tells no spans."""
    sampling(case, logprobs=1)
    case.request.route, case.request.events = RolloutRoute.TINKER, []
    case.request.body["request_id"] = case.truths_of_last = name
    for one in case.attempts:
        one.request_id = name
    case.request.reply = encoded(b"".join(replies) or sequence(OUTPUT))


def asked_again(case: Case) -> None:
    """The answer was there, and its client asked for it once more."""
    sampled(case)
    case.extra.append(deepcopy(case.request))
    case.request.sent_s = 40.0


def asked_again_while_it_runs(case: Case) -> None:
    asked_again(case)
    case.extra[0].status, case.extra[0].reply, case.extra[0].broken_off = 0, "", True


def in_two_samples(case: Case) -> None:
    sampled(case, sequence(OUTPUT), sequence(OUTPUT))
    sampling(case, n=2)
    second = deepcopy(case.attempts)
    for index, attempts in enumerate((case.attempts, second)):
        for one in attempts:
            one.request_id = f"{NAME}.{index}"
    case.attempts = [*case.attempts, *second]


def unmoved(case: Case) -> None:
    """All of it by e0 at version 1."""
    del case.attempts[1]
    case.attempts[0].token_ids, case.attempts[0].passed = list(OUTPUT), [(11.0, len(OUTPUT))]


def pinned(case: Case) -> None:
    unmoved(case)
    sampled(case, name=PINNED)
    case.request.body["weight_version"] = {"exact": 1, "wait_s": 60.0}


def weights_that_no_one_told(case: Case) -> None:
    sampled(case)
    del case.held[1]


@pytest.mark.parametrize(
    ("settle", "turns", "unknown"),
    [
        (sampled, 1, 0),
        (asked_again, 1, 0),
        (asked_again_while_it_runs, 1, 0),
        (in_two_samples, 2, 0),
        (pinned, 1, 0),
        (weights_that_no_one_told, 1, 1),
    ],
)
def test_a_turn_by_tinker_s_route_is_acquitted_and_was_looked_at(
    settle: Callable[[Case], None], turns: int, unknown: int
) -> None:
    case = Case()
    settle(case)
    verdict = case.verdict()
    assert case.counted() == {}, verdict.findings
    assert verdict.routes == {"tinker": turns}
    assert verdict.judged_tokens == (0 if unknown else turns * len(OUTPUT))
    assert verdict.unknown_weights_spans == unknown


def test_spans_are_those_of_the_taps() -> None:
    case = Case()
    sampled(case)
    case.attempts[0].token_ids = OUTPUT[:5]  # Two of them are not gone on from.
    (found,) = with_tap_spans([case.request], case.attempts, case.held)
    told = {name: each for name, each in SPANS[0].items() if name != "numerics"}
    assert found.tap_spans[0][0] == told
    assert found.tap_spans[0][1]["engine"] == "e1"
    assert [found.tap_spans[0][1][name] for name in ("start", "end", "version")] == [3, 8, 2]


def refused(case: Case, category: str = "server") -> None:
    """Pinned to a version that is not served, and asked for again by another sampler."""
    sampled(case)
    again = deepcopy(case.request)
    case.extra.append(again)
    case.request.body["request_id"] = PINNED
    case.request.body["weight_version"] = {"exact": 2, "wait_s": 60.0}
    case.announced[2] = Announcement(90.0, 91.0)
    case.request.sent_s, case.request.ended_s = 1.0, 61.5
    case.request.reply = error(category)
    case.truths_of_last, again.sent_s = NAME, 70.0


def gone(case: Case) -> None:
    refused(case, "user")
    case.request.body["weight_version"]["exact"] = 1
    case.request.ended_s, case.announced[2] = 5.0, Announcement(3.0, 4.0)


def ended_early(case: Case) -> None:
    """Its route has no form for tokens that are no whole sample."""
    gone(case)
    case.request.reply = error("server", "the turn ended early: version 1 is served nowhere")


@pytest.mark.parametrize(
    ("settle", "counted"),
    [
        (refused, PinExcuse.REFUSED),
        (gone, PinExcuse.GONE),
        (ended_early, PinExcuse.GONE),
    ],
)
def test_a_pinned_sampler_that_is_refused_is_excused(
    settle: Callable[[Case], None], counted: str
) -> None:
    case = Case()
    settle(case)
    assert case.counted() == {}, case.verdict().findings
    assert case.verdict().pins[counted] == 1


def a_token_missing(case: Case) -> None:
    sampled(case, sequence([*OUTPUT[:4], *OUTPUT[5:]]))
    sampling(case, max_tokens=len(OUTPUT) - 1)
    case.truths = case.truths[1:]


def a_token_twice(case: Case) -> None:
    sampled(case, sequence([*OUTPUT[:4], *OUTPUT[3:]]))
    sampling(case, max_tokens=len(OUTPUT) + 1)
    case.truths = [*case.truths, case.truths[0]]


def a_logprob_missing(case: Case) -> None:
    sampled(case, sequence(OUTPUT, logprobs=len(OUTPUT) - 1))


def of_other_weights(case: Case) -> None:
    sampled(case)
    case.truths = [*case.truths[:4], deepcopy(case.truths[4]), *case.truths[5:]]
    object.__setattr__(case.truths[4], "logprob", LOGPROB - 0.1)


def weights_that_the_store_has_not(case: Case) -> None:
    sampled(case)
    case.held[1].state_hash = "h9"


def a_sample_missing(case: Case) -> None:
    in_two_samples(case)
    case.request.reply = encoded(sequence(OUTPUT))


def a_sample_too_many(case: Case) -> None:
    sampled(case, sequence(OUTPUT), sequence(OUTPUT))


def a_broken_promise(case: Case) -> None:
    sampled(case)
    case.request.reply = error("server", "the turn ended early: it was aborted")


def a_promise_forgotten(case: Case) -> None:
    asked_again(case)
    case.request.status, case.request.reply = 410, '{"error": "no promise"}'


def another_answer(case: Case) -> None:
    asked_again(case)
    case.extra[0].reply = encoded(sequence([*OUTPUT[:7], 77]))


def other_logprobs(case: Case) -> None:
    asked_again(case)
    case.extra[0].reply = encoded(sequence(OUTPUT, logprobs=len(OUTPUT) - 1))


def sampled_anew(case: Case) -> None:
    asked_again(case)
    case.attempts += deepcopy(case.attempts)


def a_stop_without_a_stop_token(case: Case) -> None:
    sampled(case, sequence(OUTPUT, is_length=False))


def of_another_version_than_its_sampler(case: Case) -> None:
    pinned(case)
    case.request.body["weight_version"]["exact"] = 2
    case.announced[2] = Announcement(-3.0, -2.0)


def refused_too_early(case: Case) -> None:
    refused(case)
    case.request.ended_s = 50.0


def ended_early_while_it_is_the_newest(case: Case) -> None:
    ended_early(case)
    case.announced[2] = Announcement(50.0, 51.0)


def gone_and_not_asked_again(case: Case) -> None:
    gone(case)
    case.extra.clear()
    case.attempts.clear()


@pytest.mark.parametrize(
    ("tamper", "counts"),
    [
        (a_token_missing, {"lost": 1}),
        (a_token_twice, {"duplicated": 1}),
        (a_logprob_missing, {"wrong_span": 1}),
        (of_other_weights, {"wrong_span": 1}),
        (weights_that_the_store_has_not, {"wrong_span": 1}),
        (a_sample_missing, {"lost": 1}),
        (a_sample_too_many, {"duplicated": 1}),
        (a_broken_promise, {"lost": 1}),
        (a_promise_forgotten, {"lost": 1}),
        (another_answer, {"duplicated": 1}),
        (other_logprobs, {"duplicated": 1}),
        (sampled_anew, {"duplicated": 1}),
        (a_stop_without_a_stop_token, {"truncated_by_place": 1}),
        (of_another_version_than_its_sampler, {"pin_broken": 1}),
        (refused_too_early, {"lost": 1}),
        (ended_early_while_it_is_the_newest, {"lost": 1}),
        (gone_and_not_asked_again, {"lost": 1}),
    ],
)
def test_the_judge_convicts_a_tampered_sample_of_just_that(
    tamper: Callable[[Case], None], counts: dict[str, int]
) -> None:
    case = Case()
    tamper(case)
    assert case.counted() == counts, case.verdict().findings


@pytest.mark.parametrize("reply", [b"\x0a\x05\x08", b"\x09\x01", b"\x0a\x80", b"\x08\x01\x0d\x01"])
def test_bytes_that_are_no_reply_are_refused(reply: bytes) -> None:
    with pytest.raises(ValueError, match=r"field .*at byte|a number without|is a message"):
        sequences(reply)


def test_a_long_sequence_is_read_whole() -> None:
    ids = list(range(200))
    packed = struct.pack(f"<{len(ids)}i", *ids)
    inner = b"\x08\x00\x12\xa0\x06" + packed
    size = len(inner)
    (read,) = sequences(b"\x0a" + bytes((size & 0x7F | 0x80, size >> 7)) + inner)
    assert (read.token_ids, read.logprobs, read.finish_reason) == (ids, [], "stop")


def test_a_sampler_and_its_request_are_named_apart() -> None:
    case = Case()
    sampled(case)
    told = sent(RolloutRoute.TINKER, case.request.body)
    assert (told["sampling_session_id"], told["seq_id"]) == ("0123456789abcdef.3.", 0)
