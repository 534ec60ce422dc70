"""Float32 master weights under a bf16 policy, and the optimizer that moves them.

The policy computes with the masters rounded to bf16, which are exactly the weights that engines
receive. Gradients of several microbatches add up in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.grpo.model import PolicyModel
from examples.grpo.policy_shape import PolicyShape
from harvester.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 3e-5
    """About the gradients' own size, so that weights with next to no gradient stay put: the policy
    learns as fast as with half the rate and 1e-8, and a third as many bf16 weights change."""
    weight_decay: float = 0.0
    gradient_norm_max: float = 1.0


class MasterWeights:
    """One policy in training."""

    def __init__(self, policy: PolicyModel, settings: AdamSettings) -> None:
        """`policy` holds the first weights in float32; it is turned to bf16 here."""
        self._masters = {
            name: parameter.detach().float().clone()
            for name, parameter in policy.named_parameters()
        }
        self.policy = policy.to(torch.bfloat16)
        for master in self._masters.values():
            master.grad = torch.zeros_like(master)
        self._optimizer = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._gradient_norm_max = settings.gradient_norm_max

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Moves the policy's gradients of one backward pass into the sum for the next step."""
        for name, parameter in self.policy.named_parameters():
            gradient = self._masters[name].grad
            if parameter.grad is not None and gradient is not None:
                gradient.add_(parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def step(self, *, learning_rate: float | None = None) -> float:
        """One optimizer step over the gradients added so far; returns their norm."""
        if learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self._gradient_norm_max)
        self._optimizer.step()
        for name, parameter in self.policy.named_parameters():
            master = self._masters[name]
            parameter.copy_(master)
            if master.grad is not None:
                master.grad.zero_()
        return float(norm)

    def masters(self) -> dict[str, Tensor]:
        return dict(self._masters)

    def state_for_publish(self) -> dict[str, Tensor]:
        """The bf16 weights under the checkpoint's names; a snapshot that later steps leave be."""
        return {name: p.detach().clone() for name, p in self.policy.named_parameters()}


def policy_of(shape: PolicyShape, state: Mapping[str, Tensor]) -> PolicyModel:
    """A policy with the weights `state`. Raises ConfigError where they are not of that shape."""
    policy = PolicyModel(shape, seed=0)
    try:
        policy.load_state_dict(dict(state))
    except RuntimeError as error:
        raise ConfigError(f"the weights do not fit the policy's shape: {error}") from error
    return policy
