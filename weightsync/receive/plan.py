"""Plans the versions that a receiver reads to get from its version to the target.

Reads manifests only. The first way is the cheaper by bytes of the delta chain from the current
version and a full checkpoint with the chain after it; the others lead further back, for a store
that is broken in part. Another trainer's store is walked to its base only if the chain from the
current version is broken: it has no other full checkpoint, and records no slices of tensors.

Ways over skip deltas come first. A skip delta is what the deltas between its versions add up to, so
that it is smaller than they are, and the delta of every version is still there if one is broken.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale, Unsupported
from harvester.contracts.ids import WeightVersion
from weightsync.layout.manifest import Manifest
from weightsync.layout.names import Kind, VersionRef

MAX_CHAIN = 1024


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One directory to read."""

    ref: VersionRef
    manifest: Manifest
    size_bytes: int
    stamp: str = ""
    """`Store.stamp` of the version, from before the manifest was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """Steps in order; the first is a full checkpoint if `current` is None."""

    current: WeightVersion | None
    """The version that the steps build on; None if they start from a full checkpoint."""
    steps: tuple[PlanStep, ...]
    root: PlanStep | None
    """The full checkpoint whose layout holds for all steps; None uses the holder's layout."""
    manifest: Manifest
    """Manifest of the target version, from the last step."""
    stamp: str
    """`Store.stamp` of the target version, from before its manifest was read."""

    @property
    def target(self) -> WeightVersion:
        return self.manifest.version

    @property
    def size_bytes(self) -> int:
        return sum(step.size_bytes for step in self.steps)


StepOf: TypeAlias = Callable[[VersionRef], PlanStep | None]
"""The step for one directory, None if it does not exist; raises Corrupt."""


@dataclass(slots=True, kw_only=True)
class _Walk:
    """The way back from the target, by the longest of `skips` that do not pass over `since`."""

    step_of: StepOf
    target: WeightVersion
    since: WeightVersion
    skips: Mapping[WeightVersion, Sequence[VersionRef]]
    faults: list[RoseMuxError]
    last: WeightVersion = field(init=False)
    """The oldest version that was reached."""
    has_skipped: bool = False

    def __iter__(self) -> Iterator[tuple[WeightVersion, list[PlanStep], PlanStep | None]]:
        """(version, its full checkpoints, the delta that leads to it) of every version."""
        self.last = self.target
        for _ in range(MAX_CHAIN):
            fulls, delta = self._steps_to(self.last)
            yield self.last, fulls, delta
            if delta is None or delta.manifest.base_version is None:
                return
            self.last = delta.manifest.base_version
        limit = f"over {MAX_CHAIN} deltas away from a full checkpoint"
        self.faults.append(Stale(f"version {self.target} is {limit}"))

    def _steps_to(self, at: WeightVersion) -> tuple[list[PlanStep], PlanStep | None]:
        anchor = self._look(VersionRef(Kind.ANCHOR, at))
        fulls = [] if anchor is None else [anchor]
        for ref in self.skips.get(at, ()):
            if ref.base is None or ref.base < self.since < at:
                continue
            with suppress(Corrupt, Unsupported, Stale):
                skip = self.step_of(ref)
                if skip is not None and skip.manifest.base_version == ref.base:
                    self.has_skipped = True
                    return fulls, skip
        weight = self._look(VersionRef(Kind.WEIGHT, at))
        if weight is None or not weight.manifest.is_full:
            return fulls, weight
        return [*fulls, weight], None

    def _look(self, ref: VersionRef) -> PlanStep | None:
        try:
            return self.step_of(ref)
        except (Corrupt, Unsupported, Stale) as fault:
            self.faults.append(fault)
            return None


def plans(
    step_of: StepOf,
    *,
    current: WeightVersion | None,
    target: WeightVersion,
    latest: WeightVersion | None,
    layout_is_known: bool = False,
    skips: Collection[VersionRef] = (),
) -> Iterator[PullPlan]:
    """Yield ways to the target, the cheapest first (a chain wins a tie); each is read on demand.

    `skips` are the skip deltas that exist; ways without them follow those over them. A directory
    with a broken index is part of no way. With `layout_is_known`, a chain that builds on the
    current version may do without a full checkpoint. Raises ConfigError for a version that is not
    published, Stale for one that is older than the current version; without any way, the first
    fault found, else Stale.
    """
    if latest is None or target > latest:
        raise ConfigError(f"version {target} is not published yet; the newest is {latest}")
    if current is not None and target < current:
        raise Stale(f"version {target} is older than version {current}, which is loaded already")
    faults: list[RoseMuxError] = []
    since = current or WeightVersion(0)
    skipping, single = (
        _Walk(step_of=step_of, target=target, since=since, skips=chosen, faults=faults)
        for chosen in (_longest_first(skips), {})
    )
    over_skips = _plans_along(skipping, current, layout_is_known=layout_is_known)
    by_singles = _plans_along(single, current, layout_is_known=layout_is_known)
    plan = None
    for plan in _alternating(skipping, over_skips, by_singles):
        yield plan
    if plan is None:
        last = single.last if skipping.has_skipped else skipping.last
        raise _no_way(target, last, latest, faults)


def _alternating(
    skipping: _Walk, over_skips: Iterator[PullPlan], by_singles: Iterator[PullPlan]
) -> Iterator[PullPlan]:
    """The best way over skip deltas, then ways without skip deltas, then the others: a broken skip
    delta would be read again after each full checkpoint."""
    first = next(over_skips, None)
    if first is not None:
        yield first
    if skipping.has_skipped:
        yield from by_singles
    yield from over_skips
    if skipping.has_skipped:
        yield from by_singles


def likely_refs(
    present: Collection[VersionRef], *, since: WeightVersion, target: WeightVersion
) -> set[VersionRef]:
    """The directories whose indexes `plans` probably reads, as far as names show it."""
    skips = _longest_first([ref for ref in present if ref.base is not None and ref.base >= since])
    refs = {VersionRef(Kind.WEIGHT, target)}
    reached = target
    for at in sorted({ref.version for ref in present if since < ref.version <= target})[::-1]:
        if at <= reached:
            step = next(iter(skips.get(at, ())), VersionRef(Kind.WEIGHT, at))
            refs |= {step, VersionRef(Kind.ANCHOR, at)}
            reached = at if step.base is None else step.base
    return refs & set(present)


def _longest_first(skips: Collection[VersionRef]) -> dict[WeightVersion, list[VersionRef]]:
    """Skip deltas by the version that they lead to."""
    by_end: dict[WeightVersion, list[VersionRef]] = {}
    for ref in sorted(skips, key=lambda ref: ref.base or 0):
        by_end.setdefault(ref.version, []).append(ref)
    return by_end


def _plans_along(
    walk: _Walk, current: WeightVersion | None, *, layout_is_known: bool
) -> Iterator[PullPlan]:
    goal: PlanStep | None = None
    chain: tuple[PlanStep, ...] = ()
    held: tuple[PlanStep, ...] | None = None
    fulls: list[tuple[PlanStep, ...]] = []
    for version, here, delta in walk:
        goal = goal or next((step for step in (delta, *here) if step), None)
        if goal is None:
            return
        if version == current:
            held = chain
            theirs = all(step.manifest.section is None for step in chain)
            if goal.manifest.section is None and theirs and layout_is_known and not fulls:
                yield _plan(goal, current, held)
        fulls += [(full, *chain) for full in here]
        if fulls and (current is None or version <= current):
            yield from _ways(goal, fulls, current, held)
            fulls.clear()
        if delta is not None:
            chain = (delta, *chain)
    if goal is not None and fulls:
        yield from _ways(goal, fulls, current, held)
    if goal is not None and held is not None and layout_is_known:
        yield _plan(goal, current, held)


def _no_way(
    target: WeightVersion,
    last: WeightVersion,
    latest: WeightVersion,
    faults: Sequence[RoseMuxError],
) -> RoseMuxError:
    """The error for a target to which no way leads; the walk ended at version `last`."""
    if faults:
        return faults[0]
    if last == 0:
        return ConfigError(
            f"version {target} builds on version 0, the checkpoint that its trainer started from: "
            "name its directory (--base-checkpoint, ROSEMUX_BASE_CHECKPOINT or base_checkpoint=)"
        )
    if last != target:
        return Stale(f"version {target} builds on version {last}, which is not in the store")
    return Stale(f"version {target} was pruned or leads to no full checkpoint; take {latest}")


def _plan(
    goal: PlanStep,
    current: WeightVersion | None,
    steps: tuple[PlanStep, ...],
    root: PlanStep | None = None,
) -> PullPlan:
    return PullPlan(
        current=current, steps=steps, root=root, manifest=goal.manifest, stamp=goal.stamp
    )


def _ways(
    goal: PlanStep,
    fulls: Sequence[tuple[PlanStep, ...]],
    current: WeightVersion | None,
    held: tuple[PlanStep, ...] | None,
) -> list[PullPlan]:
    """Ways from each of these full checkpoints, and from the current version with their layout."""
    ways = [_plan(steps[-1], None, steps, steps[0]) for steps in fulls]
    if held is not None:
        ways.append(_plan(goal, current, held, fulls[0][0]))
    return sorted(ways, key=lambda way: (way.size_bytes, way.current is None))
