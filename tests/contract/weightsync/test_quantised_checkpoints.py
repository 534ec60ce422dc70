"""Checkpoints that a trainer quantised itself: the receiver alone, in the forms that are published.

vLLM's CPU build has kernels for none of them on a CPU without AMX, so no engine takes part.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harvester.contracts.ids import WeightVersion
from tests.integration.slime_writer import raw
from weightsync import Follower, Publisher, Receiver, TensorTarget
from weightsync.receive.held_parts import TensorParallel

State = dict[str, torch.Tensor]
ROWS, COLUMNS, EXPERTS = 256, 512, 2
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp8_block(name: str, weight: torch.Tensor) -> State:
    """DeepSeek V3: blocks of 128 by 128 with a float32 scale."""
    blocks = weight.view(ROWS // 128, 128, COLUMNS // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).view(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}


def fp8_block_powers(name: str, weight: torch.Tensor) -> State:
    """DeepSeek V3.1: the scales are powers of two."""
    state = fp8_block(name, weight)
    scale = torch.exp2(torch.ceil(torch.log2(state[f"{name}.weight_scale_inv"])))
    return state | {f"{name}.weight_scale_inv": scale.to(torch.float8_e8m0fnu)}


def int4(name: str, weight: torch.Tensor) -> State:
    """Kimi K2 as compressed-tensors packs it: eight numbers to an int32."""
    groups = weight.view(ROWS, -1, 32)
    scale = groups.abs().amax(-1) / 7
    codes = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
    packed = torch.zeros(ROWS, COLUMNS // 8, dtype=torch.int32)
    for place in range(8):
        packed |= codes.view(ROWS, -1, 8)[..., place] << (4 * place)
    shape = torch.tensor([ROWS, COLUMNS])
    return {
        f"{name}.weight_packed": packed,
        f"{name}.weight_scale": scale.bfloat16(),
        f"{name}.weight_shape": shape,
    }


def nearest_pairs(scaled: torch.Tensor) -> torch.Tensor:
    """Two FP4 numbers to a byte, the first one in the low half."""
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1).byte() | (scaled < 0).byte() << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4


def nvfp4(name: str, weight: torch.Tensor) -> State:
    """ModelOpt: groups of 16 with a float8 scale, and a float32 scale of the tensor."""
    whole = weight.abs().max() / (6 * 448)
    groups = weight.view(ROWS, -1, 16)
    scale = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    scaled = groups / (scale.float().clamp(min=2**-9) * whole)[..., None]
    return {
        f"{name}.weight": nearest_pairs(scaled.view(ROWS, COLUMNS)),
        f"{name}.weight_scale": scale,
        f"{name}.weight_scale_2": whole.clone(),
        f"{name}.input_scale": torch.tensor(0.5),
    }


def _mx(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.view(*weight.shape[:-1], -1, 32)
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    return nearest_pairs(groups / torch.exp2(exponent)[..., None]), (exponent + 127).byte()


def mxfp4_blocks(name: str, weight: torch.Tensor) -> State:
    """gpt-oss: experts in one tensor, packed numbers and exponents as bytes."""
    blocks, scales = _mx(weight.view(EXPERTS, ROWS // EXPERTS, COLUMNS))
    return {
        f"{name}.experts.gate_up_proj_blocks": blocks,
        f"{name}.experts.gate_up_proj_scales": scales,
        f"{name}.experts.gate_up_proj_bias": weight[:, 0].bfloat16(),
    }


def mxfp4(name: str, weight: torch.Tensor) -> State:
    """The same numbers in dtypes of their own."""
    blocks, scales = _mx(weight)
    return {
        f"{name}.weight": blocks.view(ROWS, COLUMNS // 2).view(torch.float4_e2m1fn_x2),
        f"{name}.weight_scale": scales.view(torch.float8_e8m0fnu),
    }


FORMS = [fp8_block, fp8_block_powers, int4, nvfp4, mxfp4_blocks, mxfp4]
Form = Callable[[str, torch.Tensor], State]


def steps(form: Form) -> list[State]:
    """Four steps of training, each quantised anew from the trainer's own weights."""
    generator = torch.Generator().manual_seed(0)
    masters = {f"layers.{n}": torch.randn(ROWS, COLUMNS, generator=generator) for n in range(2)}
    states = []
    for _ in range(4):
        state = {"norm.weight": torch.randn(COLUMNS, generator=generator).bfloat16()}
        for name, master in masters.items():
            state |= form(name, master)
            master.add_(torch.randn(master.shape, generator=generator) * 1e-3)
        states.append(state)
    return states


def forms(state: State) -> dict[str, object]:
    return {n: (t.dtype, tuple(t.shape), raw(t).tobytes()) for n, t in state.items()}


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_checkpoint_is_followed_bit_for_bit_by_small_deltas(
    tmp_path: Path, form: Form
) -> None:
    store, held = tmp_path / "store", tmp_path / "held"
    with Publisher(store) as publisher, Follower(Receiver(store), held) as follower:
        for version, state in enumerate(steps(form), start=1):
            published = publisher.publish(state)
            follower.pull(WeightVersion(version))
            found: State = {}
            for shard in held.glob("*.safetensors"):
                found |= load_file(shard)
            assert forms(found) == forms(state)
            assert published.is_full == (version == 1)
            if version > 1:
                assert published.bytes_sent < 0.2 * published.bytes_dense


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("form", [fp8_block, fp8_block_powers, int4, mxfp4])
def test_a_rank_has_its_share_of_codes_and_of_scales(tmp_path: Path, form: Form, dim: int) -> None:
    states = steps(form)
    matrices = {name for name, tensor in states[0].items() if tensor.dim() == 2}
    share = TensorParallel(rank=1, ranks=2, dim_of=lambda name: dim if name in matrices else None)
    with Publisher(tmp_path) as publisher:
        for state in states:
            publisher.publish(state)
    wanted = [
        {n: t.chunk(2, dim)[1].contiguous() if n in matrices else t for n, t in state.items()}
        for state in states
    ]
    held = {name: tensor.clone() for name, tensor in wanted[2].items()}
    receiver = Receiver(tmp_path, selection=share)
    receiver.sync(None, WeightVersion(1), TensorTarget(held))
    assert forms(held) == forms(wanted[0])
    receiver.sync(WeightVersion(1), WeightVersion(4), TensorTarget(held))
    assert forms(held) == forms(wanted[3])
