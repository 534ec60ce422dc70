"""Receiving: from the version that is held to the one that is wanted, checked before and after.

    plan     the cheapest steps, resolved whole before anything is touched
    stage    shards read, checked and decoded into memory while the engine still runs
    apply    written in place; then the state that is really there is hashed

`stage` fails without having touched the target. After a failed `apply` the target is in doubt until
a full checkpoint has been applied: `settle` does that by itself.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.adapter import Base, check_base
from weightsync.bits import Layout
from weightsync.plan import Plan, Step, planned
from weightsync.staging import Staged, check_state, stage
from weightsync.store import Kind, Store, VersionRef
from weightsync.target import ApplyTarget
from weightsync.transport.source import StoreSource

MAX_REMEMBERED_STEPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A state that is really there."""

    version: WeightVersion
    state_hash: str
    bytes_read: int
    tensors_changed: int
    from_full: bool
    seconds: float
    """Of the apply alone: writing and verifying."""


class Receiver:
    """Reads one store for one holder of weights. Not thread-safe.

    `store` is a directory, `http(s)://HOST:PORT/stores/NAME` of a server or a relay, a URL that
    fsspec knows, or a source. Where a network stands between, reading also raises Exhausted.
    """

    def __init__(
        self,
        store: Path | str | StoreSource,
        *,
        threads: int = 2,
        base: Base | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store = Store(store)
        self.base = base
        """What an adapter is to work on; None for whole models."""
        self._clock = clock or MonotonicClock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weight-receive")
        self._present: frozenset[VersionRef] = frozenset()
        self._steps: dict[VersionRef, Step] = {}
        self._layout: tuple[VersionRef, Layout] | None = None
        self.reapplied = 0
        """Applies that tore or ended in another state than the published one."""

    def close(self) -> None:
        self._pool.shutdown()
        self._store.close()

    def latest(self) -> WeightVersion | None:
        """The newest published version; None before the first one."""
        return self._store.latest()

    @property
    def announces(self) -> bool:
        """Whether `newer` is told of the next version, and need not look again and again."""
        return self._store.announces

    def newer(self, than: WeightVersion | None, *, wait_s: float) -> WeightVersion | None:
        """The newest version once it is not `than` any more; None where that takes too long.

        A server answers as soon as it is published; nothing is asked in the meantime.
        """
        return self._store.newer(than, wait_s=wait_s)

    def plan(self, current: WeightVersion | None, target: WeightVersion) -> Plan:
        """See `planned`: raises ConfigError, Stale or Corrupt."""
        with self._forgetting():
            latest = self._store.latest()
            self._present = self._store.refs()
            self._look_ahead(current, target)
            plan = planned(self, current=current, target=target, latest=latest)
            check_base(plan.manifest, self.base)
            return plan

    def step(self, ref: VersionRef) -> Step | None:
        """The manifest and size of a directory that was there when the plan began.

        Remembered, because versions never change.
        """
        if ref not in self._present:
            return None
        if ref not in self._steps:
            if len(self._steps) >= MAX_REMEMBERED_STEPS:
                self._steps.clear()
            try:
                manifest = self._store.manifest(ref)
            except Stale:
                # An object store shows an anchor that is still being written.
                if ref.kind is Kind.ANCHOR:
                    return None
                raise
            self._steps[ref] = Step(ref, manifest, self._store.size_bytes(ref, manifest))
        return self._steps[ref]

    def _look_ahead(self, current: WeightVersion | None, target: WeightVersion) -> None:
        """Reads the indexes of a long chain at once: over a network each is a few round trips."""
        anchors = (ref.version for ref in self._present if ref.kind is Kind.ANCHOR)
        start = current or max((v for v in anchors if v <= target), default=WeightVersion(0))
        chain = [ref for ref in self._present if start < ref.version <= target]
        if self._store.is_remote and 1 < len(chain) < MAX_REMEMBERED_STEPS:
            list(self._pool.map(self._look_at, chain))

    def _look_at(self, ref: VersionRef) -> None:
        # What is wrong with it is said where the plan comes to it.
        with suppress(RoseMuxError):
            self.step(ref)

    def layout(self, plan: Plan) -> Layout:
        """Names and specs of every tensor of the checkpoint that a plan leads to."""
        if self._layout is None or self._layout[0] != plan.root.ref:
            entries = self._store.layout(plan.root.ref, plan.root.manifest)
            self._layout = (plan.root.ref, plan.root.manifest.slicing.whole(entries))
        return self._layout[1]

    def stage(self, plan: Plan) -> Staged:
        """Reads and decodes a plan; raises Corrupt or Stale, with no target touched."""
        with self._forgetting():
            return stage(self._store, plan, self.layout(plan), self._pool)

    def apply(self, staged: Staged, target: ApplyTarget) -> Applied:
        """Writes a staged state in place and checks what is there then.

        Raises ConfigError where the target has another layout (nothing is touched), and Corrupt
        where the state is not the published one (the target is in doubt).
        """
        started = self._clock.now()
        with self._forgetting():
            _check_layout(staged.layout, target.layout())
            list(self._pool.map(lambda name: _write(staged, target, name), staged.changed))
            target.finish(staged.changed)
            found = check_state(staged.expected, staged.layout, target.bits, self._pool)
        return Applied(
            version=staged.plan.target,
            state_hash=found,
            bytes_read=staged.plan.size_bytes,
            tensors_changed=len(staged.changed),
            from_full=staged.full is not None,
            seconds=self._clock.now() - started,
        )

    def prepare(self, current: WeightVersion | None, target: WeightVersion) -> Staged:
        """plan and stage; where a chain from `current` is broken, from a full checkpoint."""
        plan = self.plan(current, target)
        if plan.current is not None:
            try:
                return self.stage(plan)
            except Corrupt:
                plan = self.plan(None, target)
        return self.stage(plan)

    def settle(self, staged: Staged, target: ApplyTarget) -> Applied:
        """apply; where a chain tears or ends in another state, again from a full checkpoint.

        Raises what the attempt from a full checkpoint raises; the target is then in doubt.
        """
        try:
            return self.apply(staged, target)
        except ConfigError:
            raise
        except Exception:
            self.reapplied += 1
            if staged.full is not None:
                raise
        return self.apply(self.stage(self.plan(None, staged.plan.target)), target)

    def sync(
        self, current: WeightVersion | None, target: WeightVersion, buffers: ApplyTarget
    ) -> Applied:
        """prepare and settle."""
        return self.settle(self.prepare(current, target), buffers)

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """After a refusal nothing that was read is believed again: what was wrong may be any of it,
        and it may be mended under the same name."""
        try:
            yield
        except RoseMuxError:
            self._steps.clear()
            self._layout = None
            raise


def _write(staged: Staged, target: ApplyTarget, name: str) -> None:
    if staged.full is None:
        target.change(name, staged.deltas[name])
        return
    bits = target.bits(name)
    np.copyto(bits, staged.full[name])
    target.commit(name, bits)


def _check_layout(published: Layout, held: Layout) -> None:
    for name in sorted(published.keys() | held.keys()):
        if published.get(name) != held.get(name):
            raise ConfigError(
                f"the store's checkpoint does not fit this model: {name} is "
                f"{published.get(name)} there and {held.get(name)} here"
            )
