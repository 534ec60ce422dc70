from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.grpo.master_weights import policy_of
from examples.grpo.model import KvCache, PolicyModel, write_checkpoint
from examples.grpo.policy_shape import PolicyShape
from examples.grpo.rms_norm import rms_norm
from harvester.contracts.errors import ConfigError


def token_ids(rows: int = 3, tokens: int = 11) -> Tensor:
    return torch.randint(0, 30, (rows, tokens), generator=torch.Generator().manual_seed(1))


def test_the_default_policy_has_three_to_ten_million_parameters() -> None:
    parameters = sum(p.numel() for p in PolicyModel(PolicyShape(), seed=1).parameters())
    assert 3_000_000 <= parameters <= 10_000_000


def test_the_first_weights_are_a_function_of_the_seed(tiny: PolicyShape) -> None:
    one, same, other = (PolicyModel(tiny, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_a_cached_forward_gives_what_a_whole_one_gives(tiny: PolicyShape) -> None:
    policy, ids, cache = PolicyModel(tiny, seed=1), token_ids(), KvCache([])
    whole = policy(ids)
    parts = [policy(ids[:, :6], cache), policy(ids[:, 6:7], cache), policy(ids[:, 7:], cache)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    cache.keep_rows(torch.tensor([2]))
    assert cache.tokens == 11
    assert cache.layers[0][0].shape[0] == 1


def test_padding_at_the_end_changes_nothing_before_it(tiny: PolicyShape) -> None:
    policy, ids = PolicyModel(tiny, seed=1), token_ids()
    padded = torch.cat((ids, torch.zeros(3, 4, dtype=torch.long)), dim=1)
    torch.testing.assert_close(policy(padded)[:, :11], policy(ids), atol=1e-5, rtol=1e-5)


def test_it_is_the_qwen2_that_transformers_loads_from_its_checkpoint(
    tiny: PolicyShape, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    policy = PolicyModel(tiny, seed=1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(2))
    write_checkpoint(tmp_path, tiny, policy.state_dict())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = token_ids()
    with torch.no_grad():
        expected = torch.log_softmax(theirs(ids).logits.float(), dim=-1)
        ours = policy.logprobs(policy(ids))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer("turn 1")["input_ids"] == [15, 4]


def test_a_checkpoint_without_weights_is_configuration_and_tokenizer(
    tiny: PolicyShape, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", tiny)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_a_checkpoint_holds_exactly_the_state(tiny: PolicyShape, tmp_path: Path) -> None:
    state = PolicyModel(tiny, seed=1).to(torch.bfloat16).state_dict()
    write_checkpoint(tmp_path, tiny, state)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


def test_weights_of_another_shape_are_refused(tiny: PolicyShape) -> None:
    state = PolicyModel(
        PolicyShape(hidden=64, intermediate=64, heads=2, kv_heads=2), seed=1
    ).state_dict()
    with pytest.raises(ConfigError, match="shape"):
        policy_of(tiny, state)


def test_rms_norm_and_its_gradients_are_those_of_the_plain_expression() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 200, 16, generator=generator, requires_grad=True)
    weight = torch.randn(16, generator=generator, requires_grad=True)
    upstream = torch.randn(3, 200, 16, generator=generator)
    plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    ours = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(ours, plain)
    expected = torch.autograd.grad(plain, (x, weight), upstream)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, weight), upstream), expected)
