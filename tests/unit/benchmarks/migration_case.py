"""One turn of benchmarks.migration that moved well, for tests that tamper with its record."""

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from benchmarks.migration.evidence import MoveEvidence, TokenTruth
from benchmarks.migration.judge import judged
from benchmarks.migration.pin_judge import Announcement
from benchmarks.migration.records import AttemptRecord, HeldRecord, RequestRecord
from benchmarks.migration.settings_judge import Text
from benchmarks.migration.tap_spans import with_tap_spans
from benchmarks.migration.verdict import CONVICTING, MigrationVerdict

PROMPT = [1, 10, 11]
OUTPUT = [20, 21, 22, 23, 24, 25, 26, 27]
STOP = 99
LOGPROB = -0.5
FORCED_END = [70, 71, 72]


def body(name: str, **sampling: Any) -> dict[str, Any]:
    given = {"max_tokens": len(OUTPUT), "temperature": 0.0, "stop_token_ids": [STOP]}
    return {"request_id": name, "token_ids": PROMPT, "sampling_params": given | sampling}


def logprob(token: int) -> float:
    """No other token may come within a forced end."""
    return 0.0 if token in FORCED_END else LOGPROB


def choice(ids: list[int], spans: list[dict[str, Any]], finish: str | None) -> dict[str, Any]:
    content = [{"token_id": one, "logprob": logprob(one)} for one in ids]
    return {
        "token_ids": ids, "logprobs": {"content": content}, "spans": spans,
        "finish_reason": finish, "fault": "",
    }  # fmt: skip


def span(start: int, end: int, engine: str, version: int) -> dict[str, Any]:
    return {"start": start, "end": end, "engine": engine, "version": version, "numerics": ""}


def attempt(
    name: str, number: int, engine: str, before: list[int], ids: list[int]
) -> AttemptRecord:
    began_s = 10.0 * number
    return AttemptRecord(
        engine=engine,
        request_id=name,
        number=number,
        context=PROMPT + before,
        sampling=body(name)["sampling_params"],
        began_s=began_s,
        status=200,
        identity=f"{engine}.{number}",
        token_ids=list(ids),
        passed=[(began_s + 1, len(ids))],
        finish_reason=None,
        end="whole",
        ended_s=began_s + 5,
    )


def letters(ids: Sequence[int]) -> str:
    """Token 20 is `a`, 21 is `b` and on; special tokens have no text."""
    return "".join(chr(ord("a") + one - 20) for one in ids if one >= 20)


NUMERICS = {"e0": "wide", "e1": "narrow", "guest": "wide"}
SPANS = [span(0, 3, "e0", 1), span(3, len(OUTPUT), "e1", 2)]


class Case:
    """One turn that began on e0 at version 1 and went on on e1 at version 2, streamed."""

    def __init__(self) -> None:
        name = "t0-0"
        self.request = RequestRecord(trajectory="t0", body=body(name), sent_s=0.0, status=200)
        self.attempts = [
            attempt(name, 1, "e0", [], OUTPUT[:3]),
            attempt(name, 2, "e1", OUTPUT[:3], OUTPUT[3:]),
        ]
        self.attempts[0].end = "broken"
        self.held = [
            HeldRecord(engine="e0", identity="e0.1", version=1, state_hash="h1"),
            HeldRecord(engine="e1", identity="e1.2", version=2, state_hash="h2"),
        ]
        self.extra: list[RequestRecord] = []
        self.announced = {1: Announcement(-20.0, -19.0), 2: Announcement(9.0, 12.0)}
        self.poison: frozenset[str] = frozenset()
        self.parses_chats = False
        self.text: Text = letters
        self.truths_of_last = name
        self.say(OUTPUT, SPANS)

    def say(
        self,
        ids: list[int],
        spans: list[dict[str, Any]],
        finish: str | None = "length",
        *,
        fault: str = "",
    ) -> None:
        self.truths = [TokenTruth(logprob(one), 0.0) for one in ids]
        half = len(ids) // 2
        events = [choice(ids[:half], [], None), choice(ids[half:], spans, finish)]
        events[-1]["fault"] = fault
        self.request.events = [json.dumps({"choices": [one]}) for one in events] + ["[DONE]"]

    def verdict(self) -> MigrationVerdict:
        requests = [*self.extra, self.request]
        evidence = MoveEvidence(
            requests=with_tap_spans(requests, self.attempts, self.held),
            attempts=self.attempts,
            held=self.held,
            hashes={1: "h1", 2: "h2"},
            truths={
                self.request.choice_name(index): self.truths
                for index in range(self.request.samples)
            }
            | {self.truths_of_last: self.truths},
            announced=self.announced,
            poison=self.poison,
            forced_end=FORCED_END,
            text=self.text,
            parses_chats=self.parses_chats,
            numerics=NUMERICS,
        )
        return judged(deepcopy(evidence))

    def counted(self) -> dict[str, int]:
        found = self.verdict()
        return {name: value for name in CONVICTING if (value := getattr(found, name))}


def sampling(case: Case, **settings: Any) -> None:
    for given in (case.request.body["sampling_params"], *(a.sampling for a in case.attempts)):
        given.update(settings)
