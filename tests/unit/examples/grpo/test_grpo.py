from dataclasses import replace
from random import Random

import pytest
import torch

from examples.grpo.environment import Task, TaskShape
from examples.grpo.grpo import GrpoSettings, advantages, update
from examples.grpo.master_weights import AdamSettings, MasterWeights
from examples.grpo.microbatch import microbatches
from examples.grpo.model import PolicyModel
from examples.grpo.policy_shape import PolicyShape
from examples.grpo.trajectory import Trajectory
from harvester.contracts.errors import ConfigError
from tests.unit.examples.grpo.local_sampler import LocalSampler

SETTINGS = GrpoSettings()
TASKS = [Task(TaskShape(), 1, 0, i) for i in range(4)]


def weights_of(tiny: PolicyShape, *, learning_rate: float = 1e-3) -> MasterWeights:
    return MasterWeights(PolicyModel(tiny, seed=1), AdamSettings(learning_rate=learning_rate))


def sampled(weights: MasterWeights, *, samples: int = 4, version: int = 3) -> list[Trajectory]:
    """Trajectories of the policy with made-up rewards, since an untrained one earns none."""
    random = Random(1)
    return [
        replace(one, reward=random.random())
        for one in LocalSampler(weights.policy).sample(
            TASKS, samples_per_prompt=samples, version=version, seed=1
        )
    ]


def mean_logprob(weights: MasterWeights, trajectory: Trajectory) -> float:
    (part,) = microbatches([trajectory], tokens_max=1000)
    with torch.no_grad():
        return float(part.output_logprobs(weights.policy)[0].mean())


def test_advantages_are_relative_to_the_samples_of_the_same_prompt(tiny: PolicyShape) -> None:
    trajectories = sampled(weights_of(tiny))
    each = advantages(trajectories, over_std=False)
    for prompt in range(4):
        group = [a for a, one in zip(each, trajectories, strict=True) if one.prompt_index == prompt]
        assert len(group) == 4
        assert sum(group) == pytest.approx(0.0, abs=1e-9)
    scaled = advantages(trajectories, over_std=True)
    assert sum(a * a for a in scaled) == pytest.approx(len(scaled))


def test_equal_rewards_are_no_advantage_even_over_std(tiny: PolicyShape) -> None:
    equal = [replace(one, reward=0.3) for one in sampled(weights_of(tiny))]
    assert set(advantages(equal, over_std=True)) == {0.0}


def test_an_update_makes_the_better_sample_likelier_and_the_worse_one_less(
    tiny: PolicyShape,
) -> None:
    weights = weights_of(tiny)
    worse, better = sampled(weights, samples=2)[:2]
    worse, better = replace(worse, reward=0.0), replace(better, reward=1.0)
    before = mean_logprob(weights, worse), mean_logprob(weights, better)
    report = update(weights, [worse, better], version=3, settings=SETTINGS)
    after = mean_logprob(weights, worse), mean_logprob(weights, better)
    assert after[0] < before[0]
    assert after[1] > before[1]
    assert report.gradient_norm > 0


def test_the_gap_to_the_policys_own_log_probabilities_is_numerical_noise(
    tiny: PolicyShape,
) -> None:
    weights = weights_of(tiny)
    report = update(weights, sampled(weights), version=3, settings=SETTINGS)
    total, tokens = report.logprob_gap["local"]
    assert tokens == report.tokens > 0
    assert total / tokens < 0.02
    assert report.kl_sum / report.tokens < 0.001


def test_the_gap_is_kept_per_engine(tiny: PolicyShape) -> None:
    weights = weights_of(tiny)
    trajectories = sampled(weights)
    off = tuple(replace(t, engine="off", logprob=t.logprob - 0.5) for t in trajectories[0].outputs)
    trajectories[0] = replace(trajectories[0], outputs=off)
    gap = update(weights, trajectories, version=3, settings=SETTINGS).logprob_gap
    assert gap["off"][1] == len(off)
    assert gap["off"][0] / gap["off"][1] == pytest.approx(0.5, abs=0.03)
    assert gap["local"][0] / gap["local"][1] < 0.02


def test_stale_tokens_are_counted_and_never_learned_from(tiny: PolicyShape) -> None:
    """For any claimed log-probability of a stale token, the weights after the update are the
    same."""
    results = []
    for claimed in (-0.1, -9.0):
        weights = weights_of(tiny)
        trajectories = [
            replace(
                one,
                outputs=tuple(
                    replace(token, version=2, logprob=claimed) if at % 3 == 0 else token
                    for at, token in enumerate(one.outputs)
                ),
            )
            for one in sampled(weights)
        ]
        report = update(weights, trajectories, version=3, settings=SETTINGS)
        stale = sum(token.version == 2 for one in trajectories for token in one.outputs)
        assert report.stale_tokens == stale > 0
        assert report.tokens == sum(len(one.outputs) for one in trajectories) - stale
        assert report.logprob_gap["local"][1] == report.tokens
        results.append(weights.masters())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_batch_of_stale_tokens_alone_changes_nothing(tiny: PolicyShape) -> None:
    weights = weights_of(tiny)
    before = weights.state_for_publish()
    report = update(weights, sampled(weights, version=2), version=3, settings=SETTINGS)
    after = weights.state_for_publish()
    assert report.tokens == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_groups_without_a_difference_are_measured_but_change_nothing(tiny: PolicyShape) -> None:
    weights = weights_of(tiny)
    before = weights.state_for_publish()
    equal = [replace(one, reward=0.3) for one in sampled(weights)]
    report = update(weights, equal, version=3, settings=SETTINGS)
    after = weights.state_for_publish()
    assert report.logprob_gap["local"][1] == report.tokens > 0
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_ratio_beyond_the_clip_is_counted(tiny: PolicyShape) -> None:
    weights = weights_of(tiny)
    trajectories = [
        replace(one, outputs=tuple(replace(t, logprob=t.logprob - 2.0) for t in one.outputs))
        for one in sampled(weights)
    ]
    report = update(weights, trajectories, version=3, settings=SETTINGS)
    gains = [a > 0 for a in advantages(trajectories, over_std=False)]
    expected = sum(
        len(one.outputs) for one, positive in zip(trajectories, gains, strict=True) if positive
    )
    assert report.clipped_tokens == expected


def test_the_size_of_a_microbatch_does_not_change_the_update(tiny: PolicyShape) -> None:
    norms = []
    for tokens in (40, 4000):
        weights = weights_of(tiny)
        settings = GrpoSettings(microbatch_tokens=tokens)
        report = update(weights, sampled(weights), version=3, settings=settings)
        norms.append(report.gradient_norm)
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


def test_a_clip_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError):
        GrpoSettings(clip_low=1.5)
