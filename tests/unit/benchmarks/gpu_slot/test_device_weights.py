"""The benchmark of weights on a device, with tiny shapes on the host."""

import json
from typing import Any

import pytest
import torch

from benchmarks.gpu_slot.device_weights import weights as device_weights
from benchmarks.gpu_slot.device_weights.state import (
    LLAMA_8B,
    TINY,
    drawn,
    step_std,
    stepped,
)
from benchmarks.gpu_slot.device_weights.weights import SHARES, measured
from weightsync.elements.bits import spec_of
from weightsync.encoding.delta import Delta

CPU = torch.device("cpu")


def _measured() -> dict[str, Any]:
    found: dict[str, Any] = {}
    measured("cpu", tiny=True, put=found.__setitem__)
    return found


def test_every_part_is_measured_and_every_outcome_equal() -> None:
    found = json.loads(json.dumps(_measured()))
    assert found["hash"]["equal"]
    assert found["control"] == {"digest_differs": True, "bytes_differ": True}
    for share in SHARES:
        part = found[f"delta_{share:g}"]
        assert part["equal"]
        assert part["digests_equal"]
        assert part["host"]["s"] > 0 < part["device"]["s"]
    encodings = found["encodings"]
    assert encodings.keys() == {"dense", "xor", "overwrite", "rosemux"}
    assert all(part["equal"] for part in encodings.values())
    assert found["small_tensors"]["equal"]
    assert found["small_tensors"]["tensors"] > 32


def test_a_device_that_changes_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = device_weights.apply_on_device

    def wrong(delta: Delta, tensor: torch.Tensor) -> None:
        right(delta, tensor)
        tensor.view(-1).view(torch.int16)[-1] ^= 1

    monkeypatch.setattr(device_weights, "apply_on_device", wrong)
    found = _measured()
    for part in ("delta_0.01", "small_tensors"):
        assert not found[part]["equal"]
    assert not found["delta_0.01"]["digests_equal"]
    assert not any(part["equal"] for part in found["encodings"].values())


@pytest.mark.parametrize("share", SHARES)
def test_a_step_changes_that_share_of_the_weights(share: float) -> None:
    old = torch.randn(1 << 19, generator=torch.Generator().manual_seed(3)).mul_(0.02).bfloat16()
    new = stepped(old, step_std(share, CPU), seed=4)
    assert (new != old).float().mean().item() == pytest.approx(share, rel=0.2)


def test_a_step_of_nothing_changes_nothing() -> None:
    old = torch.tensor([1.0, 0.5, -0.25, 0.0, 0.0193]).repeat(1000).bfloat16()
    assert torch.equal(stepped(old, 0.0, seed=4), old)


def test_the_shapes_are_an_8b_models() -> None:
    sizes = dict(LLAMA_8B.tensors())
    layer = sum(torch.Size(size).numel() for name, size in sizes.items() if ".layers.0." in name)
    rest = sum(torch.Size(size).numel() for name, size in sizes.items() if ".layers." not in name)
    assert 32 * layer + rest == 8_030_261_248
    state = drawn(TINY, CPU, seed=0)
    assert {name: spec_of(tensor).dtype for name, tensor in state.items()} == dict.fromkeys(
        dict(TINY.tensors()), "BF16"
    )
