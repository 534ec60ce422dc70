"""Judge of the RL job: its turns, their tokens and the versions that they name. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite

from tests.soak.intervals import Interval, any_meets, downs, freezes
from tests.soak.parts import DEDICATED, GATEWAY
from tests.soak.records import (
    PieceBegun,
    PieceEnded,
    SoakRecord,
    TrajectoryEnded,
    TurnAnswer,
    TurnAttempt,
    TurnLost,
    VersionMade,
    VersionServed,
    of_kind,
)
from tests.soak.verdict import SoakVerdict

_AGAIN = frozenset((0, 200, 409, 429, 503))
"""Ends of an attempt after which the same request may be sent again; all others refuse a turn that
had nothing wrong."""
_VOCABULARY = 64


def judge_turns(
    records: Sequence[SoakRecord], made: Mapping[int, VersionMade], verdict: SoakVerdict
) -> None:
    """`made`: every version until the end of this piece."""
    answers: dict[str, list[TurnAnswer]] = defaultdict(list)
    for answer in of_kind(records, TurnAnswer):
        answers[answer.trajectory].append(answer)
    ended = {each.trajectory for each in of_kind(records, TrajectoryEnded)}
    lost = of_kind(records, TurnLost)
    for each in lost:
        verdict.note("lost_turns", f"{each.trajectory}-{each.turn}: {each.error}")
    if of_kind(records, PieceEnded):
        for name in sorted(answers.keys() - ended - {each.trajectory for each in lost}):
            verdict.note("lost_turns", f"{name}: its next turn has no answer")
    for name, turns in answers.items():
        _trajectory(name, turns, verdict)
        for turn in turns:
            _tokens(turn, verdict)
            _versions(turn, made, verdict)
    _attempts(records, answers, verdict)
    _figures(records, answers, verdict)


def judge_served(
    records: Sequence[SoakRecord], made: Mapping[int, VersionMade], verdict: SoakVerdict
) -> None:
    """At the end of a piece each engine holds the newest version, by its hash."""
    if not of_kind(records, PieceEnded) or not made:
        return
    newest, served = made[max(made)], of_kind(records, VersionServed)
    for each in served:
        if (each.version, each.state_hash) != (newest.version, newest.state_hash):
            verdict.note("not_served", f"{each.engine} holds {each.version}, not {newest.version}")
    if DEDICATED not in {each.engine for each in served}:
        verdict.note("not_served", "the dedicated engine was not asked")


def _trajectory(name: str, turns: list[TurnAnswer], verdict: SoakVerdict) -> None:
    for number, turn in enumerate(turns):
        if turn.turn != number:
            verdict.note("answered_twice", f"{name}: turn {turn.turn} is answer {number}")
            return
        if turn.repeated is not None and turn.repeated != turn.token_ids:
            verdict.note("answered_twice", f"{name}-{number}: the repeated answer differs")
    for before, turn in pairwise(turns):
        context = before.prompt + before.token_ids
        if turn.prompt[: len(context)] != context:
            verdict.note("broken_continuations", f"{name}-{turn.turn}")


def _tokens(turn: TurnAnswer, verdict: SoakVerdict) -> None:
    name, count = f"{turn.trajectory}-{turn.turn}", len(turn.token_ids)
    spans = sorted(turn.spans)
    ends = [0, *(end for _, end, *_ in spans)]
    wrong = {
        "logprobs": len(turn.logprobs) != count,
        "a logprob": not all(isfinite(each) and each <= 1e-6 for each in turn.logprobs),
        "a token": not all(0 <= each < _VOCABULARY for each in turn.token_ids),
        "spans": [start for start, *_ in spans] != ends[:-1] or ends[-1] != count,
        f"{count} tokens of {turn.max_tokens}": count > turn.max_tokens
        or (turn.finish_reason == "length" and count < turn.max_tokens),
        f"the end {turn.finish_reason}": turn.finish_reason not in ("length", "abort"),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            verdict.note("broken_replies", f"{name}: {what}")


def _versions(turn: TurnAnswer, made: Mapping[int, VersionMade], verdict: SoakVerdict) -> None:
    for _, _, version, engine in turn.spans:
        published = made.get(version)
        name = f"{turn.trajectory}-{turn.turn}: version {version} of {engine}"
        if published is None or published.begun_s > turn.ended_s:
            verdict.note("wrong_versions", f"{name} was not published")
        elif version < turn.minimum_version:
            verdict.note("wrong_versions", f"{name} below {turn.minimum_version}")


def _attempts(
    records: Sequence[SoakRecord],
    answers: Mapping[str, list[TurnAnswer]],
    verdict: SoakVerdict,
) -> None:
    gone, frozen = downs(records, GATEWAY), freezes(records, GATEWAY)
    documented = frozenset(s for piece in of_kind(records, PieceBegun) for s in piece.documented)
    for attempt in of_kind(records, TurnAttempt):
        name = f"{attempt.trajectory}-{attempt.turn} at {attempt.ended_s:.1f}"
        status, meets = attempt.status, any_meets(gone, attempt.sent_s, attempt.ended_s)
        if status not in documented | {0} or status not in _AGAIN:
            verdict.note("undocumented_refusals", f"{name}: {status} {attempt.error}")
        elif status in (0, 200) and not meets:
            verdict.note("broken_replies", f"{name}: {status} {attempt.error}")
        if attempt.received:
            _rejoined(attempt, answers.get(attempt.trajectory, ()), gone + frozen, verdict)


def _rejoined(
    attempt: TurnAttempt,
    answers: Sequence[TurnAnswer],
    struck: Sequence[Interval],
    verdict: SoakVerdict,
) -> None:
    """The same request finds its turn again, where the gateway has lived on."""
    for answer in answers:
        if answer.turn != attempt.turn or any_meets(struck, attempt.sent_s, answer.ended_s):
            continue
        if answer.token_ids[: len(attempt.received)] != attempt.received:
            name = f"{attempt.trajectory}-{attempt.turn}"
            verdict.note("broken_continuations", f"{name}: tokens of a broken stream changed")


def _figures(
    records: Sequence[SoakRecord], answers: Mapping[str, list[TurnAnswer]], verdict: SoakVerdict
) -> None:
    turns = [turn for each in answers.values() for turn in each]
    figures = verdict.figures
    for name, value in {
        "trajectories": sum(each.complete for each in of_kind(records, TrajectoryEnded)),
        "turns": len(turns),
        "turns_sent_again": len(of_kind(records, TurnAttempt)),
        "turns_of_several_engines": sum(len({s[3] for s in t.spans}) > 1 for t in turns),
        "turns_aborted": sum(turn.finish_reason == "abort" for turn in turns),
        "answers_repeated": sum(turn.repeated is not None for turn in turns),
        "tokens": sum(len(turn.token_ids) for turn in turns),
        "tokens_of_guests": sum(
            end - start for t in turns for start, end, _, engine in t.spans if "slot" in engine
        ),
    }.items():
        figures[name] = figures.get(name, 0) + value
