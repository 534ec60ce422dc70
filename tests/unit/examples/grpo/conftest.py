import pytest
import torch

from examples.grpo.policy_shape import PolicyShape


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> PolicyShape:
    return PolicyShape(hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1)
