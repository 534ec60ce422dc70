"""Receiving: from the held version to the target version, checked before and after.

    plan     the cheapest steps, resolved whole before anything is touched
    stage    shards read and checked while the engine still runs, into the receiver's own copy
    apply    written in place; then the state in the target is hashed

`stage` fails without having touched the target. After a failed `apply` the target is in doubt until
a full checkpoint has been applied: `settle` does that by itself.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt, RoseMuxError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Layout
from weightsync.layout.adapter import Base, check_base
from weightsync.layout.names import Kind, VersionRef
from weightsync.layout.slices import Slicing
from weightsync.reading.memory_budget import MIN_STAGING_BYTES, STAGING_BYTES, MemoryBudget
from weightsync.reading.spool import Spool
from weightsync.reading.store import Store
from weightsync.receive import held_parts
from weightsync.receive.held_parts import HeldParts, Selection, everything
from weightsync.receive.known_steps import KnownSteps
from weightsync.receive.plan import PlanStep, PullPlan, plans
from weightsync.receive.staged import Applied, Staged, write_state
from weightsync.receive.staging import Staging
from weightsync.receive.target import ApplyTarget
from weightsync.receive.written_runs import BROKEN, WrittenRuns
from weightsync.transport.source import StoreSource

_FRESH_S = 10.0
"""Time after a version for which a server is not asked whether another run has replaced it."""


@dataclass(frozen=True, slots=True)
class _Written:
    """The state last written for a holder of parts, on which the next deltas may build."""

    version: WeightVersion
    table: Mapping[str, str]
    """Published digest of every entry of that version."""
    partial: Mapping[str, str]
    """Digest of the held part of every tensor that is held in part."""
    sums: Mapping[str, int]
    """Published sums of entries of that version, as far as there are any."""
    partial_sums: Mapping[str, int]
    """Sums of held parts, as far as they were found."""
    parts: HeldParts


@dataclass(frozen=True, slots=True)
class _Copy:
    """The last state of another trainer's store that was staged for a holder of parts, who cannot
    check a delta by them: the next deltas are applied to it, in its file, and checked there."""

    step: PlanStep
    """A plan step that stands for the copy: a full checkpoint with 0 bytes to read."""
    staged: Staged


class Receiver:
    """Reads one store for one holder of weights. Not thread-safe.

    `store` is a directory, `http(s)://HOST:PORT/stores/NAME` of a server or a relay, a URL that
    fsspec knows, or a source. Over a network, reading also raises Exhausted.

    `selection`: the holder's part of each tensor, `Receiver.Names` or `Receiver.TensorParallel`;
    None: all of it. Its target's tensors are those parts. `staging_bytes`: memory for a version
    beside the target, until it is applied; the excess waits in a file under `spool_dir` (/var/tmp).
    The largest tensors, one per thread, may take more. `will_select`: the holder's part is only
    known after the first version; see `select`.

    `base_checkpoint`: for the store of another trainer (slime, miles, stitch, SkyRL), the directory
    of the Hugging Face checkpoint that it started from.
    """

    Names, TensorParallel = held_parts.Names, held_parts.TensorParallel

    def __init__(
        self,
        store: Path | str | StoreSource,
        *,
        threads: int = 2,
        base: Base | None = None,
        base_checkpoint: Path | str | None = None,
        selection: Selection | None = None,
        will_select: bool = False,
        staging_bytes: int = STAGING_BYTES,
        spool_dir: Path | None = None,
        work_pool: Executor | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`work_pool` runs decoding, writing and hashing in place of the receiver's own threads;
        its owner shuts it down."""
        MemoryBudget(staging_bytes)
        self._store = Store(store, base_checkpoint=base_checkpoint)
        self.base = base
        """The base of an adapter store's adapters; None for whole models."""
        self._clock = clock or MonotonicClock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weight-receive")
        self._work_pool = work_pool or self._pool
        self._steps = KnownSteps(self._store, self._pool)
        self._selection = selection
        self._copies = will_select or selection is not None
        self._copy: _Copy | None = None
        self._staging_bytes = staging_bytes
        self._spool_dir = spool_dir
        self._parts: tuple[VersionRef, HeldParts] | None = None
        self._written: _Written | None = None
        self._runs = WrittenRuns(self._store, self._steps)
        self._wrote_s = -_FRESH_S
        self._is_closed = False
        self.reapplied = 0
        """Versions that were applied from a full checkpoint after their chain had failed."""

    def select(self, selection: Selection | None) -> None:
        """Change the held part; knowledge of the last written state is kept."""
        if selection is not self._selection:
            self._selection, self._parts = selection, None

    @property
    def written_parts(self) -> Mapping[str, str]:
        """Digest of the held part of every tensor that is held in part, as last written."""
        return self._written.partial if self._written else {}

    @property
    def unseen(self) -> frozenset[str]:
        """The holder's tensors of the version last applied that were compared with digests of
        files alone: of tensors, or of slices of them, that it has not all of."""
        return self._written.parts.unseen if self._written else frozenset()

    @property
    def is_partial(self) -> bool:
        """Whether the holder has only a part of the checkpoint."""
        return self._selection is not None

    def close(self) -> None:
        """End its threads and connections; a read in another thread, or a later one, raises
        ConfigError or Exhausted."""
        self._is_closed = True
        self._pool.shutdown()
        self._store.close()

    def latest(self) -> WeightVersion | None:
        """The newest published version; None before the first one."""
        return self._store.latest()

    @property
    def announces(self) -> bool:
        """Whether `newer` is notified of the next version instead of polling."""
        return self._store.source.announces

    def newer(self, than: WeightVersion | None, *, wait_s: float) -> WeightVersion | None:
        """Waits for a version other than `than`, None after `wait_s`; returns at once if `than` may
        be another run's by now."""
        # A server that announces versions is asked once less for each.
        is_fresh = self.announces and self._clock.now() < self._wrote_s + _FRESH_S
        is_other = not is_fresh and self._runs.has_other(than)
        return self._store.newer(None if is_other else than, wait_s=wait_s)

    def adopt(self, version: WeightVersion, state_hash: str) -> None:
        """The holder has this version, which another receiver wrote."""
        self._runs.adopt(version, state_hash)

    def was_replaced(self, held: WeightVersion, newest: WeightVersion) -> bool:
        """Whether the store's newest version, not above the held one, may be of another run than
        it. A version of another trainer that this receiver did not write always may."""
        self._steps.forget(newest)
        return self._runs.was_replaced(held, newest, is_partial=self.is_partial)

    def plan(self, current: WeightVersion | None, target: WeightVersion) -> PullPlan:
        """The first of `plans`; raises ConfigError, Stale or Corrupt.

        A holder of parts starts from a full checkpoint unless this receiver wrote `current` there.
        """
        with self._forgetting():
            return next(self._plans(current, target, layout_is_known=False))

    def _plans(
        self, current: WeightVersion | None, target: WeightVersion, *, layout_is_known: bool
    ) -> Iterator[PullPlan]:
        given: object = target
        if not isinstance(given, int):
            raise ConfigError(f"version {given!r}: give a number; a store has none at first")
        if self.is_partial and (self._written is None or self._written.version != current):
            current = None
        latest = self._steps.listed(current, target)
        copy = self._copy.step if self._copy else None
        self._steps.look_ahead(current or (copy.ref.version if copy else None), target)
        if current == target:
            self._steps.forget(target)
        is_partial, was_replaced = self.is_partial, self._runs.was_replaced
        if current is not None and was_replaced(current, target, is_partial=is_partial):
            # The trainer restarted, or the run that wrote the held version is unknown here.
            self._steps.forget()
            current = None
        if copy and (
            copy.ref.version > target
            or was_replaced(copy.ref.version, target, copy.manifest.stamp, is_partial=is_partial)
        ):
            self._steps.forget()
            self._copy = copy = None
        # Again, for the indexes of a restarted run; all others are remembered.
        self._steps.look_ahead(current or (copy.ref.version if copy else None), target)
        for plan in plans(
            self._step,
            current=current,
            target=target,
            latest=latest,
            layout_is_known=layout_is_known,
            skips=[ref for ref in self._steps.present if ref.kind is Kind.SKIP],
        ):
            check_base(plan.manifest, self.base)
            yield plan

    def _step(self, ref: VersionRef) -> PlanStep | None:
        if self._copy is not None and ref == self._copy.step.ref:
            return self._copy.step
        return self._steps.step(ref)

    def parts(self, plan: PullPlan, held: Layout | None = None) -> HeldParts:
        """The holder's part of the checkpoint that a plan leads to; `held` as in `prepare`."""
        if plan.root is None:
            if held is None or self.is_partial:
                raise Corrupt(f"no full checkpoint lists the tensors of version {plan.target}")
            return everything(held, Slicing())
        if self._parts is None or self._parts[0] != plan.root.ref:
            slicing = plan.root.manifest.slicing
            if self._copy is not None and plan.root is self._copy.step:
                whole = self._copy.staged.parts.whole
            else:
                whole = slicing.whole(self._store.layout(plan.root.ref, plan.root.manifest))
            self._parts = (plan.root.ref, held_parts.held_parts(whole, slicing, self._selection))
        return self._parts[1]

    def stage(self, plan: PullPlan, held: Layout | None = None) -> Staged:
        """Read and check a plan; raises Corrupt or Stale, with no target touched."""
        budget, known, copy = MemoryBudget(self._staging_bytes), self._written, self._copy
        with self._forgetting(plan):
            is_theirs = any(step.manifest.section is None for step in plan.steps)
            builds_on = self.is_partial and plan.current is not None
            if builds_on and (is_theirs or known is None or known.version != plan.current):
                raise Stale(f"version {plan.current} was not written here: plan again")
            uses = copy is not None and plan.steps[:1] == (copy.step,)
            keeps = self._copies and is_theirs and plan.current is None
            # A kept copy must not hold staging memory between versions.
            in_memory = MemoryBudget(MIN_STAGING_BYTES) if keeps else budget
            table = known.table if known else {}
            parts = self.parts(plan, held)
            self._copy = None
            staging = Staging(
                self._store,
                plan,
                parts,
                self._work_pool,
                budget=budget,
                spool=Spool(in_memory, self._spool_dir),
                known=copy.staged.table if copy and uses else table,
                partial=known.partial if known else {},
                known_sums=known.sums if known else {},
                partial_sums=known.partial_sums if known else {},
                copy=copy.staged.full if copy and uses else None,
            )
            staged = replace(staging.staged(), stamp=plan.stamp)
        if keeps:
            full = replace(plan.manifest, base_version=None, delta_encoding=None)
            self._copy = _Copy(
                PlanStep(VersionRef(Kind.ANCHOR, plan.target), full, 0, plan.stamp), staged
            )
        return staged

    def apply(self, staged: Staged, target: ApplyTarget) -> Applied:
        """Write a staged state in place and verify the result.

        Raises ConfigError if the target has another layout (nothing is touched), and Corrupt if the
        state is not the published one (the target is in doubt).
        """
        started = self._clock.now()
        self._written = None
        with self._forgetting(staged.plan):
            found, partial = write_state(staged, target, self._work_pool)
        self.wrote(staged, partial)
        return staged.applied(found, seconds=self._clock.now() - started)

    def wrote(
        self,
        staged: Staged,
        digests: Mapping[str, str],
        sums: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Remember a staged state that was written and verified, on which deltas may build.

        `digests`: of the holder's tensors, at least of those that are a part of the checkpoint's;
        `sums`: of those, as far as they were found.
        """
        self.wrote_steps(staged)
        if staged.plan.manifest.section is not None:
            # A foreign store publishes no digests of whole entries to build on.
            self._written = _Written(
                staged.plan.target, staged.table, digests, staged.sums, sums, staged.parts
            )

    def wrote_steps(self, staged: Staged) -> None:
        """Remember which trainer's run the written versions come from. A version that is staged and
        never written does not count."""
        self._wrote_s = self._clock.now()
        self._runs.wrote(staged.plan)

    def prepare(
        self,
        current: WeightVersion | None,
        target: WeightVersion,
        *,
        held: Layout | None = None,
        check: Callable[[str | None], None] = lambda _state_hash: None,
    ) -> Staged:
        """Plan and stage, by the first way whose parts are all intact.

        `held` is the layout at `current`, which suffices for a chain if no full checkpoint is
        readable. `check` may refuse a published state before it is read. Raises the fault of the
        first way.
        """
        refused: RoseMuxError | None = None
        broken: set[tuple[VersionRef, ...]] = set()
        ways = self._plans(current, target, layout_is_known=held is not None)
        while True:
            with self._forgetting():
                plan = next(ways, None)
            if plan is None:
                break
            steps = tuple(step.ref for step in plan.steps)
            if steps in broken:
                continue
            try:
                with self._forgetting():
                    check(plan.manifest.state_hash)
                    self.parts(plan, held)
            except BROKEN as refusal:
                # The layout alone may be broken; another full checkpoint has the layout too.
                refused = refused or refusal
                continue
            try:
                return self.stage(plan, held)
            except BROKEN as refusal:
                refused = refused or refusal
                broken.add(steps)
        raise refused or Corrupt(f"no way to version {target} is intact")

    def settle(self, staged: Staged, target: ApplyTarget) -> Applied:
        """Apply; if a chain fails or ends in another state, apply again from a full checkpoint. If
        that raises, the target is in doubt."""
        try:
            return self.apply(staged, target)
        except ConfigError:
            raise
        except Exception:
            if staged.full is not None:
                raise
        applied = self.apply(self.prepare(None, staged.plan.target), target)
        self.reapplied += 1
        return applied

    def sync(
        self, current: WeightVersion | None, target: WeightVersion, buffers: ApplyTarget
    ) -> Applied:
        """Prepare and settle."""
        held = None if self.is_partial else buffers.layout()
        return self.settle(self.prepare(current, target, held=held), buffers)

    def has_other(self, version: WeightVersion, state_hash: str | None, stamp: str) -> bool:
        """Whether the store has another state under this number than the one with this state hash
        and `Store.stamp`."""
        if self._store.stamp(version) in {"", stamp}:
            return False
        # Some file systems give a file another number at each look. A foreign index has no hash.
        with suppress(RoseMuxError):
            found = self._store.manifest(VersionRef(Kind.WEIGHT, version)).state_hash
            return found is None or found != state_hash
        return True

    def forget(self) -> None:
        """Drop all cached reads, which a holder found wrong by other means: they may be repaired
        under the same names."""
        self._steps.forget()
        self._parts = None

    def doubt(self, plan: PullPlan) -> None:
        """Report that a plan led to wrong tensors. Shards of another trainer have no digests: any
        of them may have been damaged in a copy on the way."""
        for step in plan.steps:
            if step.manifest.section is None:
                self._store.doubt(step.ref, step.manifest)

    @contextmanager
    def _forgetting(self, plan: PullPlan | None = None) -> Iterator[None]:
        """Drop all cached reads after a fault: any of them may be wrong, and may be repaired under
        the same name."""
        try:
            yield
        except RoseMuxError as error:
            self.forget()
            if plan is not None and isinstance(error, Corrupt):
                self.doubt(plan)
            raise
        except RuntimeError as error:
            if self._is_closed:
                raise ConfigError("this receiver is closed: make another one") from error
            raise
