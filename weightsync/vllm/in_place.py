"""Deltas written into runtime storage in the pause, and tried on copies before it.

On trial every tensor is copied, changed and hashed, so that a base or a delta that does not
lead to the published state is found before anything is touched; packed forms of linear layers are
made from the very copies that were hashed. In the pause each block is hashed as soon as it is
written, while the processor's cache holds it, so that all weights are read once instead of twice.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Corrupt
from weightsync.elements import state_hash
from weightsync.elements.batches import each
from weightsync.elements.bits import Bits, bits_of
from weightsync.encoding.delta import apply_all
from weightsync.receive.staged import Applied, Staged
from weightsync.vllm.cpu_linear import PackedForm
from weightsync.vllm.loader_map import LoaderMap

Layers: TypeAlias = Sequence[Any]
Pack: TypeAlias = Callable[[Any, torch.Tensor], PackedForm]
"""The packed form that a layer would have of a weight."""


def is_hashed_whole(staged: Staged) -> bool:
    """Whether digests of whole tensors lead to the published hash of a chain of deltas."""
    # A version that is stored in slices is hashed by its slices.
    expected = staged.expected
    is_whole = expected.state_hash is not None and not expected.slicing.records
    return staged.full is None and is_whole


def applied_in_place(staged: Staged, target: LoaderMap, pool: Executor, clock: Clock) -> Applied:
    """Write deltas and verify the result; for stagings that `is_hashed_whole` admits.

    What follows only derives packed forms. Tensors that lie whole on a GPU are hashed there.
    Raises Corrupt if the result is not the published state; the target is then in doubt, as after
    any other failure.
    """
    started = clock.now()

    def write(name: str) -> str:
        deltas = staged.deltas.get(name, ())
        if target.flat_at(name) is None:
            if deltas:
                target.change(name, deltas)
            if name in target.hashed_there:
                return ""
            return state_hash.digest_of(target.bits(name))
        return apply_all(deltas, target.bits(name), hashed=True)

    # Largest first, so that the pool does not end on one long tensor.
    names = sorted(staged.layout, key=lambda name: (-staged.layout[name].size_bytes, name))
    written = each(pool, write, names, lambda name: staged.layout[name].size_bytes)
    digests = dict(zip(names, written, strict=True))
    # On the pool, where work on an accelerator that production shares is asked for.
    digests |= pool.submit(target.digests_there).result()
    target.finish(staged.changed)
    found = state_hash.combined(digests, staged.layout)
    if found != staged.expected.state_hash:
        raise Corrupt(f"state {found} where {staged.expected.state_hash} was published")
    return staged.applied(found, seconds=clock.now() - started)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors that are tried together: those of one packed weight, or a single one."""

    names: tuple[str, ...]
    layers: Layers
    size_bytes: int


def tried_on_copies(
    target: LoaderMap,
    staged: Staged,
    packed: Mapping[int, Layers],
    pack: Pack,
    pool: Executor,
    *,
    budget_bytes: int,
) -> dict[Any, PackedForm]:
    """The packed forms of changed layers, as far as the budget goes.

    `packed`: layers that compute from a packed copy, by the storage of their plain weight. Raises
    Corrupt where the update does not lead to the published state.
    """
    digests: dict[str, str] = {}
    forms: dict[Any, PackedForm] = {}
    hashed = is_hashed_whole(staged)
    parts = _parts(target, staged, packed, budget_bytes)
    if not hashed:
        parts = [part for part in parts if part.layers]
    done = each(
        pool,
        lambda part: _try_part(target, staged, part, pack, hashed),
        parts,
        lambda part: part.size_bytes,
    )
    for found, made in done:
        digests |= found
        forms |= made
    if hashed and state_hash.combined(digests, staged.layout) != staged.expected.state_hash:
        raise Corrupt(
            f"version {staged.plan.target} on top of what this engine holds would not be the "
            "published state"
        )
    return forms


def _parts(
    target: LoaderMap, staged: Staged, packed: Mapping[int, Layers], budget_bytes: int
) -> list[_Part]:
    """Largest first, so that the pool does not end on one long part."""
    changed = set(staged.changed)
    whole: list[_Part] = []
    for storage, names in target.names_by_storage().items():
        layers = packed.get(storage, ())
        if layers and changed.intersection(names) and _is_flat(target, layers[0], names):
            whole.append(_Part(tuple(names), layers, int(layers[0].weight.nbytes)))
    ahead: list[_Part] = []
    for part in sorted(whole, key=lambda part: -part.size_bytes):
        needed_bytes = part.size_bytes * len(part.layers)
        if needed_bytes <= budget_bytes:
            budget_bytes -= needed_bytes
            ahead.append(part)
    covered = {name for part in ahead for name in part.names}
    single = [
        _Part((name,), (), spec.size_bytes)
        for name, spec in staged.layout.items()
        if name not in covered
    ]
    return sorted([*ahead, *single], key=lambda part: (-part.size_bytes, part.names))


def _is_flat(target: LoaderMap, layer: Any, names: Sequence[str]) -> bool:
    return bool(layer.weight.is_contiguous()) and all(
        target.flat_at(name) is not None for name in names
    )


def _try_part(
    target: LoaderMap, staged: Staged, part: _Part, pack: Pack, hashed: bool
) -> tuple[dict[str, str], dict[Any, PackedForm]]:
    weight: torch.Tensor | None = None
    if part.layers:
        weight, copies = _weight_copy(target, part)
    else:
        # Unchanged tensors are hashed where they lie.
        copies = {
            name: target.bits(name).copy() if name in staged.deltas else target.bits(name)
            for name in part.names
        }
    digests = {name: _changed(staged, name, bits, hashed) for name, bits in copies.items()}
    forms = {layer: pack(layer, weight) for layer in part.layers if weight is not None}
    return digests, forms


def _weight_copy(target: LoaderMap, part: _Part) -> tuple[torch.Tensor, dict[str, Bits]]:
    """A copy of a layer's weight, padding included, and the tensors in it."""
    held = part.layers[0].weight.detach()
    weight = held.clone()
    bits = bits_of(weight)
    copies = {}
    for name in part.names:
        start = (target.flat_at(name) or 0) - held.storage_offset()
        copies[name] = bits[start : start + target.layout()[name].elements]
    return weight, copies


def _changed(staged: Staged, name: str, bits: Bits, hashed: bool) -> str:
    """Changes a copy; its digest where that is asked for."""
    if staged.full is not None:
        staged.full.copy_into(name, bits)
    return apply_all(staged.deltas.get(name, ()), bits, hashed=hashed)
