"""Text that ends before the stop string or token that ended its choice, whole and streamed."""

from typing import TypeAlias

from harvester.contracts.wire.rollouts import (
    Choice,
    FinishReason,
    GenerateRequest,
    SamplingParams,
)
from scheduler.gateway.requests import stop_strings

StoppedTexts: TypeAlias = "dict[str, StoppedText]"
"""Texts of a streamed choice by their names."""


class StoppedText:
    """One text of a streamed choice, without the stop string that ends it.

    A tail as long as a stop string is held back until it is known not to begin one.
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
        """The text that may be sent now."""
        self._held += text
        if choice.finish_reason is not None:
            text, self._held = self._held, ""
            return without_stop(text, choice, self._sampling)
        cut = len(self._held) - self._hold_chars
        ready, self._held = self._held[: max(0, cut)], self._held[max(0, cut) :]
        return ready


def without_stop(text: str, choice: Choice, sampling: SamplingParams) -> str:
    """The text before the stop string that ended it, unless it is asked for too; vLLM also names
    other reasons as strings."""
    stop = choice.stop_reason
    if sampling.include_stop_str_in_output or not isinstance(stop, str):
        return text
    if stop not in stop_strings(sampling) or stop not in text:
        return text
    found = text.find(stop)
    if sampling.min_tokens:
        # Earlier ones ended nothing. The token that did may hold several that touch each other.
        found = text.rfind(stop)
        while (before := text.rfind(stop, 0, found + len(stop) - 1)) >= max(0, found - len(stop)):
            found = before
    return text[:found]


def text_tokens(choice: Choice, turn: GenerateRequest) -> int:
    """How many of its tokens are text: all but the stop token or EOS that ended it."""
    ended = choice.finish_reason is FinishReason.STOP and not isinstance(choice.stop_reason, str)
    kept = turn.sampling_params.include_stop_str_in_output
    return len(choice.token_ids) - (ended and not kept and bool(choice.token_ids))
