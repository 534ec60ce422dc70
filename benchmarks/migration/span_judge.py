"""Judges the spans of one turn: engine, version and weights of its tokens.

Wrong are spans that do not cover the tokens once and in order, that name another engine than the
one whose stream had the tokens, that name a version which the store has not, whose engine's workers
reported other weights than the store's hash of the version, without a log-probability for each
token, or with a token that the version's weights do not give: greedy, one that is not the best by
more than `TIE_NATS` after penalties, `min_tokens` and `logit_bias` over the whole output; any, one
whose reported log-probability is off by more than `LOGPROB_NATS`. Engines report
`processed_logprobs`: after those settings and the temperature, and over the tokens that a grammar
allows, so that there only one that is too low is wrong; that of a forced end of thinking is 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.migration.evidence import MoveEvidence
from benchmarks.migration.records import AttemptRecord, HeldRecord
from benchmarks.migration.replies import Reply
from benchmarks.migration.settings_judge import forced_places
from benchmarks.migration.tap_spans import UNTOLD
from benchmarks.migration.verdict import MigrationVerdict

TIE_NATS = 1e-3
"""Two best candidates this close are decided by rounding."""
LOGPROB_NATS = 1e-2
"""Engine and reference round differently; versions differ by far more."""


def held_hashes(held: Iterable[HeldRecord]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for one in held:
        found[one.identity].add(one.state_hash)
    return found


@dataclass(slots=True)
class SpanJudge:
    verdict: MigrationVerdict
    evidence: MoveEvidence
    name: str
    """The choice of the turn's request."""
    hashes: Mapping[str, set[str]]
    """Hashes of the weights that workers reported, by engine identity."""

    def judge(
        self, reply: Reply, made: Mapping[int, AttemptRecord], sampling: Mapping[str, Any]
    ) -> None:
        """`made`: the attempt that made each token."""
        self._spans(reply, made)
        self._tokens(reply, sampling)

    def _note(self, what: str, by: int = 1) -> None:
        self.verdict.note("wrong_span", self.name, what, by)

    def _spans(self, reply: Reply, made: Mapping[int, AttemptRecord]) -> None:
        if not reply.finish_reasons:
            return  # They come with the end.
        at = 0
        for span in reply.spans:
            if span["start"] != at or span["end"] <= at:
                self._note(f"{span} does not follow token {at}")
                return
            at = span["end"]
            self.verdict.spans += 1
            self._span_of_engine(span, made)
        if at != len(reply.token_ids):
            self._note(f"{len(reply.token_ids) - at} tokens without a span")

    def _span_of_engine(self, span: dict[str, Any], made: Mapping[int, AttemptRecord]) -> None:
        if span["version"] == UNTOLD:
            self.verdict.unknown_weights_spans += 1
            return
        published = self.evidence.hashes.get(span["version"])
        makers = {
            made[at].number: made[at] for at in range(span["start"], span["end"]) if at in made
        }
        for attempt in makers.values():
            if attempt.engine != span["engine"]:
                self._note(f"{span} was made by {attempt.engine}")
                return
            held = self.hashes.get(attempt.identity)
            if published is None:
                self._note(f"{span} is of a version that the store has not")
                return
            if held is None:
                self.verdict.unknown_weights_spans += 1
                return
            if held != {published}:
                self._note(f"{span}: its workers held {sorted(held)}")
                return
        self.verdict.judged_spans += 1

    def _tokens(self, reply: Reply, sampling: Mapping[str, Any]) -> None:
        """The weights of each span's version give its tokens."""
        truths = self.evidence.truths.get(self.name, ())
        if not reply.spans or any(span["version"] == UNTOLD for span in reply.spans):
            return
        if len({len(truths), len(reply.logprobs), len(reply.token_ids)}) > 1:
            found = (
                f"{len(reply.logprobs)} log-probabilities and {len(truths)} that the store gives"
            )
            self._note(f"{found} for {len(reply.token_ids)} tokens")
            return
        forced = forced_places(sampling, reply.token_ids, self.evidence.forced_end)
        greedy = sampling.get("temperature", 1.0) == 0
        wrong = set()
        for at, (truth, logprob) in enumerate(zip(truths, reply.logprobs, strict=True)):
            too_low = (each - logprob for each in (truth.logprob, *truth.edge_logprobs))
            off = min(max(0.0, low) if truth.gap_nats is None else abs(low) for low in too_low)
            if at in forced:
                off = abs(logprob)
            gap_nats = truth.gap_nats if greedy else None
            self.verdict.judged_tokens += 1
            self.verdict.judged_choices += gap_nats is not None
            bad = not off <= LOGPROB_NATS or (gap_nats or 0.0) > TIE_NATS
            if bad:
                wrong.add(
                    next((s["start"] for s in reply.spans if s["start"] <= at < s["end"]), -1)
                )
            else:
                self.verdict.worst_logprob_nats = max(self.verdict.worst_logprob_nats, off)
                self.verdict.ties += (gap_nats or 0.0) > 0
        if wrong:
            self._note(f"tokens of other weights, spans from {sorted(wrong)}", len(wrong))
