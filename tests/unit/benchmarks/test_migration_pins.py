"""Pins before the judge of benchmarks.migration.faults: what they excuse and what they bind."""

from collections.abc import Callable
from copy import deepcopy

import pytest

from benchmarks.migration.pin_judge import Announcement, PinExcuse
from tests.unit.benchmarks.migration_case import OUTPUT, SPANS, Case, attempt, span


def pinned(case: Case, exact: int) -> None:
    case.request.body["weight_version"] = {"exact": exact, "wait_s": 3.0}


def refused(case: Case, status: int = 409) -> None:
    """Pinned to a version that came too late, and asked for again without."""
    case.extra.append(deepcopy(case.request))
    case.extra[0].body["request_id"] = "t0-0-again1"
    case.extra[0].sent_s = 40.0
    case.truths_of_last = "t0-0-again1"
    for one in case.attempts:
        one.request_id = "t0-0-again1"
    pinned(case, 2)
    case.request.sent_s, case.request.ended_s = 1.0, 4.5
    case.request.status, case.request.retry_after, case.request.events = status, "1", []


def refused_when_asked_twice(case: Case) -> None:
    """The second request joins the turn of the first, whose patience it is."""
    refused(case)
    first = deepcopy(case.request)
    first.status, first.broken_off, first.ended_s = 0, True, 2.0
    case.extra.insert(0, first)
    case.request.sent_s = 2.0


def gone(case: Case) -> None:
    refused(case, 410)
    pinned(case, 1)
    case.request.ended_s = 9.5


def gone_in_its_stream(case: Case) -> None:
    gone(case)
    case.request.status = 200
    case.request.events = ['{"error": {"message": "past", "code": 410}}', "[DONE]"]


def cut(case: Case) -> None:
    """Its engine was lost behind three tokens, when no other one had the version any more."""
    case.say(OUTPUT[:3], SPANS[:1], "abort", fault="version 1 is served nowhere")
    del case.attempts[1]
    pinned(case, 1)
    case.request.ended_s = 20.0


def cut_beside_a_sample_that_is_gone(case: Case) -> None:
    cut(case)
    case.request.events.insert(-1, '{"error": {"message": "past", "code": 410}}')


def kept(case: Case) -> None:
    case.say(OUTPUT, [SPANS[0], span(3, len(OUTPUT), "e1", 1)])
    case.held[1].version, case.held[1].state_hash = 1, "h1"
    pinned(case, 1)


@pytest.mark.parametrize(
    ("settle", "counted"),
    [
        (refused, PinExcuse.REFUSED),
        (refused_when_asked_twice, PinExcuse.REFUSED),
        (gone, PinExcuse.GONE),
        (gone_in_its_stream, PinExcuse.GONE),
        (cut, PinExcuse.CUT),
        (cut_beside_a_sample_that_is_gone, PinExcuse.CUT),
        (kept, "exact"),
    ],
)
def test_an_excuse_of_an_exact_pin_is_counted_apart(
    settle: Callable[[Case], None], counted: str
) -> None:
    case = Case()
    settle(case)
    assert case.counted() == {}
    assert case.verdict().pins[counted] == 1


def cut_behind_a_token(case: Case, age_s: float) -> None:
    """Its engine had sent one more before it was lost."""
    cut(case)
    (last,) = case.attempts
    last.token_ids = OUTPUT[:4]
    last.passed.append((last.ended_s - age_s, 1))


def test_a_token_in_flight_to_a_turn_that_is_cut_is_none_that_it_has_lost() -> None:
    case = Case()
    cut_behind_a_token(case, 0.01)
    assert case.counted() == {}
    assert case.verdict().in_flight_tokens == 1


def lagging(case: Case, lag: int, *, since_s: float) -> None:
    """It arrived when version 2 had been published, and its first tokens are of version 1."""
    case.request.body["weight_version"] = {"max_lag": lag}
    case.request.sent_s = 5.0
    case.announced[2] = Announcement(since_s - 1.0, since_s)


def published_before(case: Case) -> None:
    lagging(case, 1, since_s=4.0)


def published_behind_its_arrival(case: Case) -> None:
    """The bound does not rise with later publishes."""
    lagging(case, 0, since_s=6.0)


def sent_again_behind_a_publish(case: Case) -> None:
    """The turn arrived with the first request."""
    lagging(case, 0, since_s=6.0)
    case.extra.append(deepcopy(case.request))
    case.extra[0].events, case.extra[0].status, case.extra[0].broken_off = [], 0, True
    case.request.sent_s = 7.0


def of_equal_numerics(case: Case) -> None:
    """It moved between engines of one label."""
    case.request.body["equal_numerics"] = True
    case.say(OUTPUT, [SPANS[0], span(3, len(OUTPUT), "guest", 2)])
    case.attempts[1].engine = "guest"


def of_the_label_that_was_asked_for(case: Case) -> None:
    of_equal_numerics(case)
    case.request.body["equal_numerics"] = "wide"


def tried_on_another_label(case: Case) -> None:
    """A failed attempt elsewhere made none of its tokens."""
    of_equal_numerics(case)
    failed = deepcopy(case.attempts[0])
    failed.number, failed.engine, failed.token_ids, failed.passed = 0, "e1", [], []
    case.attempts.insert(0, failed)


@pytest.mark.parametrize(
    ("settle", "kind"),
    [
        (published_before, "max_lag"),
        (published_behind_its_arrival, "max_lag"),
        (sent_again_behind_a_publish, "max_lag"),
        (of_equal_numerics, "equal_numerics"),
        (of_the_label_that_was_asked_for, "equal_numerics"),
        (tried_on_another_label, "equal_numerics"),
    ],
)
def test_a_turn_that_kept_its_bound_of_versions_or_numerics_is_acquitted(
    settle: Callable[[Case], None], kind: str
) -> None:
    case = Case()
    settle(case)
    assert case.counted() == {}, case.verdict().findings
    assert case.verdict().pins[kind] == 1
    assert case.verdict().settings[f"{kind} pin"] == 1


def older_than_its_lag(case: Case) -> None:
    lagging(case, 0, since_s=4.0)


def older_than_its_lag_by_the_tokens_of_another_turn(case: Case) -> None:
    """The announcement was not answered yet, but an engine had made tokens with the version."""
    lagging(case, 0, since_s=30.0)
    other = attempt("t9-0", 1, "e1", [], [20])
    other.identity, other.passed = "e1.2", [(4.0, 1)]
    case.attempts.append(other)


def moved_to_other_numerics(case: Case) -> None:
    case.request.body["equal_numerics"] = True


def begun_with_other_numerics(case: Case) -> None:
    of_equal_numerics(case)
    case.request.body["equal_numerics"] = "narrow"


def refused_with_a_lag(case: Case) -> None:
    refused(case)
    case.request.body["weight_version"] = {"max_lag": 0}


def cut_without_a_token_that_had_come(case: Case) -> None:
    cut_behind_a_token(case, 0.2)


def of_another_version(case: Case) -> None:
    pinned(case, 2)


def not_asked_again(case: Case) -> None:
    refused(case)
    case.extra.clear()
    case.attempts.clear()


def refused_before_its_patience_ended(case: Case) -> None:
    refused(case)
    case.request.ended_s = 3.9


def refused_for_ever(case: Case) -> None:
    refused(case)
    case.request.retry_after = ""


def refused_beside_its_version(case: Case) -> None:
    refused(case)
    case.request.sent_s, case.request.ended_s = 12.5, 16.0


def refused_without_a_pin(case: Case) -> None:
    refused(case)
    del case.request.body["weight_version"]


def refused_with_a_least_version(case: Case) -> None:
    refused(case)
    case.request.body["weight_version"] = {"minimum": 1}


def gone_while_it_is_the_newest(case: Case) -> None:
    gone(case)
    case.request.ended_s = 8.0


def cut_while_it_is_the_newest(case: Case) -> None:
    cut(case)
    case.announced[2] = Announcement(30.0)


def cut_without_a_reason(case: Case) -> None:
    cut(case)
    case.say(OUTPUT[:3], SPANS[:1], "abort")


@pytest.mark.parametrize(
    ("tamper", "counts"),
    [
        (cut_without_a_token_that_had_come, {"resampled_tokens": 1}),
        (of_another_version, {"pin_broken": 1}),
        (older_than_its_lag, {"pin_broken": 1}),
        (older_than_its_lag_by_the_tokens_of_another_turn, {"pin_broken": 1}),
        (moved_to_other_numerics, {"pin_broken": 1}),
        (begun_with_other_numerics, {"pin_broken": 1}),
        (refused_with_a_lag, {"lost": 1}),
        (not_asked_again, {"lost": 1}),
        (refused_before_its_patience_ended, {"lost": 1}),
        (refused_for_ever, {"lost": 1}),
        (refused_beside_its_version, {"lost": 1}),
        (refused_without_a_pin, {"lost": 1}),
        (refused_with_a_least_version, {"lost": 1}),
        (gone_while_it_is_the_newest, {"lost": 1}),
        (cut_while_it_is_the_newest, {"truncated_by_place": 1}),
        (cut_without_a_reason, {"truncated_by_place": 1}),
    ],
)
def test_the_judge_convicts_a_pin_that_excuses_nothing(
    tamper: Callable[[Case], None], counts: dict[str, int]
) -> None:
    case = Case()
    tamper(case)
    assert case.counted() == counts
