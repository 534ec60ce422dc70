"""The model's own word on each token, by transformers: no engine, no gateway, no cache.

One pass over prompt and output with the weights of a version gives the log-probability of each
token and its gap to the best candidate.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.migration.judge import TokenTruth
from benchmarks.migration.records import Reply, RequestRecord

_BATCH = 32


@dataclass(frozen=True, slots=True)
class Claim:
    """A turn's tokens, and the versions that its spans claim."""

    request_id: str
    prompt: list[int]
    token_ids: list[int]
    versions: list[int]
    """The version of each token."""

    @classmethod
    def of(cls, record: RequestRecord) -> "Claim | None":
        reply = Reply.of(record)
        versions = [
            span["version"] for span in reply.spans for _ in range(span["start"], span["end"])
        ]
        if not reply.token_ids or len(versions) != len(reply.token_ids):
            return None
        return cls(record.request_id, record.body["token_ids"], reply.token_ids, versions)


def truths(
    model: Path, weights: Mapping[int, Mapping[str, Any]], records: Iterable[RequestRecord]
) -> dict[str, list[TokenTruth]]:
    """The truths of each answered turn; turns of versions that `weights` lacks are left out."""
    claims = {claim.request_id: claim for record in records if (claim := Claim.of(record))}
    found: dict[str, dict[int, TokenTruth]] = defaultdict(dict)
    for version, state in sorted(weights.items()):
        own = [claim for claim in claims.values() if version in claim.versions]
        own.sort(key=lambda claim: len(claim.prompt) + len(claim.token_ids))
        for claim, each in _passes(model, state, own):
            for at, truth in enumerate(each):
                if claim.versions[at] == version:
                    found[claim.request_id][at] = truth
    return {
        name: [each[at] for at in range(len(each))]
        for name, each in found.items()
        if len(each) == len(claims[name].token_ids)
    }


def _passes(
    model: Path, state: Mapping[str, Any], claims: list[Claim]
) -> Iterable[tuple[Claim, list[TokenTruth]]]:
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
            scores = torch.log_softmax(reference(input_ids=ids).logits, dim=-1)
        for row, claim in enumerate(batch):
            start = len(claim.prompt) - 1
            own = scores[row, start : start + len(claim.token_ids)]
            chosen = own.gather(1, torch.tensor(claim.token_ids)[:, None])[:, 0]
            gaps = own.max(dim=-1).values - chosen
            pairs = zip(chosen.tolist(), gaps.tolist(), strict=True)
            yield claim, [TokenTruth(logprob, gap) for logprob, gap in pairs]
