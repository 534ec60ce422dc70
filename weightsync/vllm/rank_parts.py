"""Finds the tensors of a checkpoint that belong to other ranks.

A rank of a pipeline has placeholders for other ranks' layers; a rank of an expert-parallel group
has a map of its experts. A tensor that is missing for neither reason has no place in the engine at
all, and must be accounted for otherwise.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

import torch

from weightsync.vllm.layers import own_layers

_MISSING_LAYERS = frozenset({"PPMissingLayer", "StageMissingLayer"})
_EXPERT_MAP = "_expert_map"
_EXPERT = re.compile(r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.")


def is_partial(model: torch.nn.Module) -> bool:
    """Whether some of the model's layers or experts are on other ranks."""
    return bool(missing_layers(model) or any(True for _ in _expert_maps(model)))


def held_elsewhere(model: torch.nn.Module, names: Collection[str]) -> set[str]:
    """The names of a checkpoint whose layer or expert is on another rank."""
    prefixes = tuple(f"{layer}." for layer in missing_layers(model))
    maps = dict(_expert_maps(model))
    found = set()
    for name in names:
        own = _own_name(model, name)
        if own.startswith(prefixes) or _is_elsewhere(maps, own):
            found.add(name)
    return found


def _own_name(model: Any, name: str) -> str:
    """The model's own name of a checkpoint tensor."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renamed = mapper.apply_list([name]) if mapper is not None else []
    return str(renamed[0]) if renamed else name


def missing_layers(model: torch.nn.Module) -> list[str]:
    """Names of the layers that are on other ranks of a pipeline."""
    return [n for n, layer in model.named_modules() if type(layer).__name__ in _MISSING_LAYERS]


def _expert_maps(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Index of each expert on this rank, by layer; negative if it is on another rank."""
    for name, layer in own_layers(model):
        held = getattr(layer, _EXPERT_MAP, None)
        if isinstance(held, torch.Tensor):
            yield name, held


def _is_elsewhere(maps: dict[str, torch.Tensor], name: str) -> bool:
    match = _EXPERT.match(name)
    if match is None:
        return False
    expert = int(match["expert"])
    return any(
        (layer == match["layer"] or layer.startswith(f"{match['layer']}."))
        and expert < held.numel()
        and int(held[expert]) < 0
        for layer, held in maps.items()
    )
