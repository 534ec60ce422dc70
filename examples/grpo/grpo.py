"""GRPO: group-relative policy gradients on the tokens that the policy itself wrote.

    advantage = reward - mean reward of the same prompt's samples        (optionally / their std)
    loss      = - mean over tokens of min(ratio * advantage, clipped ratio * advantage)
    ratio     = exp(log p_trainer - log p_engine)

The ratio is against the engine's log-probability at sampling, so differing numerics are corrected
and visible: the log-probabilities are recomputed with the very bf16 weights that were published.
Tokens that are not on the pinned weight version are counted and never learned from.
(DeepSeekMath, section 4.1; token-level mean and unequal clip bounds as in DAPO, section 3.)
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from examples.grpo.master_weights import MasterWeights
from examples.grpo.microbatch import Microbatch, microbatches
from examples.grpo.trajectory import Trajectory
from harvester.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoSettings:
    clip_low: float = 0.2
    clip_high: float = 0.28
    advantage_over_std: bool = False
    microbatch_tokens: int = 4096

    def __post_init__(self) -> None:
        if not (0 < self.clip_low < 1 and self.clip_high > 0):
            raise ConfigError("clip_low must be between 0 and 1, clip_high above 0")
        if self.microbatch_tokens < 1:
            raise ConfigError("microbatch_tokens must be at least 1")


@dataclass(slots=True)
class UpdateReport:
    """Sums over the tokens of one update; `tokens` of them were learned from."""

    tokens: int = 0
    stale_tokens: int = 0
    clipped_tokens: int = 0
    kl_sum: float = 0.0
    """Sum of KL(engine || trainer), estimated per token as ratio - 1 - log ratio."""
    entropy_sum: float = 0.0
    gradient_norm: float = 0.0
    logprob_gap: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Per engine, the sum of |log p_trainer - log p_engine| and the number of tokens."""


@dataclass(frozen=True, slots=True)
class _TokenFacts:
    engine_logprobs: Tensor
    advantages: Tensor
    learnable: Tensor
    engines: tuple[str, ...]


def advantages(trajectories: Sequence[Trajectory], *, over_std: bool) -> list[float]:
    """Reward relative to the trajectory's group (the samples of the same prompt)."""
    groups: dict[int, list[float]] = defaultdict(list)
    for one in trajectories:
        groups[one.prompt_index].append(one.reward)
    centres = {prompt: sum(rewards) / len(rewards) for prompt, rewards in groups.items()}
    scales = dict.fromkeys(groups, 1.0)
    if over_std:
        for prompt, rewards in groups.items():
            variance = sum((r - centres[prompt]) ** 2 for r in rewards) / len(rewards)
            scales[prompt] = max(variance**0.5, 1e-4)
    return [
        (one.reward - centres[one.prompt_index]) / scales[one.prompt_index] for one in trajectories
    ]


def update(
    weights: MasterWeights,
    trajectories: Sequence[Trajectory],
    *,
    version: int,
    settings: GrpoSettings,
) -> UpdateReport:
    """One optimizer step on `trajectories`, which `version`, the present weights, sampled."""
    report = UpdateReport()
    each = advantages(trajectories, over_std=settings.advantage_over_std)
    report.stale_tokens = sum(
        token.version != version for one in trajectories for token in one.outputs
    )
    report.tokens = sum(len(one.outputs) for one in trajectories) - report.stale_tokens
    # A group with equal rewards for all samples teaches nothing: score it, skip its backward.
    teaching = [i for i, advantage in enumerate(each) if advantage != 0.0]
    silent = [i for i, advantage in enumerate(each) if advantage == 0.0]
    for indices in (teaching, silent):
        chosen = [trajectories[i] for i in indices]
        for part in microbatches(chosen, tokens_max=settings.microbatch_tokens):
            members = [(chosen[m], each[indices[m]]) for m in part.members]
            with torch.set_grad_enabled(indices is teaching):
                loss = _loss(weights, part, _facts(members, version), settings, report)
            if indices is teaching:
                (loss / max(1, report.tokens)).backward()  # type: ignore[no-untyped-call]
                weights.add_gradients()
    if teaching and report.tokens:
        report.gradient_norm = weights.step()
    return report


def _facts(members: Sequence[tuple[Trajectory, float]], version: int) -> _TokenFacts:
    tokens = [(token, advantage) for one, advantage in members for token in one.outputs]
    return _TokenFacts(
        engine_logprobs=torch.tensor([token.logprob for token, _ in tokens]),
        advantages=torch.tensor([advantage for _, advantage in tokens]),
        learnable=torch.tensor([token.version == version for token, _ in tokens]),
        engines=tuple(token.engine for token, _ in tokens),
    )


def _loss(
    weights: MasterWeights,
    part: Microbatch,
    facts: _TokenFacts,
    settings: GrpoSettings,
    report: UpdateReport,
) -> Tensor:
    logprobs, entropy = part.output_logprobs(weights.policy)
    log_ratio = logprobs - facts.engine_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain = torch.minimum(ratio * facts.advantages, clipped * facts.advantages)
    _note(report, log_ratio.detach(), entropy, gain.detach() < (ratio * facts.advantages), facts)
    return -torch.where(facts.learnable, gain, 0.0).sum()


def _note(
    report: UpdateReport, log_ratio: Tensor, entropy: Tensor, clipped: Tensor, facts: _TokenFacts
) -> None:
    learnable = facts.learnable
    report.clipped_tokens += int((clipped & learnable).sum())
    report.kl_sum += float((log_ratio.exp() - 1 - log_ratio)[learnable].sum())
    report.entropy_sum += float(entropy[learnable].sum())
    gaps = log_ratio.abs().tolist()
    for engine, gap, counts in zip(facts.engines, gaps, learnable.tolist(), strict=True):
        if counts:
            total, tokens = report.logprob_gap.get(engine, (0.0, 0))
            report.logprob_gap[engine] = (total + gap, tokens + 1)
