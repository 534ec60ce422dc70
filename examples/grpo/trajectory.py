"""One attempt of the policy at a task, as the trainer learns from it.

Holds raw facts only: tokens, their engine, weight version and log-probability, and the verified
reward. Other modules decide whether a token may be learned from.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from examples.grpo.environment import Observation


@dataclass(frozen=True, slots=True)
class OutputToken:
    token_id: int
    logprob: float
    """Log-probability by the engine that sampled it."""
    engine: str
    version: int
    """0 where no engine vouched for one."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    prompt_index: int
    sample_index: int
    token_ids: tuple[int, ...]
    is_output: tuple[bool, ...]
    outputs: tuple[OutputToken, ...]
    """Facts about the tokens where `is_output`, in order."""
    reward: float
    turns: int


class OpenTrajectory:
    """A trajectory that is still being sampled."""

    def __init__(self, prompt_index: int, sample_index: int, prompt_ids: Iterable[int]) -> None:
        self.prompt_index = prompt_index
        self.sample_index = sample_index
        self.context = list(prompt_ids)
        self._is_output = [False] * len(self.context)
        self._outputs: list[OutputToken] = []
        self._turns = 0

    def write(self, tokens: Iterable[OutputToken]) -> None:
        """Appends what an engine sampled."""
        for token in tokens:
            self.context.append(token.token_id)
            self._is_output.append(True)
            self._outputs.append(token)

    def observe(self, observation: Observation) -> Trajectory | None:
        """Ends the turn; the finished trajectory where the episode is done, else None."""
        self._turns += 1
        if observation.done:
            return Trajectory(
                prompt_index=self.prompt_index,
                sample_index=self.sample_index,
                token_ids=tuple(self.context),
                is_output=tuple(self._is_output),
                outputs=tuple(self._outputs),
                reward=observation.reward,
                turns=self._turns,
            )
        self.context += observation.ids
        self._is_output += [False] * len(observation.ids)
        return None
