"""Which versions a receiver reads to get from what it holds to what it wants.

Reads manifests only. Takes the cheaper by bytes of the delta chain from the current version and a
full checkpoint with the chain after it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from harvester.contracts.errors import ConfigError, Corrupt, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.layout.manifest import Manifest
from weightsync.reading.store import Kind, VersionRef

MAX_CHAIN = 1024


@dataclass(frozen=True, slots=True)
class Step:
    """One directory to read."""

    ref: VersionRef
    manifest: Manifest
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps in order; the first is a full checkpoint where `current` is None."""

    current: WeightVersion | None
    """The version that the steps build on; None where they start from a full checkpoint."""
    target: WeightVersion
    steps: tuple[Step, ...]
    root: Step
    """The full checkpoint whose layout holds for all steps."""
    manifest: Manifest
    """Of the target version."""

    @property
    def size_bytes(self) -> int:
        return sum(step.size_bytes for step in self.steps)


class StepSource(Protocol):
    def step(self, ref: VersionRef) -> Step | None:
        """The step for one directory, None where it does not exist; raises Corrupt."""
        ...


@dataclass(frozen=True, slots=True)
class _Link:
    """One version on the way back from the target."""

    version: WeightVersion
    full: Step | None
    delta: Step | None


def planned(
    source: StepSource,
    *,
    current: WeightVersion | None,
    target: WeightVersion,
    latest: WeightVersion | None,
) -> Plan:
    """The cheapest plan; a chain wins a tie.

    Raises ConfigError for a version that is not published, Stale for one that is older than what
    is held or already pruned, Corrupt where an index is broken.
    """
    if latest is None or target > latest:
        raise ConfigError(f"version {target} is not published yet; the newest is {latest}")
    if current is not None and target < current:
        raise Stale(f"version {target} is older than version {current}, which is loaded already")
    root: Step | None = None
    goal: Step | None = None
    choices: list[tuple[WeightVersion | None, tuple[Step, ...]]] = []
    chain: tuple[Step, ...] = ()
    for link in _walk(source, target):
        goal = goal or link.delta or link.full
        if link.version == current:
            choices.append((current, chain))
        if link.full is not None:
            root = root or link.full
            choices.append((None, (link.full, *chain)))
        if root is not None and (current is None or link.version <= current):
            break
        if link.delta is not None:
            chain = (link.delta, *chain)
    if root is None or goal is None:
        raise Stale(f"version {target} was pruned or leads to no full checkpoint; take {latest}")
    base, steps = min(
        choices, key=lambda choice: (sum(step.size_bytes for step in choice[1]), choice[0] is None)
    )
    return Plan(current=base, target=target, steps=steps, root=root, manifest=goal.manifest)


def _walk(source: StepSource, target: WeightVersion) -> Iterator[_Link]:
    at = target
    for _ in range(MAX_CHAIN):
        weight = source.step(VersionRef(Kind.WEIGHT, at))
        anchor = source.step(VersionRef(Kind.ANCHOR, at))
        delta = weight if weight is not None and not weight.manifest.is_full else None
        yield _Link(at, anchor or (weight if delta is None else None), delta)
        if delta is None:
            return
        base = delta.manifest.base_version
        if base is None:
            raise Corrupt(f"version {at} is a delta without a base version")
        at = base
