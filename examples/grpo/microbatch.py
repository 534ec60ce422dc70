"""Packs token sequences of many lengths into rectangles for one forward and backward pass each.

Decides which sequences share a rectangle and where in it the policy's own tokens are. Everything
that is not the policy's own (prompt, tool answers, padding) is outside the selection, so no loss
can reach it by mistake.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from examples.grpo.model import PolicyModel
from examples.grpo.vocabulary import PAD_ID

_PADDING_MAX = 0.1


class TokenSequence(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def is_output(self) -> Sequence[bool]:
        """Mask of the `token_ids` that the policy wrote; never the first."""
        ...


@dataclass(frozen=True, slots=True)
class Microbatch:
    members: tuple[int, ...]
    """Indices of its sequences; their output tokens follow one another in this order."""
    token_ids: Tensor
    """(rows, tokens), padded at the end."""
    predictors: Tensor
    """For each output token, the flat position of the hidden state that predicts it."""
    labels: Tensor
    """The output tokens."""

    def output_logprobs(self, policy: PolicyModel) -> tuple[Tensor, Tensor]:
        """Log-probability of each output token, and the entropy of its distribution; float32
        `[outputs]`."""
        hidden = policy(self.token_ids).flatten(0, 1)[self.predictors]
        logprobs = policy.logprobs(hidden)
        entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
        return logprobs.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1), entropy


def microbatches(sequences: Sequence[TokenSequence], *, tokens_max: int) -> list[Microbatch]:
    """All `sequences`, sorted by length, in rectangles of about `tokens_max` tokens.

    A rectangle ends early rather than pad its shortest row by more than a tenth.
    """
    by_length = sorted(range(len(sequences)), key=lambda i: (len(sequences[i].token_ids), i))
    batches: list[Microbatch] = []
    members: list[int] = []
    for i in by_length:
        length = len(sequences[i].token_ids)
        if members:
            shortest = len(sequences[members[0]].token_ids)
            is_full = (len(members) + 1) * length > tokens_max
            if is_full or shortest < length * (1 - _PADDING_MAX):
                batches.append(_rectangle(sequences, members))
                members = []
        members.append(i)
    if members:
        batches.append(_rectangle(sequences, members))
    return batches


def _rectangle(sequences: Sequence[TokenSequence], members: list[int]) -> Microbatch:
    length = max(len(sequences[i].token_ids) for i in members)
    ids, predictors, labels = [], [], []
    for row, i in enumerate(members):
        own = list(sequences[i].token_ids)
        ids.append(own + [PAD_ID] * (length - len(own)))
        for at, written in enumerate(sequences[i].is_output):
            if written:
                predictors.append(row * length + at - 1)
                labels.append(own[at])
    return Microbatch(
        members=tuple(members),
        token_ids=torch.tensor(ids),
        predictors=torch.tensor(predictors, dtype=torch.long),
        labels=torch.tensor(labels, dtype=torch.long),
    )
