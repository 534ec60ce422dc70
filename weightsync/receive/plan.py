"""Plans the versions that a receiver reads to get from its version to the target.

Reads manifests only. The first way is the cheaper by bytes of the delta chain from the current
version and a full checkpoint with the chain after it; the others lead further back, for a store
that is broken in part. Another trainer's store is walked to its base only if the chain from the
current version is broken: it has no other full checkpoint, and no slices that one would tell.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync.layout.manifest import Manifest
from weightsync.layout.names import Kind, VersionRef

MAX_CHAIN = 1024


@dataclass(frozen=True, slots=True)
class Step:
    """One directory to read."""

    ref: VersionRef
    manifest: Manifest
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """Steps in order; the first is a full checkpoint if `current` is None."""

    current: WeightVersion | None
    """The version that the steps build on; None if they start from a full checkpoint."""
    target: WeightVersion
    steps: tuple[Step, ...]
    root: Step | None
    """The full checkpoint whose layout holds for all steps; None uses the holder's layout."""
    manifest: Manifest
    """Manifest of the target version, from the last step."""

    @property
    def size_bytes(self) -> int:
        return sum(step.size_bytes for step in self.steps)


StepOf: TypeAlias = Callable[[VersionRef], Step | None]
"""The step for one directory, None if it does not exist; raises Corrupt."""


@dataclass(frozen=True, slots=True)
class _Link:
    """One version on the way back from the target."""

    version: WeightVersion
    fulls: tuple[Step, ...]
    delta: Step | None


def plans(
    step_of: StepOf,
    *,
    current: WeightVersion | None,
    target: WeightVersion,
    latest: WeightVersion | None,
    layout_is_known: bool = False,
) -> Iterator[PullPlan]:
    """Yield ways to the target, the cheapest first (a chain wins a tie); each is read on demand.

    A directory with a broken index is part of no way. With `layout_is_known`, a chain that builds
    on the current version may do without a full checkpoint. Raises ConfigError for a version that
    is not published, Stale for one that is older than the current version; without any way, the
    first fault found, else Stale.
    """
    if latest is None or target > latest:
        raise ConfigError(f"version {target} is not published yet; the newest is {latest}")
    if current is not None and target < current:
        raise Stale(f"version {target} is older than version {current}, which is loaded already")
    faults: list[RoseMuxError] = []
    goal: Manifest | None = None
    chain: tuple[Step, ...] = ()
    held: tuple[Step, ...] | None = None
    fulls: list[tuple[Step, ...]] = []
    found = False
    last = target
    for link in _walk(step_of, target, faults):
        last = link.version
        if link.version == target:
            goal = next((step.manifest for step in (link.delta, *link.fulls) if step), None)
        if link.version == current:
            held = chain
            theirs = all(step.manifest.block is None for step in chain)
            if goal and goal.block is None and theirs and layout_is_known and not fulls:
                found = True
                yield PullPlan(current=current, target=target, steps=held, root=None, manifest=goal)
        fulls += [(full, *chain) for full in link.fulls]
        if goal is not None and fulls and (current is None or link.version <= current):
            found = True
            yield from _ways(goal, fulls, current, held)
            fulls.clear()
        if link.delta is not None:
            chain = (link.delta, *chain)
    if goal is not None and fulls:
        found = True
        yield from _ways(goal, fulls, current, held)
    if goal is not None and held is not None and layout_is_known:
        found = True
        yield PullPlan(current=current, target=target, steps=held, root=None, manifest=goal)
    if not found and faults:
        raise faults[0]
    if not found and last == 0:
        raise ConfigError(
            f"version {target} builds on version 0, the checkpoint that its trainer started from: "
            "name its directory (--base-checkpoint, ROSEMUX_BASE_CHECKPOINT or base_checkpoint=)"
        )
    if not found and last != target:
        raise Stale(f"version {target} builds on version {last}, which is not in the store")
    if not found:
        raise Stale(f"version {target} was pruned or leads to no full checkpoint; take {latest}")


def _ways(
    goal: Manifest,
    fulls: Sequence[tuple[Step, ...]],
    current: WeightVersion | None,
    held: tuple[Step, ...] | None,
) -> list[PullPlan]:
    """Ways from each of these full checkpoints, and from the current version with their layout."""
    target, root = goal.version, fulls[0][0]
    ways = [
        PullPlan(
            current=None, target=target, steps=steps, root=steps[0], manifest=steps[-1].manifest
        )
        for steps in fulls
    ]
    if held is not None:
        ways.append(PullPlan(current=current, target=target, steps=held, root=root, manifest=goal))
    return sorted(ways, key=lambda way: (way.size_bytes, way.current is None))


def _walk(step_of: StepOf, target: WeightVersion, faults: list[RoseMuxError]) -> Iterator[_Link]:
    def look(kind: Kind, version: WeightVersion) -> Step | None:
        try:
            return step_of(VersionRef(kind, version))
        except (Corrupt, Unsupported, Stale) as fault:
            faults.append(fault)
            return None

    at = target
    for _ in range(MAX_CHAIN):
        weight, anchor = look(Kind.WEIGHT, at), look(Kind.ANCHOR, at)
        delta = weight if weight is not None and not weight.manifest.is_full else None
        fulls = (anchor, weight if delta is None else None)
        yield _Link(at, tuple(full for full in fulls if full is not None), delta)
        base = None if delta is None else delta.manifest.base_version
        if base is None:
            return
        at = base
    faults.append(Stale(f"version {target} is over {MAX_CHAIN} deltas away from a full checkpoint"))
