"""Spans that the judge takes for right, for wrong, and for unknown."""

from benchmarks.migration.evidence import TokenTruth
from tests.unit.benchmarks.migration_case import (
    LOGPROB,
    OUTPUT,
    Case,
    sampling,
)


def test_a_tie_of_the_two_best_candidates_is_no_wrong_span() -> None:
    case = Case()
    case.truths = [TokenTruth(LOGPROB, 1e-4), *case.truths[1:]]
    assert case.counted() == {}
    assert case.verdict().ties == 1


def test_a_sampled_token_need_not_be_the_best() -> None:
    case = Case()
    sampling(case, temperature=1.0)
    case.truths = [TokenTruth(LOGPROB, 2.0)] * len(OUTPUT)
    assert case.counted() == {}


def test_a_candidate_at_the_edge_of_a_filter_may_be_in_or_out() -> None:
    case = Case()
    sampling(case, temperature=0.8, min_p=0.05)
    inside = TokenTruth(LOGPROB - 0.03, 2.0, edge_logprobs=(LOGPROB - 0.03, LOGPROB))
    case.truths = [inside, *case.truths[1:]]
    assert case.counted() == {}
    case.truths[0] = TokenTruth(LOGPROB - 0.06, 2.0, edge_logprobs=(LOGPROB - 0.06, LOGPROB - 0.03))
    assert case.counted() == {"wrong_span": 1}


def test_a_span_whose_weights_no_one_asked_for_is_counted_as_unknown() -> None:
    case = Case()
    del case.held[1]
    assert case.counted() == {}
    assert case.verdict().unknown_weights_spans == 1
