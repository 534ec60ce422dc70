"""A version on its way into one engine: read by its receiver, and tried on copies.

Decides when a full checkpoint takes the place of deltas that do not lead to the version; the
receiver decides what is read. Changes nothing in the engine.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from harvester.contracts.errors import ConfigError, Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import difference
from weightsync.receive.rank_sums import RankSums, published_sums, rank_sums
from weightsync.receive.staged import Staged, tried_foreign
from weightsync.receiver import Receiver
from weightsync.transport.location import StoreRoot
from weightsync.vllm import cpu_linear
from weightsync.vllm.in_place import Layers, Trial, tried_on_copies
from weightsync.vllm.loader_map import LoaderMap
from weightsync.vllm.paced_pool import Pace, PacedPool
from weightsync.vllm.rank_map import RankMap
from weightsync.vllm.shadow_target import ShadowTarget

_logger = logging.getLogger("vllm.rosemux.weightsync")

THREADS = 2
Target: TypeAlias = LoaderMap | ShadowTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedVersion:
    """One version of one store."""

    store: str
    version: WeightVersion
    state_hash: str | None = None
    """The state hash that the caller expects; None accepts the published one."""
    adapter: str | None = None
    """Name that requests give as their model, for a store of LoRA adapters."""

    @property
    def key(self) -> tuple[str, WeightVersion]:
        return self.store, self.version

    def is_other(self, receiver: Receiver, state_hash: str | None, stamp: str) -> bool:
        """Whether another version than the staged one with this state hash and `Store.stamp` is
        wanted: another run may have published this number since. The receiver then reads anew."""
        if self.state_hash is None:
            is_other = receiver.has_other(self.version, state_hash, stamp)
        else:
            is_other = self.state_hash != state_hash
        if is_other:
            receiver.forget()
        return is_other

    def check(self, published: str | None) -> None:
        """Raises Corrupt if the version is not the state that the caller expects."""
        if self.state_hash not in (None, published):
            raise Corrupt(
                f"{self.store} version {self.version} is state {published}, the caller expects "
                f"{self.state_hash}: the version is from another store, or of another run"
            )


@dataclass(frozen=True, slots=True)
class UpdateBase:
    """Base of an update: the version that deltas may build on, and the map used to apply it."""

    target: Target | None = None
    version: WeightVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedVersion:
    base: UpdateBase
    staged: Staged
    trial: Trial = field(default_factory=lambda: Trial({}, {}))
    sums: RankSums = field(default_factory=RankSums)
    mends: bool = False
    """Whether a full checkpoint takes the place of deltas that did not lead to the version."""


class VersionPreparer:
    """Prepares versions of the stores under `root`, one at a time.

    `pool` runs the trials; `packed`: layers that compute from a packed copy, by the storage of
    their plain weight. The other arguments are those of EngineWeights.
    """

    def __init__(
        self,
        root: StoreRoot,
        packed: Mapping[int, Layers],
        pool: Executor,
        *,
        packed_ahead_bytes: int,
        staging_bytes: int,
        sliced: bool,
        settle: Callable[[], None] | None,
    ) -> None:
        self._root = root
        self._packed = packed
        self._pool = pool
        self._packed_ahead_bytes = packed_ahead_bytes
        self._staging_bytes = staging_bytes
        self._sliced = sliced
        self._receive_pool = PacedPool(THREADS, settle=settle)
        self._receivers: dict[str, Receiver] = {}

    def receiver(self, store: str) -> Receiver:
        """The receiver of a store, made at the first request. Raises ConfigError."""
        if store not in self._receivers:
            source = self._root.store(store)
            self._receivers[store] = Receiver(
                source,
                will_select=self._sliced,
                staging_bytes=self._staging_bytes,
                work_pool=self._receive_pool,
            )
        return self._receivers[store]

    @property
    def reapplied(self) -> int:
        """Versions that receivers applied from a full checkpoint after their chain had failed."""
        return sum(held.reapplied for held in self._receivers.values())

    def paced_by(self, pace: Pace) -> None:
        """See EngineWeights."""
        self._receive_pool.pace = pace

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()

    def prepared(
        self, receiver: Receiver, base: UpdateBase, request: RequestedVersion
    ) -> PreparedVersion:
        """The version by the cheapest way whose trial succeeds; raises the receiver's errors, and
        ConfigError for another model's version."""
        staged = self._staged(receiver, base, request, base.version)
        try:
            return self._on_trial(base, staged)
        except Corrupt as error:
            _logger.warning("taking a full checkpoint: %s", error)
            return self.from_full(receiver, base, request)

    def from_full(
        self, receiver: Receiver, base: UpdateBase, request: RequestedVersion
    ) -> PreparedVersion:
        """The version without the deltas from the loaded one, after they have failed; raises as
        `prepared`, and Corrupt."""
        staged = self._staged(receiver, base, request, None)
        return replace(self._on_trial(base, staged), mends=base.target is not None)

    def _on_trial(self, base: UpdateBase, staged: Staged) -> PreparedVersion:
        """Raises Corrupt if the version does not lead to the published state, and Unsupported for
        deltas that its target does not take."""
        target = base.target
        if target is None:
            return PreparedVersion(base=base, staged=staged)
        if not isinstance(target, LoaderMap):
            staged = tried_foreign(staged, target.bits, self._pool)
            return PreparedVersion(base=base, staged=staged)
        if staged.full is None:
            target.check_deltas({step.manifest.delta_encoding for step in staged.plan.steps})
        trial = tried_on_copies(
            target,
            staged,
            self._packed,
            cpu_linear.packed_form,
            self._pool,
            budget_bytes=self._packed_ahead_bytes,
        )
        boxes = {name: staged.parts.boxes[name] for name in staged.parts.partial}
        published = published_sums(staged.parts.slicing, staged.sums)
        sums = rank_sums(boxes, trial.sums, published)
        staged = replace(staged, tried=True)
        return PreparedVersion(base=base, staged=staged, trial=trial, sums=sums)

    def _staged(
        self,
        receiver: Receiver,
        base: UpdateBase,
        request: RequestedVersion,
        current: WeightVersion | None,
    ) -> Staged:
        target = base.target
        receiver.select(target.selection if isinstance(target, RankMap) else None)
        held = None if target is None or receiver.is_partial else target.layout()
        staged = receiver.prepare(current, request.version, held=held, check=request.check)
        if target is not None and target.layout() != staged.layout:
            other = difference(target.layout(), staged.layout)
            raise ConfigError(
                f"store {request.store} holds another model than this engine's: {other}; restart "
                "the engine to load it, if it is the same model in another dtype"
            )
        if isinstance(target, RankMap):
            target.check_unplaced(staged.parts, staged.table)
        return staged
