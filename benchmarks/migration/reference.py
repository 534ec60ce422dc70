"""The model's own word on each token, by transformers: no engine, no gateway, no cache.

One pass over prompt and output with the weights of a version gives, after penalties, `min_tokens`
and `logit_bias`, the log-probability of each token and its gap to the best candidate.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from benchmarks.migration.chat_plan import TOOL, Chat
from benchmarks.migration.evidence import EDGE_NATS, TokenTruth
from benchmarks.migration.model import EOS_ID, FIRST_ID, REASONING, chat_text
from benchmarks.migration.records import RequestRecord
from benchmarks.migration.replies import Reply
from benchmarks.migration.rollout_plan import ENDS
from benchmarks.migration.settings_judge import chosen_places

_BATCH = 32
_FILTERS = frozenset(("top_k", "top_p", "min_p"))


@dataclass(frozen=True, slots=True)
class ClaimedTurn:
    """A turn's tokens, and the versions that its spans claim."""

    request_id: str
    prompt: list[int]
    token_ids: list[int]
    versions: list[int]
    """The version of each token."""
    sampling: Mapping[str, Any]

    @property
    def ends(self) -> frozenset[int]:
        """EOS and the stop tokens."""
        return ENDS | set(self.sampling.get("stop_token_ids") or ())

    @classmethod
    def of(cls, record: RequestRecord, index: int = 0) -> "ClaimedTurn | None":
        reply = Reply.of(record, index)
        versions = [
            span["version"] for span in reply.spans for _ in range(span["start"], span["end"])
        ]
        if not reply.token_ids or len(versions) != len(reply.token_ids):
            return None
        sampling = record.body["sampling_params"]
        prompt = record.body["token_ids"]
        return cls(record.choice_name(index), prompt, reply.token_ids, versions, sampling)


def truths(
    model: Path, weights: Mapping[int, Mapping[str, Any]], records: Iterable[RequestRecord]
) -> dict[str, list[TokenTruth]]:
    """The truths of each answered turn; turns of versions that `weights` lacks are left out."""
    every = (ClaimedTurn.of(each, index) for each in records for index in range(each.samples))
    return truths_of(model, weights, [claim for claim in every if claim])


def truths_of(
    model: Path, weights: Mapping[int, Mapping[str, Any]], made: Iterable[ClaimedTurn]
) -> dict[str, list[TokenTruth]]:
    """As `truths`, of any tokens behind a context."""
    forced_end = ModelText(model).forced_end
    claims = {claim.request_id: claim for claim in made}
    found: dict[str, dict[int, TokenTruth]] = defaultdict(dict)
    for version, state in sorted(weights.items()):
        own = [claim for claim in claims.values() if version in claim.versions]
        own.sort(key=lambda claim: len(claim.prompt) + len(claim.token_ids))
        for claim, each in _passes(model, state, own, forced_end):
            for at, truth in enumerate(each):
                if claim.versions[at] == version:
                    found[claim.request_id][at] = truth
    return {
        name: [each[at] for at in range(len(each))]
        for name, each in found.items()
        if len(each) == len(claims[name].token_ids)
    }


def _passes(
    model: Path, state: Mapping[str, Any], claims: list[ClaimedTurn], forced_end: Sequence[int]
) -> Iterable[tuple[ClaimedTurn, list[TokenTruth]]]:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # The file leaves out what the model ties or computes itself.
    reference.load_state_dict(dict(state), strict=False)
    reference.eval()
    for first in range(0, len(claims), _BATCH):
        batch = claims[first : first + _BATCH]
        texts = [claim.prompt + claim.token_ids for claim in batch]
        longest = max(map(len, texts))
        # Padded behind the text, where no token that is looked at attends to it.
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        with torch.inference_mode():
            scores = reference(input_ids=ids).logits
        for row, claim in enumerate(batch):
            start = len(claim.prompt) - 1
            logits = scores[row, start : start + len(claim.token_ids)]
            column = torch.tensor(claim.token_ids)[:, None]
            processed = _processed(logits, claim)
            every = torch.log_softmax(processed, dim=-1)
            gaps = processed.max(dim=-1).values - processed.gather(1, column)[:, 0]
            probabilities = every.exp()
            # A token that cannot be drawn has no part in a mean.
            finite = every.masked_fill(probabilities == 0, 0.0)
            means = (probabilities * finite).sum(dim=-1)
            columns = (
                every.gather(1, column)[:, 0],
                gaps,
                probabilities[:, sorted(claim.ends)].sum(dim=-1),
                means,
                (probabilities * (finite - means[:, None]) ** 2).sum(dim=-1),
            )
            sides = (EDGE_NATS, -EDGE_NATS) if _FILTERS & claim.sampling.keys() else ()
            edges = [
                torch.log_softmax(_processed(logits, claim, side), dim=-1).gather(1, column)
                for side in sides
            ]
            edge_rows = map(tuple, torch.cat(edges, dim=1).tolist()) if edges else repeat(())
            decided = chosen_places(claim.sampling, claim.token_ids, forced_end)
            rows = zip(*(each.tolist() for each in columns), edge_rows, strict=False)
            yield (
                claim,
                [
                    TokenTruth(logprob, gap if at in decided else None, *others)
                    for at, (logprob, gap, *others) in enumerate(rows)
                ],
            )


def _processed(logits: Any, claim: ClaimedTurn, edge_nats: float = 0.0) -> Any:
    """Logits that an engine draws from, or compares if greedy, in vLLM's order; a row for each
    token of output. `edge_nats`: candidates that are so much too unlikely are in."""
    import torch

    sampling, inf = claim.sampling, float("inf")
    logits = logits.clone()
    logits[: sampling.get("min_tokens", 0), [EOS_ID, *sampling.get("stop_token_ids", ())]] = -inf
    for token, bias in (sampling.get("logit_bias") or {}).items():
        logits[:, int(token)] += bias
    made = torch.nn.functional.one_hot(torch.tensor(claim.token_ids), logits.shape[1])
    counts = made.cumsum(0) - made
    seen = counts > 0
    seen[:, claim.prompt] = True
    ratio = sampling.get("repetition_penalty", 1.0)
    logits = torch.where(seen, torch.where(logits > 0, logits / ratio, logits * ratio), logits)
    logits = logits - sampling.get("frequency_penalty", 0.0) * counts
    logits = logits - sampling.get("presence_penalty", 0.0) * (counts > 0)
    logits = logits / (sampling.get("temperature", 1.0) or 1.0)
    if top_k := sampling.get("top_k", 0):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = torch.where(logits < least - edge_nats, -inf, logits)
    if min_p := sampling.get("min_p", 0.0):
        probabilities = logits.softmax(dim=-1)
        least = min_p * math.exp(-edge_nats) * probabilities.max(dim=-1, keepdim=True).values
        logits = torch.where(probabilities < least, -inf, logits)
    if (top_p := sampling.get("top_p", 1.0)) < 1:
        ascending, places = logits.sort(dim=-1)
        outside = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - top_p) * math.exp(-edge_nats)
        outside[:, -1] = False
        logits = torch.where(outside.gather(1, places.argsort(dim=-1)), -inf, logits)
    return logits


class ModelText:
    """Text of tokens, as the model's tokenizer has it."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        ended = self._tokenizer.encode(REASONING["reasoning_end_str"], add_special_tokens=False)
        self.forced_end: list[int] = ended.ids

    def chat(self, chat: Chat) -> list[int]:
        """Its prompt."""
        text = chat_text(
            chat.messages, tools=[TOOL] if chat.tool_choice else [], thinks=chat.thinks
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def blanks(self) -> list[int]:
        """Tokens of white space alone."""
        every = range(FIRST_ID, self._tokenizer.get_vocab_size())
        return [each for each in every if self([each]).isspace()]

    def __call__(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
