"""Sizes of the policy, in a file of their own: what starts engines knows them without torch, whose
import takes seconds."""

from dataclasses import dataclass

from harvester.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShape:
    hidden: int = 384
    intermediate: int = 832
    layers: int = 2
    heads: int = 3
    kv_heads: int = 3
    context_tokens: int = 512
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    initial_std: float = 0.03

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ConfigError("heads must divide hidden, and kv_heads must divide heads")

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads
