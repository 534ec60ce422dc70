"""Text that ends before the stop string or token that ended its choice, whole and streamed."""

from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import msgspec

from harvester.contracts.wire.rollouts import (
    Choice,
    FinishReason,
    GenerateRequest,
    Logprobs,
    SamplingParams,
)
from scheduler.gateway.requests import stop_strings

StoppedTexts: TypeAlias = "dict[str, StoppedText]"
"""Texts of a streamed choice by their names."""


class StoppedText:
    """One text of a streamed choice, without the stop string that ends it.

    Its last characters are kept back until they cannot be the beginning of a stop string.
    """

    def __init__(self, turn: GenerateRequest) -> None:
        sampling = turn.sampling_params
        stops = () if sampling.include_stop_str_in_output else stop_strings(sampling)
        self._hold_chars = max(map(len, stops), default=1) - 1
        self._sampling = sampling
        self._held = ""

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def feed(self, text: str, choice: Choice) -> str:
        """The text that may be sent now. `text`: of a chunk of `in_parts`."""
        before_chars, self._held = len(self._held), self._held + text
        if choice.finish_reason is not None:
            text, self._held = self._held, ""
            return without_stop(text, choice, self._sampling, before_chars=before_chars)
        cut = len(self._held) - self._hold_chars
        ready, self._held = self._held[: max(0, cut)], self._held[max(0, cut) :]
        return ready


def without_stop(text: str, choice: Choice, sampling: SamplingParams, *, before_chars: int) -> str:
    """The text before the stop string that ended it, unless it is asked for too; vLLM also names
    other reasons as strings. `before_chars`: of the text of `early_part`."""
    stop = choice.stop_reason
    if not isinstance(stop, str) or not _cuts(stop, sampling):
        return text
    searched_chars = before_chars - len(stop) + 1 if sampling.min_tokens else 0
    found = text.find(stop, max(0, searched_chars))
    return text if found < 0 else text[:found]


def early_part(choice: Choice, sampling: SamplingParams) -> Choice | None:
    """All tokens but the last one, where an earlier stop string may have ended nothing: vLLM looks
    for the first one that ends in a token after `min_tokens`, which is the last token."""
    if not sampling.min_tokens or len(choice.token_ids) < 2:
        return None
    if not _cuts(choice.stop_reason, sampling):
        return None
    return _part(Choice(index=choice.index), choice, slice(-1))


def _part(part: Choice, choice: Choice, tokens: slice) -> Choice:
    """`part` with these tokens of the choice."""
    mask = choice.sampling_mask
    return msgspec.structs.replace(
        part,
        token_ids=choice.token_ids[tokens],
        logprobs=Logprobs(choice.logprobs.content[tokens]),
        sampling_mask=mask[tokens] if mask else None,
    )


def _cuts(stop: int | str | None, sampling: SamplingParams) -> bool:
    return stop in stop_strings(sampling) and not sampling.include_stop_str_in_output


def early_parts(choices: Sequence[Choice], turns: Sequence[GenerateRequest]) -> list[Choice | None]:
    return [
        early_part(choice, turn.sampling_params)
        for choice, turn in zip(choices, turns, strict=True)
    ]


async def in_parts(
    chunks: AsyncIterator[Choice], turns: Sequence[GenerateRequest]
) -> AsyncIterator[Choice]:
    """A stream's chunks, each after its early part where it has one."""
    async for choice in chunks:
        early = early_part(choice, turns[choice.index].sampling_params)
        if early is not None:
            yield early
        yield choice if early is None else _part(choice, choice, slice(-1, None))


def text_tokens(choice: Choice, turn: GenerateRequest) -> int:
    """How many of its tokens are text: all but the stop token or EOS that ended it."""
    ended = choice.finish_reason is FinishReason.STOP and not isinstance(choice.stop_reason, str)
    kept = turn.sampling_params.include_stop_str_in_output
    return len(choice.token_ids) - (ended and not kept and bool(choice.token_ids))
