"""Two consecutive states: synthetic and real Adam steps, checkpoints, versions of a store.

A synthetic step moves every 32-bit master weight as Adam does where noise dominates: by the
learning rate times the first moment over the root of the second, a normal number of deviation
sqrt((1 - beta1) / (1 + beta1)). All matrices move and one embedding row in twenty. The published
value is the master rounded to bfloat16, as mixed-precision trainers do. Real steps are those of
`catch_up`: small models by transformers, AdamW on 32-bit weights.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bits, bits_of, tensor_from_bits
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

_EMBEDDING_ROWS_MOVED = 0.05
_INIT_STD = 0.02
_BETA1 = 0.9
_UPDATE_STD = math.sqrt((1 - _BETA1) / (1 + _BETA1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One step: the same tensors before and after, as bits."""

    name: str
    old: Mapping[str, Bits]
    new: Mapping[str, Bits]

    @property
    def dense_bytes(self) -> int:
        return sum(bits.nbytes for bits in self.new.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense decoder with tied embeddings."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, key_value = self.hidden, self.hidden // 4
        yield "model.embed_tokens.weight", (self.vocabulary, hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.self_attn.q_proj.weight", (hidden, hidden)
            yield f"{at}.self_attn.k_proj.weight", (key_value, hidden)
            yield f"{at}.self_attn.v_proj.weight", (key_value, hidden)
            yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
            yield f"{at}.mlp.gate_proj.weight", (self.intermediate, hidden)
            yield f"{at}.mlp.up_proj.weight", (self.intermediate, hidden)
            yield f"{at}.mlp.down_proj.weight", (hidden, self.intermediate)
            yield f"{at}.input_layernorm.weight", (hidden,)
            yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)


SMALL = Shape(name="114M", layers=14, hidden=768, intermediate=2304, vocabulary=32_000)
LARGE = Shape(name="1B", layers=20, hidden=2048, intermediate=6144, vocabulary=32_000)


def adam_step(shape: Shape, learning_rate: float, *, seed: int) -> Pair:
    """One synthetic step of a model of random weights."""
    generator = torch.Generator().manual_seed(seed)
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for name, size in shape.tensors():
        master = torch.randn(size, generator=generator)
        master = 1 + _INIT_STD * master if "norm" in name else _INIT_STD * master
        update = learning_rate * _UPDATE_STD * torch.randn(size, generator=generator)
        if "embed" in name:
            moved = torch.rand(size[0], generator=generator) < _EMBEDDING_ROWS_MOVED
            update *= moved[:, None]
        old[name] = bits_of(master.bfloat16())
        new[name] = bits_of(master.add_(update).bfloat16())
    return Pair(name=f"adam-{shape.name}-lr{learning_rate:g}", old=old, new=new)


def trained_step(model: str, learning_rate: float) -> Pair:
    """One real step of a model of `catch_up`; tied tensors once."""
    from benchmarks.weightsync.catch_up import Training

    training = Training(model, learning_rate)
    before = training.state()
    training.step()
    after = training.state()
    names = sorted({tensor.data_ptr(): name for name, tensor in before.items()}.values())
    return Pair(
        name=f"adamw-{model}-lr{learning_rate:g}",
        old={name: bits_of(before[name]) for name in names},
        new={name: bits_of(after[name]) for name in names},
    )


def checkpoints(old_dir: Path, new_dir: Path) -> Pair:
    """Two directories of safetensors files. Raises ConfigError where they do not match."""
    old, new = _checkpoint(old_dir), _checkpoint(new_dir)
    for name in sorted(old.keys() | new.keys()):
        shapes = [state[name].size if name in state else None for state in (old, new)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"{name}: {shapes[0]} elements in {old_dir}, {shapes[1]} in {new_dir}"
            )
    return Pair(name=f"{old_dir.name}-{new_dir.name}", old=old, new=new)


def consecutive(store_dir: Path, *, at_most: int) -> Iterator[Pair]:
    """The newest pairs of versions of a store, spread over its versions."""
    receiver = Receiver(store_dir)
    latest = receiver.latest()
    if latest is None or latest < 2:
        return
    first = max(1, latest - 40)
    chosen = sorted(
        {first + (latest - 1 - first) * i // max(1, at_most - 1) for i in range(at_most)}
    )
    for version in chosen:
        old = _version(receiver, WeightVersion(version))
        new = _version(receiver, WeightVersion(version + 1))
        yield Pair(name=f"{store_dir.name}-v{version}-v{version + 1}", old=old, new=new)
    receiver.close()


def _version(receiver: Receiver, version: WeightVersion) -> dict[str, Bits]:
    staged = receiver.prepare(None, version)
    if staged.full is None:
        raise ConfigError(f"version {version} leads to no full checkpoint")
    tensors = {n: tensor_from_bits(b, staged.layout[n]) for n, b in staged.full.items()}
    receiver.settle(staged, TensorTarget(tensors))
    return {name: bits_of(tensor) for name, tensor in tensors.items()}


def _checkpoint(directory: Path) -> dict[str, Bits]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"no *.safetensors in {directory}")
    state: dict[str, Bits] = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            state |= {name: bits_of(shard.get_tensor(name)) for name in shard.keys()}  # noqa: SIM118
    return state
