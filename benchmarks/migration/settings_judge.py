"""Did a reply keep to its sampling settings, wherever its tokens were made? Pure.

A count, grammar or budget that began anew at a move breaks a setting of the whole reply. Choices of
greedy turns under penalties, `min_tokens` and `logit_bias` are judged by their weights (judge.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from benchmarks.migration.model import EOS_ID, THINK_ID
from benchmarks.migration.records import AttemptRecord, RequestRecord
from benchmarks.migration.replies import Reply
from benchmarks.migration.rollout_routes import route_made

Text = Callable[[Sequence[int]], str]
"""Text of tokens, without special ones."""


def broken_setting(
    sampling: Mapping[str, Any],
    ids: Sequence[int],
    *,
    ends: frozenset[int],
    forced_end: Sequence[int],
    text: Text,
    content: Sequence[int],
) -> str:
    """The setting that the reply breaks; "" if it keeps all. `ends` are EOS and stop tokens;
    `content`, the last of `ids`, are those that a grammar rules."""
    least = sampling.get("min_tokens", 0)
    if any(token in ends for token in ids[: max(0, least - 1)]):
        return f"an end before {least} tokens"
    forced = forced_places(sampling, ids, forced_end)
    if [ids[at] for at in forced] != list(forced_end[: len(forced)]):
        return f"{[ids[at] for at in forced]} behind the thinking budget, not {forced_end}"
    if (structured := sampling.get("structured_outputs")) is not None:
        whole = content[-1:] == [EOS_ID]
        # A character whose last bytes are missing.
        answer = text(content) if whole else text(content).rstrip("\ufffd")
        if regex.fullmatch(structured["regex"], answer, partial=not whole) is None:
            return f"{answer!r} is not of the grammar {structured['regex']}"
    return ""


def forced_places(
    sampling: Mapping[str, Any], ids: Sequence[int], forced_end: Sequence[int]
) -> range:
    """Places at which a thinking budget decides; the prompt ends with the start of thinking."""
    budget = sampling.get("thinking_token_budget")
    if budget is None:
        return range(0)
    return range(min(budget, len(ids)), min(budget + len(forced_end), len(ids)))


def chosen_places(
    sampling: Mapping[str, Any], ids: Sequence[int], forced_end: Sequence[int]
) -> frozenset[int]:
    """Places whose token the weights and penalties alone decide: not under a grammar, in a forced
    end of thinking or behind a second start of it."""
    if sampling.get("structured_outputs") is not None:
        return frozenset()
    places = range(len(ids))
    forced = forced_places(sampling, ids, forced_end)
    if sampling.get("thinking_token_budget") is not None:
        again = (at + 1 for at in range(forced.stop, len(ids)) if ids[at] == THINK_ID)
        places = range(next(again, len(ids)))
    return frozenset(places) - frozenset(forced)


def stopped_at(sampling: Mapping[str, Any], ids: Sequence[int], text: Text) -> int | None:
    """Tokens at which the text first has a stop string; None where it has none."""
    strings = sampling.get("stop") or ()
    lengths = range(len(ids) + 1 if any(one in text(ids) for one in strings) else 0)
    return next((n for n in lengths if any(one in text(ids[:n]) for one in strings)), None)


def wrong_text(
    request: RequestRecord, ids: Sequence[int], reply: Reply, *, ends: frozenset[int], text: Text
) -> str:
    """The difference of a reply's text from that of its tokens up to what ended it; "" for none."""
    reply_text = reply.text or ""
    fits = texts_of(request.body["sampling_params"], ids, ends, text)
    # Bytes that are no character have no text of their own.
    is_right = reply_text.replace("\ufffd", "") in {each.replace("\ufffd", "") for each in fits}
    return "" if is_right else f"{reply_text!r} is the text of {fits[0]!r}"


def texts_of(
    sampling: Mapping[str, Any], ids: Sequence[int], ends: frozenset[int], text: Text
) -> list[str]:
    """The text of tokens up to what ended them, and what a stream may have sent of it."""
    kept = list(ids[:-1] if ids[-1:] and ids[-1] in ends else ids)
    whole_text = text(kept)
    places = [at for one in sampling.get("stop") or () if (at := whole_text.find(one)) >= 0]
    if places:
        return [whole_text[: min(places)]]
    # A stream holds back tokens that end within a character, and may end with them.
    while kept and text(kept).endswith("\ufffd"):
        kept.pop()
    return [whole_text, text(kept)]


def wrong_attempt_settings(
    request: RequestRecord, index: int, attempt: AttemptRecord, *, goes_on: bool
) -> list[str]:
    """Settings that an attempt at the request's choice did not get as its client gave them; the
    seed alone differs behind output."""
    requested, sent = request.body["sampling_params"], attempt.sampling
    kept = sorted(requested.keys() - {"seed", "n"} - route_made(request.body))
    wrong = [name for name in kept if _without_defaults(sent.get(name)) != requested[name]]
    wrong += [name for name in route_made(request.body) if not sent.get(name)]
    if "seed" in requested:
        is_own = sent.get("seed") == requested["seed"] + index
        if sent.get("seed") is None or is_own == goes_on:
            wrong.append("seed")
    return wrong


def _without_defaults(setting: Any) -> Any:
    """Without the fields that vLLM's renderer adds as null or false."""
    if not isinstance(setting, dict):
        return setting
    return {name: value for name, value in setting.items() if value not in (None, False)}
