"""Deltas written into runtime storage in the pause, and tried on copies before it.

On trial every tensor is copied, changed and hashed, so that a base or a delta that does not
lead to the published state is found before anything is touched; packed forms of linear layers are
made from the very copies that were hashed. A foreign store has checksums of changed tensors only,
so that its trial covers these. A rank's box of a tensor has no published digest: before the change
it must have that of the last update. In the pause each tile is hashed as soon as it is written,
while the processor's cache holds it, so that all weights are read once instead of twice; the
digests must be those of the trial.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Corrupt
from weightsync.elements.batches import each, spread
from weightsync.elements.bits import Bits, bits_of
from weightsync.elements.state_hash import digest_of
from weightsync.encoding.delta import apply_all
from weightsync.layout.box_sums import box_sum, changed_box_sum
from weightsync.layout.slices import SliceRecord, digests_in
from weightsync.receive.full_state import FullState
from weightsync.receive.rank_sums import published_sums
from weightsync.receive.staged import (
    PARTS_CHANGED,
    Applied,
    Staged,
    check_digests,
    check_foreign,
)
from weightsync.vllm.cpu_linear import PackedForm
from weightsync.vllm.loader_map import LoaderMap

Layers: TypeAlias = Sequence[Any]
Slices: TypeAlias = Mapping[str, Sequence[tuple[str, SliceRecord]]]
Pack: TypeAlias = Callable[[Any, torch.Tensor], PackedForm]
"""The packed form that a layer would have of a weight."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of an update, or of a part of it, found on copies."""

    forms: Mapping[Any, PackedForm]
    """Packed forms of changed layers, as far as the budget went."""
    digests: Mapping[str, str]
    """Digest that each of the target's tensors will have; empty unless `is_provable`."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """Sum of each of its tensors that is held in part and whose tensor has a published one."""


def is_provable(staged: Staged) -> bool:
    """Whether copies can show that a chain of deltas leads to the published state."""
    return staged.full is None and staged.expected.state_hash is not None


def applied_in_place(
    staged: Staged, trial: Trial, target: LoaderMap, pool: Executor, clock: Clock
) -> Applied:
    """Write deltas and verify the result; for stagings that are `is_provable`.

    Later steps only derive packed forms. Tensors that lie whole on a GPU are hashed there.
    Raises Corrupt if the result is not that of the trial; the target is then in doubt, as after
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
            return digest_of(target.bits(name))
        return apply_all(deltas, target.bits(name), hashed=True)

    # Largest first, so that the pool does not end on one long tensor.
    names = sorted(staged.layout, key=lambda name: (-staged.layout[name].size_bytes, name))
    written = each(pool, write, names, lambda name: staged.layout[name].size_bytes)
    digests = dict(zip(names, written, strict=True))
    # On the pool, where work on an accelerator that production shares is asked for.
    digests |= pool.submit(target.digests_there).result()
    target.finish(staged.changed)
    for name, digest in digests.items():
        if trial.digests.get(name) != digest:
            raise Corrupt(
                f"{name} differs from the published one after the update: another writer?"
            )
    return staged.applied(str(staged.expected.state_hash), seconds=clock.now() - started)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tensors that are tried together: all of one packed weight, or a single tensor."""

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
) -> Trial:
    """The update's digests, and packed forms of changed layers as far as the budget goes.

    `packed`: layers that compute from a packed copy, by the storage of their plain weight. Raises
    Corrupt where the update does not lead to the published state.
    """
    forms: dict[Any, PackedForm] = {}
    digests: dict[str, str] = {}
    sums: dict[str, int] = {}
    published: dict[str, str] = {}
    partial = staged.parts.partial
    summed = summed_parts(staged)
    slices = staged.expected.slicing.by_tensor() if is_provable(staged) else None
    parts = _parts(target, staged, packed, budget_bytes)
    if slices is None:
        theirs = staged.expected.checksums if staged.full is None else {}
        parts = [part for part in parts if part.layers or theirs.keys() & set(part.names)]
    done = each(
        pool,
        lambda part: _try_part(target, staged, part, pack, partial, summed, slices),
        parts,
        lambda part: part.size_bytes,
    )
    for tried, entries in done:
        forms |= tried.forms
        digests |= tried.digests
        sums |= tried.sums
        published |= entries
    if slices is not None:
        try:
            check_digests(staged.expected, staged.layout, published)
        except Corrupt as error:
            raise Corrupt(
                f"version {staged.plan.target} on top of this engine's weights would not be the "
                f"published state: {error}"
            ) from error
    elif staged.full is not None:
        sums = _sums_of_full(staged.full, staged, summed, pool)
    return Trial(forms, digests, sums)


def summed_parts(staged: Staged) -> frozenset[str]:
    """The holder's tensors that are a part of a tensor with a published sum."""
    known = published_sums(staged.parts.slicing, staged.sums)
    boxes = staged.parts.boxes
    return frozenset(name for name in staged.parts.partial if boxes[name].tensor in known)


def _sums_of_full(
    full: FullState, staged: Staged, summed: Collection[str], pool: Executor
) -> dict[str, int]:
    names = sorted(summed)
    boxes, limit_bytes = staged.parts.boxes, staged.budget.lent_bytes
    found = spread(
        pool,
        lambda name: box_sum(full[name], boxes[name]),
        names,
        staged.lent_bytes,
        limit_bytes=limit_bytes,
    )
    return dict(zip(names, found, strict=True))


def _parts(
    target: LoaderMap, staged: Staged, packed: Mapping[int, Layers], budget_bytes: int
) -> list[_Part]:
    """Largest first, so that the pool does not end on one long part."""
    changed = set(staged.changed)
    whole: list[_Part] = []
    for storage, names in target.names_by_storage().items():
        layers = packed.get(storage, ())
        is_flat = None not in map(target.flat_at, names)
        if layers and changed.intersection(names) and is_flat and layers[0].weight.is_contiguous():
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


def _try_part(
    target: LoaderMap,
    staged: Staged,
    part: _Part,
    pack: Pack,
    partial: Collection[str],
    summed: Collection[str],
    slices: Slices | None,
) -> tuple[Trial, dict[str, str]]:
    """The trial of a part, and the digests by entry of its tensors that are the checkpoint's whole
    ones. `partial`: tensors that are only a part of the checkpoint's; `summed`: those of them whose
    sum is asked for. `slices`: entries of tensors that are stored in slices; None if nothing is
    hashed."""
    weight: torch.Tensor | None = None
    # Once: those on an accelerator are copied to the host.
    held = {name: target.bits(name) for name in part.names}
    if part.layers:
        weight, copies = _weight_copy(target, part)
    else:
        # Unchanged tensors are hashed where they lie.
        copies = {n: bits.copy() if n in staged.deltas else bits for n, bits in held.items()}
    digests: dict[str, str] = {}
    sums: dict[str, int] = {}
    published: dict[str, str] = {}
    for name, bits in copies.items():
        if staged.full is not None:
            staged.full.copy_into(name, bits)
        if slices is None:
            apply_all(staged.deltas.get(name, ()), bits)
            if name in staged.expected.checksums:
                check_foreign(name, *staged.expected.checksums[name], bits)
            continue
        if name in partial and digest_of(bits) != staged.partial_digests.get(name):
            raise Corrupt(PARTS_CHANGED)
        digests[name] = apply_all(staged.deltas.get(name, ()), bits, hashed=True)
        if name in summed:
            # The bits before are those with the known sum, as their digest shows.
            known = staged.partial_sums.get(name)
            sums[name] = changed_box_sum(known, held[name], bits, staged.parts.boxes[name])
        if name in slices:
            published |= digests_in(bits, slices[name])
        elif name not in partial:
            published[name] = digests[name]
    forms = {layer: pack(layer, weight) for layer in part.layers if weight is not None}
    return Trial(forms, digests, sums), published


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
