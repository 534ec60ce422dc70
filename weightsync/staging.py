"""From a plan to checked changes in memory: reads shards, decodes, verifies. Touches no engine.

A plan that starts from a full checkpoint is brought to its final state here and hashed, so that
what is applied later is one plain copy of known bits.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from harvester.contracts.errors import Corrupt
from weightsync import state_hash
from weightsync.bits import Bits, Bytes, Layout, bits_from_bytes
from weightsync.codec import decode
from weightsync.delta import Delta, checked_apply
from weightsync.plan import Plan, Step
from weightsync.shard import shard_data, shard_header
from weightsync.slices import Slicing
from weightsync.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How a final state is recognised."""

    state_hash: str | None
    """None for a version of a foreign store."""
    checksums: Mapping[str, tuple[str, str]]
    """Algorithm and checksum per tensor that a foreign store changed; else empty."""
    slicing: Slicing = field(default_factory=Slicing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Everything that an apply needs, in memory and checked."""

    plan: Plan
    layout: Layout
    full: Mapping[str, Bits] | None
    """The final state where the plan starts from a full checkpoint, already verified."""
    deltas: Mapping[str, tuple[Delta, ...]]
    """Per tensor in the order to apply them; empty where `full` holds the final state."""
    expected: Expected

    @property
    def changed(self) -> tuple[str, ...]:
        return tuple(sorted(self.deltas if self.full is None else self.full))


def stage(store: Store, plan: Plan, layout: Layout, pool: Executor) -> Staged:
    """Reads a plan; raises Corrupt or Stale."""
    slicing = plan.root.manifest.slicing
    entries = slicing.entries(layout)
    full: dict[str, Bits] | None = None
    deltas: dict[str, tuple[Delta, ...]] = {}
    checksums: dict[str, tuple[str, str]] = {}
    for step in plan.steps:
        tensors, sums = _tensors(store, step)
        algorithm = step.manifest.checksum_format
        checksums |= {name: (algorithm, checksum) for name, checksum in sums.items()}
        if step.manifest.is_full:
            parts = {name: bits_from_bytes(data, entries[name]) for name, data in tensors.items()}
            full = slicing.assembled(parts, layout)
        else:
            changes = slicing.joined(_decoded(step, tensors, entries, pool))
            for name, delta in changes.items():
                deltas[name] = (*deltas.get(name, ()), *delta)
    block = plan.manifest.block
    expected = Expected(
        state_hash=block.state_hash if block else None,
        checksums={} if block else checksums,
        slicing=slicing,
    )
    if full is not None:
        _advance(full, deltas, pool)
        check_state(expected, layout, full.__getitem__, pool)
        deltas = {}
    return Staged(plan=plan, layout=layout, full=full, deltas=deltas, expected=expected)


def check_state(
    expected: Expected, layout: Layout, read: Callable[[str], Bits], pool: Executor
) -> str:
    """The hash of the state behind `read`; raises Corrupt where it is not the expected one."""
    digests = expected.slicing.digests(layout, read, pool)
    found = state_hash.combined(digests, expected.slicing.entries(layout))
    if expected.state_hash is not None and found != expected.state_hash:
        raise Corrupt(f"state {found} where {expected.state_hash} was published")
    for name, (algorithm, checksum) in expected.checksums.items():
        if state_hash.foreign_checksum(algorithm, read(name)) != checksum:
            raise Corrupt(f"{name}: not the {algorithm} checksum that was published")
    return found


def _tensors(store: Store, step: Step) -> tuple[dict[str, Bytes], dict[str, str]]:
    """Every tensor of a version and its checksum where there is one."""
    tensors: dict[str, Bytes] = {}
    checksums: dict[str, str] = {}
    for shard in step.manifest.shards:
        data = store.read_shard(step.ref, step.manifest, shard)
        header = shard_header(data)
        tensors |= {name: shard_data(data, header, name) for name in header.layout}
        checksums |= {n: c for n, c in header.metadata.items() if n in header.layout}
    if set(tensors) != set(step.manifest.weight_map):
        raise Corrupt(f"{step.ref.directory}: shards and weight map name different tensors")
    return tensors, checksums


def _decoded(
    step: Step, tensors: Mapping[str, Bytes], layout: Layout, pool: Executor
) -> dict[str, Delta]:
    unknown = sorted(set(tensors) - set(layout))
    if unknown:
        raise Corrupt(f"{step.ref.directory} changes {unknown[0]!r}, which its base does not have")

    def decoded(name: str) -> Delta:
        try:
            return decode(step.manifest.encoding_of(name), tensors[name].data, layout[name])
        except Corrupt as error:
            raise Corrupt(f"{step.ref.directory}, {name}: {error}") from error

    return dict(zip(tensors, pool.map(decoded, tensors), strict=True))


def _advance(
    full: Mapping[str, Bits], deltas: Mapping[str, tuple[Delta, ...]], pool: Executor
) -> None:
    def advance(name: str) -> None:
        for delta in deltas[name]:
            checked_apply(delta, full[name])

    list(pool.map(advance, deltas))
