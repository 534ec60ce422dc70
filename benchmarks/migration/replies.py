"""A client's reply, put together from what it received by any route. Pure.

Nothing is repaired: what a reply lacks is missing here, and where it says two things of one token,
that is its contradiction.
"""

from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from benchmarks.migration.records import RequestRecord
from benchmarks.migration.rollout_routes import RolloutRoute
from benchmarks.migration.tinker_reply import sequences


class Reply(msgspec.Struct, kw_only=True):
    """One choice of it."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[dict[str, Any]] = []
    finish_reasons: list[str] = []
    fault: str = ""
    text: str | None = None
    """None where the route sends none. A chat's content."""
    reasoning: str | None = None
    calls: dict[int, list[str]] = {}
    """Name and arguments, as text, of each call of a tool."""
    calls_at_end: bool = False
    """Whether it says that it ended with calls."""
    whole: bool = False
    contradiction: str = ""

    @classmethod
    def of(cls, record: RequestRecord, index: int = 0) -> "Reply":
        return replies(record).get(index) or cls()

    def append(self, choice: Mapping[str, Any]) -> None:
        """Adds a choice, or a streamed part of one, of vLLM's or OpenAI's form."""
        ids = choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        self.token_ids += ids
        if "token_logprobs" in logprobs:
            self.logprobs += logprobs["token_logprobs"]
        else:
            content = logprobs.get("content") or []
            self.logprobs += [one["logprob"] for one in content]
            self._compare(ids, [one["token_id"] for one in content if "token_id" in one])
        message = choice.get("message") or choice.get("delta") or choice
        if (text := message.get("content", message.get("text"))) is not None:
            self.text = (self.text or "") + text
        if (thought := message.get("reasoning")) is not None:
            self.reasoning = (self.reasoning or "") + thought
        for place, call in enumerate(message.get("tool_calls") or ()):
            made = self.calls.setdefault(call.get("index", place), ["", ""])
            made[0] += call["function"].get("name") or ""
            made[1] += call["function"].get("arguments") or ""
        if choice.get("finish_reason"):
            self._end(choice["finish_reason"], choice.get("spans"), choice.get("fault"))

    def replace(self, reply: Mapping[str, Any]) -> None:
        """Takes SGLang's form: each event has the whole choice so far."""
        meta, ids = reply["meta_info"], reply["output_ids"]
        scored = meta.get("output_token_logprobs") or []
        before = self.token_ids
        if ids[: len(before)] != before:
            self.contradiction = f"{before[-3:]} became {ids[len(before) - 3 : len(before)]}"
        if meta["completion_tokens"] != len(ids):
            self.contradiction = f"{meta['completion_tokens']} tokens, of which {len(ids)} came"
        self.token_ids, self.logprobs = ids, [logprob for logprob, *_ in scored]
        self._compare(ids, [token_id for _, token_id, *_ in scored])
        self.text = reply["text"]
        if (reason := meta["finish_reason"]) is not None:
            self._end(reason["type"], meta.get("spans"), reason.get("message"))

    def _compare(self, ids: list[int], scored: list[int]) -> None:
        if scored and scored != ids:
            self.contradiction = f"tokens {ids[-3:]} with log-probabilities of {scored[-3:]}"

    def _end(self, reason: str, spans: list[dict[str, Any]] | None, fault: str | None) -> None:
        # A call is how such a turn stops.
        self.calls_at_end = self.calls_at_end or reason == "tool_calls"
        self.finish_reasons.append("stop" if reason == "tool_calls" else reason)
        # The last event has all spans.
        self.spans = spans or []
        self.fault = fault or self.fault


def replies(record: RequestRecord) -> dict[int, Reply]:
    """Each choice of an answered request by its index."""
    found: dict[int, Reply] = defaultdict(Reply)
    if record.status != 200:
        return {}
    if record.route is RolloutRoute.TINKER:
        return _of_tinker(record)
    done = bool(record.reply)
    for text in record.events or ([record.reply] if record.reply else []):
        if text == "[DONE]":
            done = True
            continue
        reply = msgspec.json.decode(text)
        if isinstance(reply, dict) and "error" in reply:
            continue  # RequestRecord.refusal; the choices lack their ends.
        if record.route is RolloutRoute.SGLANG:
            for index, each in _of_sglang(reply):
                found[index].replace(each)
        else:
            for choice in reply.get("choices") or []:
                found[choice.get("index", 0)].append(choice)
    for reply in found.values():
        reply.whole = done
    return dict(found)


def _of_tinker(record: RequestRecord) -> dict[int, Reply]:
    if not record.reply or record.tinker_error:
        return {}
    return {
        index: Reply(
            token_ids=each.token_ids,
            logprobs=each.logprobs,
            finish_reasons=[each.finish_reason],
            spans=record.tap_spans.get(index, []),
            whole=True,
        )
        for index, each in enumerate(sequences(b64decode(record.reply)))
    }


def _of_sglang(reply: Any) -> Iterable[tuple[int, dict[str, Any]]]:
    """Choices of an event, which names its own, or of a reply, which lists them."""
    return enumerate(reply) if isinstance(reply, list) else [(reply.get("index", 0), reply)]
