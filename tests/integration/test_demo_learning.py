"""The job learns: warm-up and GRPO for real on a smaller policy, sampled in this process."""

from dataclasses import dataclass
from math import hypot
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch

from examples.grpo.environment import Task
from examples.grpo.grpo import GrpoSettings, UpdateReport, update
from examples.grpo.master_weights import AdamSettings, MasterWeights, policy_of
from examples.grpo.policy_shape import PolicyShape
from examples.grpo.warm_up import WarmUp, warm_start
from tests.unit.examples.grpo.local_sampler import LocalSampler

STEPS = 6
WARM_UP = WarmUp(
    policy=PolicyShape(hidden=128, intermediate=256, heads=2, kv_heads=2), learning_rate=4e-3
)


@dataclass(frozen=True)
class Learned:
    rewards: list[list[float]]
    reports: list[UpdateReport]

    def mean(self, step: int) -> float:
        return mean(self.rewards[step])

    def error(self, step: int) -> float:
        return stdev(self.rewards[step]) / len(self.rewards[step]) ** 0.5


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    torch.set_num_threads(1)
    cache: Path = tmp_path_factory.mktemp("warm")
    warm = warm_start(WARM_UP, cache)
    weights = MasterWeights(
        policy_of(WARM_UP.policy, warm.state), AdamSettings(learning_rate=3e-4, epsilon=1e-8)
    )
    result = Learned([], [])
    for step in range(STEPS):
        prompts = WARM_UP.tasks.prompts_per_step
        tasks = [Task(WARM_UP.tasks, 1, step, prompt) for prompt in range(prompts)]
        trajectories = LocalSampler(weights.policy).sample(
            tasks, samples_per_prompt=8, version=step + 1, seed=step
        )
        report = update(weights, trajectories, version=step + 1, settings=GrpoSettings())
        result.rewards.append([one.reward for one in trajectories])
        result.reports.append(report)
    return result


def test_the_warm_policy_knows_the_form_and_has_room_to_improve(learned: Learned) -> None:
    assert 0.15 < learned.mean(0) < 0.7


def test_a_few_steps_raise_the_reward_beyond_five_standard_errors(learned: Learned) -> None:
    gained = learned.mean(-1) - learned.mean(0)
    assert gained > 5 * hypot(learned.error(0), learned.error(-1))


def test_every_token_was_learned_from_on_policy(learned: Learned) -> None:
    for report in learned.reports:
        total, tokens = report.logprob_gap["local"]
        assert report.stale_tokens == 0
        assert tokens == report.tokens
        assert total / tokens < 0.02
