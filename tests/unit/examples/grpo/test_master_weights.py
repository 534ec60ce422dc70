import torch

from examples.grpo.master_weights import AdamSettings, MasterWeights
from examples.grpo.model import PolicyModel
from examples.grpo.policy_shape import PolicyShape


def stepped(weights: MasterWeights, times: int = 1) -> None:
    for _ in range(times):
        hidden = weights.policy(torch.tensor([[1, 2, 3]]))
        weights.policy.logprobs(hidden).sum().backward()  # type: ignore[no-untyped-call]
        weights.add_gradients()
        weights.step()


def test_published_weights_are_the_masters_rounded_to_bf16(tiny: PolicyShape) -> None:
    weights = MasterWeights(PolicyModel(tiny, seed=1), AdamSettings(learning_rate=1e-3))
    stepped(weights)
    state, masters = weights.state_for_publish(), weights.masters()
    assert state.keys() == masters.keys()
    assert all(torch.equal(state[name], masters[name].to(torch.bfloat16)) for name in state)


def test_a_published_state_is_a_snapshot(tiny: PolicyShape) -> None:
    weights = MasterWeights(PolicyModel(tiny, seed=1), AdamSettings(learning_rate=1e-2))
    before = weights.state_for_publish()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    stepped(weights)
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    assert any(not torch.equal(weights.state_for_publish()[name], kept[name]) for name in kept)


def test_steps_too_small_for_bf16_add_up_in_the_masters(tiny: PolicyShape) -> None:
    weights = MasterWeights(PolicyModel(tiny, seed=1), AdamSettings(learning_rate=1e-5))
    name = "model.norm.weight"
    first = weights.state_for_publish()[name]
    stepped(weights)
    assert torch.equal(weights.state_for_publish()[name], first)
    stepped(weights, times=600)
    assert not torch.equal(weights.state_for_publish()[name], first)


def test_gradients_do_not_leak_into_the_next_step(tiny: PolicyShape) -> None:
    weights = MasterWeights(PolicyModel(tiny, seed=1), AdamSettings(learning_rate=1e-3))
    stepped(weights)
    assert weights.step() == 0.0
