"""The state hash tells states apart by every bit, name, dtype and shape, and by nothing else."""

from concurrent.futures import ThreadPoolExecutor

import torch

from weightsync.elements.bits import bits_of, spec_of
from weightsync.elements.state_hash import combined, digests_of


def _hash(state: dict[str, torch.Tensor]) -> str:
    layout = {name: spec_of(tensor) for name, tensor in state.items()}
    with ThreadPoolExecutor(2) as pool:
        digests = digests_of(state, layout, lambda name: bits_of(state[name]), pool)
    return combined(digests, layout)


def test_the_order_of_the_state_dict_does_not_matter() -> None:
    a, b = torch.arange(6.0), torch.ones(3, dtype=torch.bfloat16)
    assert _hash({"a": a, "b": b}) == _hash({"b": b, "a": a})


def test_values_names_dtypes_and_shapes_matter() -> None:
    base = torch.arange(6.0)
    signed_zero = base.clone()
    signed_zero[0] = -0.0
    states = [
        {"a": base},
        {"a": signed_zero},
        {"b": base},
        {"a": base.view(torch.int32)},
        {"a": base.reshape(2, 3)},
        {"a": base, "b": base},
    ]
    assert len({_hash(state) for state in states}) == len(states)
