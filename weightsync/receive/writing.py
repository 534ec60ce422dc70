"""Writes a staged state into a target, and verifies the result.

No publisher gives a digest of a part of a tensor. For a holder's parts, the digest is made from a
copy with the known changes applied, and compared with the bits read back; the copy's base is
compared with the previously read bits, before the first byte changes.
"""

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from harvester.contracts.errors import ConfigError, Corrupt
from weightsync.elements.bits import Bits, Layout
from weightsync.elements.state_hash import digest_of, digests_of
from weightsync.encoding.delta import checked_apply
from weightsync.receive.staged import Staged, check_state
from weightsync.target import ApplyTarget

Digests = Mapping[str, str]


def write_state(
    staged: Staged, target: ApplyTarget, pool: Executor, known: Digests
) -> tuple[str, dict[str, str]]:
    """Returns the state's hash, and the digest of every tensor that is held in part.

    `known`: those digests of the present state. Raises ConfigError if the target has another layout
    and Corrupt if parts have changed (nothing is touched), and Corrupt if the state is not the
    published one (the target is in doubt).
    """
    _check_layout(staged.layout, target.layout())
    cut = staged.parts.cut
    there = {} if staged.full is not None else digests_of(cut, staged.layout, target.bits, pool)
    if any(known.get(name) != digest for name, digest in there.items()):
        raise Corrupt("this holder's parts are not those that were written before")

    def write(name: str) -> str:
        if name in cut:
            return _write_part(staged, target, name)
        _write_whole(staged, target, name)
        return ""

    found = staged.room.spread(pool, write, staged.changed, staged.lent_bytes)
    written = dict(zip(staged.changed, found, strict=True))
    target.finish(staged.changed)
    digests = {name: written.get(name) or known[name] for name in cut}
    expected = staged.expected
    if expected.digests is not None:
        expected = replace(expected, digests={**expected.digests, **digests})
    return check_state(expected, staged.layout, target.bits, pool), digests


def _write_whole(staged: Staged, target: ApplyTarget, name: str) -> None:
    if staged.full is None:
        target.change(name, staged.deltas[name])
        return
    bits = target.bits(name)
    staged.full.copy_into(name, bits)
    target.commit(name, bits)


def _write_part(staged: Staged, target: ApplyTarget, name: str) -> str:
    """Returns the digest of what should be there now."""
    if staged.full is None:
        new: Bits = target.bits(name).copy()
        for delta in staged.deltas[name]:
            checked_apply(delta, new)
    else:
        new = staged.full[name]
    bits = target.bits(name)
    np.copyto(bits, new)
    target.commit(name, bits)
    return digest_of(new)


def _check_layout(published: Layout, held: Layout) -> None:
    if published == held:
        return
    for name in sorted(published.keys() | held.keys()):
        if published.get(name) != held.get(name):
            raise ConfigError(
                f"the store's checkpoint does not fit this model: {name} is "
                f"{published.get(name)} there and {held.get(name)} here"
            )
