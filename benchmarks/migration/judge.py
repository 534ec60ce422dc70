"""Judges a run by what the client received, what engines sent, and what the weights say. Pure.

lost               turns without a whole answer: no reply, an error status, a stream without its
                   end, an abort without a token, unless their pin excuses it (pin_judge.py) and
                   the client asked again; and turns that lack tokens which their engines' streams
                   had before them and behind them
duplicated         turns with tokens that no engine made at their place (a token twice), two ends,
                   two different answers to one request id, two first attempts, or a choice that
                   no one asked for; replies that say two things of one token
wrong_span         spans that span_judge.py finds wrong
resampled_tokens   tokens that an engine's stream had given to the gateway IN_FLIGHT_S before it
                   ended, or before its tap may have been too late to see that, and that the next
                   attempt did not go on from
truncated_by_place turns that end as `length` below their limit or behind an EOS, stop token or
                   stop string, as `stop` without one, or as `abort` with tokens: where a turn ran
                   decided how long it is
overrun            turns that go on behind an EOS, stop token or stop string, or beyond their limit
broken_setting     turns whose tokens or text break a sampling setting (settings_judge.py), or whose
                   text, or reasoning, content and calls (chat_judge.py), are not those of their
                   tokens, and attempts that were asked for with another setting than the client's;
                   the seed of one that goes on from output differs, and samples of one request
                   count theirs up
lost_to_others     turns among the lost and truncated that were on an engine while a poison request
                   failed it, or that were blamed for it (422)
poison_passed      poison requests that were not answered with an error
pin_broken         spans older than the version that their request asked for at least, or of another
                   than it asked for; turns with `equal_numerics` on engines of other labels
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from benchmarks.migration.chat_judge import content_of, wrong_parts
from benchmarks.migration.evidence import MoveEvidence
from benchmarks.migration.pin_judge import (
    PinExcuse,
    breaks_pin,
    excuse,
    known_since,
    other_numerics,
)
from benchmarks.migration.records import AttemptRecord, RequestRecord
from benchmarks.migration.replies import Reply, replies
from benchmarks.migration.rollout_routes import RolloutRoute, choice_name
from benchmarks.migration.settings_judge import (
    broken_setting,
    stopped_at,
    wrong_attempt_settings,
    wrong_text,
)
from benchmarks.migration.span_judge import SpanJudge, held_hashes
from benchmarks.migration.tap_spans import UNTOLD
from benchmarks.migration.verdict import MigrationVerdict

IN_FLIGHT_S = 0.05
"""Tokens this young may not have been read when their stream ended. Below the time for which the
gateway lets tokens wait to be read together: all that has come must be read at a cut."""


def judged(evidence: MoveEvidence) -> MigrationVerdict:
    verdict = MigrationVerdict()
    known = known_since(evidence.announced, evidence.attempts, evidence.held)
    attempts: dict[str, list[AttemptRecord]] = defaultdict(list)
    for attempt in sorted(evidence.attempts, key=lambda one: (one.began_s, one.number)):
        attempts[choice_name(attempt.request_id)].append(attempt)
    verdict.attempt_ends = dict(
        Counter(
            f"{one.end} {one.status}" + " aborted" * (one.finish_reason == "abort")
            for one in evidence.attempts
        ).most_common()
    )
    turns: dict[str, list[RequestRecord]] = defaultdict(list)
    for request in evidence.requests:
        turns[request.request_id].append(request)
    # Requests for one turn of a trajectory, in their order.
    asks: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for request in sorted(evidence.requests, key=lambda one: one.sent_s):
        asks[request.trajectory, *request.body["token_ids"]].append(request.request_id)
    hashes = held_hashes(evidence.held)
    failures = _poisoned(evidence, attempts)
    answers: Counter[str] = Counter()
    for name, asked in sorted(turns.items()):
        if asked[-1].trajectory in evidence.poison:
            answers[str(asked[-1].status)] += 1
            if asked[-1].status < 400:
                verdict.note("poison_passed", name, f"status {asked[-1].status}")
            continue
        verdict.asked_twice += len(asked) > 1
        last = asked[-1]
        for index in range(last.samples):
            choice = last.choice_name(index)
            one = _TurnJudge(
                verdict, evidence, choice, index, asked, attempts[choice], hashes, failures, known
            )
            one.judge(asked_again=asks[last.trajectory, *last.body["token_ids"]][-1] != name)
        if more := replies(last).keys() - set(range(last.samples)):
            verdict.note("duplicated", name, f"choices that no one asked for: {sorted(more)}")
    verdict.poison = dict(answers)
    names = {one.trajectory for one in evidence.requests} - evidence.poison
    verdict.trajectories = len(names)
    return verdict


def _poisoned(
    evidence: MoveEvidence, attempts: Mapping[str, Sequence[AttemptRecord]]
) -> list[AttemptRecord]:
    """Attempts of poison that failed their engine."""
    names = {one.request_id for one in evidence.requests if one.trajectory in evidence.poison}
    return [one for name in sorted(names) for one in attempts.get(name, ()) if one.end != "whole"]


@dataclass(slots=True)
class _TurnJudge:
    verdict: MigrationVerdict
    evidence: MoveEvidence
    name: str
    index: int
    """The choice of its request."""
    asked: Sequence[RequestRecord]
    attempts: Sequence[AttemptRecord]
    hashes: Mapping[str, set[str]]
    poisoned: Sequence[AttemptRecord]
    known: Mapping[int, float]
    """Time since which each version was surely published."""

    def judge(self, *, asked_again: bool) -> None:
        last = self.asked[-1]
        reply = Reply.of(last, self.index)
        self._count(last, reply)
        excused = excuse(self.asked, reply, self.evidence.announced)
        if excused is not None:
            _add(self.verdict.pins, excused)
        if excused in (PinExcuse.REFUSED, PinExcuse.GONE) and asked_again:
            return
        if self._lost(last, reply) or self._truncated(last, reply, excused):
            self._to_others(last)
        if self._twice(reply):
            return
        self._chain(last, reply, excused)
        self._attempt_settings(last)
        made = self._made()
        spans = SpanJudge(self.verdict, self.evidence, self.name, self.hashes)
        spans.judge(reply, made, last.body["sampling_params"])
        self._pins(last, reply, made)

    def _count(self, last: RequestRecord, reply: Reply) -> None:
        verdict, sampling = self.verdict, last.body["sampling_params"]
        verdict.turns += 1
        verdict.tokens += len(reply.token_ids)
        verdict.samples += last.samples > 1
        _add(verdict.routes, last.route.label)
        verdict.called_turns += bool(reply.calls)
        for kind in last.pins:
            _add(verdict.pins, kind)
        went_on = [one for one in self.attempts if self._offset(one) > 0]
        verdict.moves += len(went_on)
        verdict.moved_turns += bool(went_on)
        if went_on:
            pins = [f"{kind} pin" for kind in last.pins]
            for name in (*_settings(sampling), last.route.label, *pins):
                _add(verdict.settings, name)

    def _note(self, counter: str, what: str, by: int = 1) -> None:
        self.verdict.note(counter, self.name, what, by)

    def _offset(self, attempt: AttemptRecord) -> int:
        return len(attempt.context) - len(self.asked[-1].body["token_ids"])

    def _lost(self, last: RequestRecord, reply: Reply) -> bool:
        if last.status != 200:
            self._note("lost", f"status {last.status} {last.error} {last.reply[:160]}")
        elif not reply.whole or not reply.finish_reasons:
            self._note("lost", f"no end: {last.error}")
        elif reply.finish_reasons[-1] == "abort" and not reply.token_ids:
            self._note("lost", f"aborted: {reply.fault}")
        else:
            return False
        return True

    def _truncated(self, last: RequestRecord, reply: Reply, excused: PinExcuse | None) -> bool:
        reason = reply.finish_reasons[-1]
        sampling = last.body["sampling_params"]
        ends = set(sampling.get("stop_token_ids") or ())
        if not sampling.get("ignore_eos"):
            ends |= self.evidence.ends
        ids = reply.token_ids
        stopped = stopped_at(sampling, ids, self.evidence.text)
        behind = stopped is not None and stopped < len(ids)
        if behind or any(token in ends for token in ids[:-1]) or len(ids) > last.max_tokens:
            self._note("overrun", f"{len(ids)} tokens of {last.max_tokens}, stopped at {stopped}")
        early = {
            "length": len(ids) < last.max_tokens or ids[-1] in ends or stopped == len(ids),
            "stop": not ids or (ids[-1] not in ends and stopped is None),
        }.get(reason, True)
        broken = broken_setting(
            sampling,
            ids,
            ends=frozenset(ends),
            forced_end=self.evidence.forced_end,
            text=self.evidence.text,
            content=content_of(ids) if self._parsed(last) else ids,
        )
        if not broken and (reply.text, reply.reasoning, reply.calls) != (None, None, {}):
            self.verdict.judged_texts += 1
            judge = wrong_parts if self._parsed(last) else wrong_text
            broken = judge(last, ids, reply, ends=frozenset(ends), text=self.evidence.text)
        if broken:
            self._note("broken_setting", broken)
        early = early and excused is not PinExcuse.CUT
        if early:
            self._note("truncated_by_place", f"{reason} after {len(ids)} tokens: {reply.fault}")
        return early

    def _parsed(self, last: RequestRecord) -> bool:
        return last.route is RolloutRoute.CHAT and self.evidence.parses_chats

    def _to_others(self, last: RequestRecord) -> None:
        beside = any(
            one.engine == bad.engine and one.began_s <= bad.ended_s <= one.ended_s + IN_FLIGHT_S
            for bad in self.poisoned
            for one in self.attempts
        )
        if beside or last.status == 422:
            self._note("lost_to_others", f"status {last.status}")

    def _twice(self, reply: Reply) -> bool:
        """A request id has one turn, one end and one answer, however often it is sent."""
        numbers = [one.number for one in self.attempts]
        earlier = [Reply.of(before, self.index) for before in self.asked[:-1]]
        if len(set(numbers)) < len(numbers):
            self._note("duplicated", f"served twice: attempts {numbers}")
        elif len(reply.finish_reasons) > 1:
            self._note("duplicated", f"ends {reply.finish_reasons}")
        elif reply.contradiction:
            self._note("duplicated", reply.contradiction)
        elif any(_differs(before, reply) for before in earlier):
            self._note("duplicated", "two answers to one request id")
        else:
            return False
        return True

    def _chain(self, last: RequestRecord, reply: Reply, excused: PinExcuse | None) -> None:
        """The attempts, each from where the one before had come to, give the client's tokens."""
        prompt = last.body["token_ids"]
        output: list[int] = []
        for before, attempt in zip((None, *self.attempts), self.attempts, strict=False):
            offset = self._offset(attempt)
            if before is not None:
                self._resampled(before, offset)
            output = output[:offset] + attempt.token_ids
            went_on = attempt.context[len(prompt) :]
            if attempt.context[: len(prompt)] != prompt or went_on != reply.token_ids[:offset]:
                differs = reply.whole and reply.finish_reasons
                if differs and last.status == 200:
                    self._note("duplicated", f"attempt {attempt.number} went on from other tokens")
                    return
        if last.status != 200 or not reply.finish_reasons:
            return
        if excused is PinExcuse.CUT and self.attempts:
            # As if another attempt had gone on from the reply.
            self._resampled(self.attempts[-1], len(reply.token_ids))
            output = output[: len(reply.token_ids)]
        matcher = SequenceMatcher(a=output, b=reply.token_ids, autojunk=False)
        differing = {tag for tag, *_ in matcher.get_opcodes() if tag != "equal"}
        if differing & {"delete", "replace"}:
            self._note("lost", f"tokens of engines are missing: {matcher.get_opcodes()[:4]}")
        if differing & {"insert", "replace"}:
            self._note("duplicated", f"tokens of no engine: {matcher.get_opcodes()[:4]}")

    def _attempt_settings(self, last: RequestRecord) -> None:
        """Engines get the client's settings; only the seed differs behind output."""
        for attempt in self.attempts:
            goes_on = self._offset(attempt) > 0
            for name in wrong_attempt_settings(last, self.index, attempt, goes_on=goes_on):
                note = f"attempt {attempt.number} has {name} {attempt.sampling.get(name)!r}"
                self._note("broken_setting", note)

    def _resampled(self, before: AttemptRecord, offset: int) -> None:
        start = self._offset(before)
        read_s = before.ended_s - before.late_s - IN_FLIGHT_S
        read = sum(n for at_s, n in before.passed if at_s <= read_s)
        sent = len(before.token_ids)
        if (again := start + read - offset) > 0:
            self._note("resampled_tokens", f"from {offset}, {before.engine} had {sent}", again)
        self.verdict.worst_late_s = max(self.verdict.worst_late_s, before.late_s)
        self.verdict.in_flight_tokens += max(0, start + sent - offset - max(0, again))

    def _pins(self, last: RequestRecord, reply: Reply, made: Mapping[int, AttemptRecord]) -> None:
        arrived_s = self.asked[0].sent_s
        newest = max((v for v, known_s in self.known.items() if known_s <= arrived_s), default=0)
        for span in reply.spans:
            untold = span["version"] == UNTOLD
            if not untold and breaks_pin(last.pin, span["version"], newest=newest):
                self._note("pin_broken", f"{span} for {last.pin}, {newest} was the newest")
        engines = [each.engine for _, each in sorted(made.items())]
        required = last.body.get("equal_numerics", False)
        if others := other_numerics(required, engines, self.evidence.numerics):
            self._note("pin_broken", f"numerics {others} for {required}: {engines[:1]}")

    def _made(self) -> dict[int, AttemptRecord]:
        """The attempt that made each token."""
        made: dict[int, AttemptRecord] = {}
        for attempt in self.attempts:
            offset = self._offset(attempt)
            made |= dict.fromkeys(range(offset, offset + len(attempt.token_ids)), attempt)
        return made


def _settings(sampling: Mapping[str, Any]) -> list[str]:
    usual = {"max_tokens", "temperature", "seed", "stop_token_ids", "logprobs"}
    return sorted(set(sampling) - usual) or ["plain"]


def _differs(before: Reply, after: Reply) -> bool:
    """Whether an answer is another than an earlier one, of which its client may lack the end."""
    if before.finish_reasons:
        fields = ("token_ids", "logprobs", "finish_reasons", "spans")
        differs = any(getattr(before, name) != getattr(after, name) for name in fields)
        return differs and bool(after.finish_reasons)
    return before.token_ids != after.token_ids[: len(before.token_ids)]


def _add(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1
