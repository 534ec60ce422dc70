"""The weights of one running model: the loaded version, and updates.

    stage   in the background, while the engine runs: prepared (prepared_version.py)
    load    between two steps: written in place, packed forms swapped, the result hashed

Once a version is staged, and again before it is loaded, ranks of one engine are compared with what
the trainer published, by their `sums` (rank_sums.py); `judge` takes the verdict.

Decides whether what was prepared and the loader map are still valid; the receiver decides whether
a state is the published one. Independent of vLLM's wire format.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Corrupt, Unsupported
from weightsync.elements.bits import Layout
from weightsync.reading.memory_budget import STAGING_BYTES
from weightsync.receive.rank_sums import RankSums, SumVerdict
from weightsync.receive.staged import Applied, Staged
from weightsync.receiver import Receiver
from weightsync.transport.location import StoreRoot
from weightsync.vllm import cpu_linear
from weightsync.vllm.cpu_linear import PackedForm
from weightsync.vllm.derived_layers import DerivedLayers
from weightsync.vllm.in_place import Trial, applied_in_place, is_provable
from weightsync.vllm.judged_version import JudgedVersion
from weightsync.vllm.layers import check_layers, check_sinks, derived_layers, refresh_sinks
from weightsync.vllm.loader_map import LoaderMap, traced
from weightsync.vllm.paced_pool import Pace, PacedPool
from weightsync.vllm.prepared_version import (
    THREADS,
    PreparedVersion,
    RequestedVersion,
    Target,
    UpdateBase,
    VersionPreparer,
)
from weightsync.vllm.rank_map import RankMap, traced_rank
from weightsync.vllm.shadow_target import ShadowTarget
from weightsync.vllm.stager import Stager, StageState, StageStatus

_logger = logging.getLogger("vllm.rosemux.weightsync")

KEEPING_LEVEL = 1
"""vLLM's highest level of sleep that keeps the weights."""


class EngineWeights:
    """The engine's own thread calls its methods.

    `root`: location of the stores. `packed_ahead_bytes`: memory that an update may take for packed
    forms before its pause; further layers are packed in the pause. `staging_bytes`: see Receiver.
    `sliced`: the model is one rank of several that share a checkpoint. `is_dummy`: it was started
    with random weights. `settle`: see PacedPool.
    """

    def __init__(
        self,
        model: Any,
        model_config: Any,
        root: StoreRoot,
        *,
        packed_ahead_bytes: int,
        staging_bytes: int = STAGING_BYTES,
        sliced: bool = False,
        is_dummy: bool = False,
        settle: Callable[[], None] | None = None,
    ) -> None:
        check_layers(model)
        self._sliced = sliced
        self._is_dummy = is_dummy
        self._model = model
        self._dtype = getattr(model_config, "dtype", None)
        self._derived = DerivedLayers(derived_layers(model), model_config)
        self._packed = cpu_linear.packed_layers(model)
        self._stager: Stager[PreparedVersion] = Stager()
        self._pool = PacedPool(THREADS, settle=settle)
        self._preparer = VersionPreparer(
            root,
            self._packed,
            self._pool,
            packed_ahead_bytes=packed_ahead_bytes,
            staging_bytes=staging_bytes,
            sliced=sliced,
            settle=settle,
        )
        self._base = UpdateBase()
        self._forms: Mapping[Any, PackedForm] = {}
        self._retired: list[object] = []
        self._loaded: tuple[str, Applied] | None = None
        self._in_doubt = False
        """Whether a failed update, or a sleep that keeps no weights, may have left others than the
        engine's first ones."""
        self._mended = 0
        self._judged: JudgedVersion[PreparedVersion] = JudgedVersion()
        self._clock = MonotonicClock()

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are known to be a published version."""
        return self._loaded is not None

    def stage(self, request: RequestedVersion) -> StageStatus:
        """Prepare a version in the background; repeated calls return its progress.

        A version that all ranks together found wrong is prepared once more, from a full checkpoint,
        and is a failure after that.
        """
        kept, refusal = self._kept(request), self._judged.refusal
        if kept is not None and not refusal:
            return StageStatus(state=StageState.READY)
        # One preparation at a time is in memory.
        self._judged.clear()
        if kept is None:
            ready = self._stager.ready(request.key)
            if ready is not None and not self._fits(ready, request):
                self._stager.clear()
            return self._stager.begin(request.key, self._preparing(request))
        receiver = self._preparer.receiver(request.store)
        receiver.forget()
        if kept.staged.full is not None:
            return StageStatus(state=StageState.FAILED, message=f"Corrupt: {refusal}")
        work = partial(self._preparer.from_full, receiver, kept.base, request)
        return self._stager.begin(request.key, work)

    def load(self, request: RequestedVersion) -> Applied:
        """Bring the model to a version, prepared or not; raises if the model does not hold it.

        A failure before any write (unknown version, broken payload, other shapes) leaves the loaded
        version in force, and before the first update the engine's own weights. Experts and layers
        that are quantised at load are not tried first: there a first store of other shapes is found
        half-written.
        """
        if request.adapter is not None:
            raise ConfigError(
                f"{request.store} holds whole models, or this engine takes no adapters: give "
                "`adapter` for a store of LoRA adapters only, to an engine with --enable-lora"
            )
        prepared, verdict = self._taken(request)
        staged = prepared.staged
        request.check(staged.expected.state_hash)
        self._loaded, self._in_doubt = None, True
        target = prepared.base.target or self._new_target(staged.layout)
        if prepared.base.target is None and isinstance(target, RankMap):
            # Only now this rank's part of the checkpoint is known.
            target.check_unplaced(staged.parts, staged.table)
            staged = staged.narrowed(target.selection)
        self._forms = prepared.trial.forms
        self._retired.append(prepared)
        receiver = self._preparer.receiver(request.store)
        applied = self._settled(receiver, staged, prepared.trial, target, verdict)
        was_whole = prepared.base.target is None and staged.expected.state_hash is not None
        self._judged.loaded(staged, verdict, was_whole=was_whole)
        self._mended += prepared.mends
        self._base = UpdateBase(target, applied.version)
        self._loaded, self._in_doubt = (request.store, applied), False
        return applied

    def sums(self, request: RequestedVersion, *, anew: bool = False) -> RankSums:
        """The sums of this rank's parts of a version, which is prepared first, and is then what
        `load` loads. `anew`: from a full checkpoint, after a verdict against the deltas.

        Empty before the first update, whose full version is compared with the published digests.
        """
        kept = None if anew else self._kept(request)
        self._judged.clear()
        if request.adapter is not None:
            # `load` says why not.
            return RankSums()
        try:
            prepared = kept or self._now(request, anew=anew)
        except Exception as error:
            return self._judged.fail(error)
        self._judged.offer(request.key, prepared)
        return prepared.sums

    def judge(self, verdict: SumVerdict) -> None:
        """Take the verdict on what all ranks have prepared: after one against it, the next `load`
        raises and changes nothing."""
        self._judged.judge(verdict)

    def _kept(self, request: RequestedVersion) -> PreparedVersion | None:
        """The version whose sums were compared while it was staged, if it still fits."""
        prepared = self._judged.kept(request.key)
        return prepared if prepared is not None and self._fits(prepared, request) else None

    def _fits(self, prepared: PreparedVersion, request: RequestedVersion) -> bool:
        """Whether a preparation is for what is loaded now, and of the version that the store has
        under this number now."""
        receiver, staged = self._preparer.receiver(request.store), prepared.staged
        is_other = request.is_other(receiver, staged.expected.state_hash, staged.stamp)
        return not is_other and prepared.base == self._base_for(request.store)

    def _now(self, request: RequestedVersion, *, anew: bool = False) -> PreparedVersion:
        """The version prepared for what is loaded now."""
        if anew:
            receiver = self._preparer.receiver(request.store)
            base = self._base_for(request.store)
            key = (*request.key, anew)
            work = partial(self._preparer.from_full, receiver, base, request)
            return self._stager.take(key, work)
        prepared = self._stager.take(request.key, self._preparing(request))
        if not self._fits(prepared, request):
            prepared = self._stager.take(request.key, self._preparing(request))
        return prepared

    def _taken(self, request: RequestedVersion) -> tuple[PreparedVersion, SumVerdict | None]:
        """The preparation to load, and the verdict on it; raises if it is refused."""
        try:
            prepared, verdict = self._judged.taken(request.key)
        except Exception:
            # The files may be repaired under the same names.
            self._preparer.receiver(request.store).forget()
            raise
        if prepared is not None and self._fits(prepared, request):
            return prepared, verdict
        return self._now(request), None

    def paced_by(self, pace: Pace) -> None:
        """Make every later piece of work ask `pace`."""
        self._pool.pace = pace
        self._preparer.paced_by(pace)

    def fall_asleep(self, level: int) -> None:
        """Wait for background work and drop the staged version, and with vLLM's level 2, which
        keeps no weights, the loaded one: the next update is a full one."""
        self._stager.clear()
        self._judged.clear()
        if level > KEEPING_LEVEL:
            self._loaded, self._in_doubt = None, True

    def release(self) -> None:
        """Free, in the background, the memory of the last update."""
        retired, self._retired, self._forms = self._retired, [], {}
        self._stager.later(retired.clear)

    def report(self) -> dict[str, Any]:
        """The loaded version; empty before the first update. `in_doubt` alone: neither a version
        nor the engine's first weights."""
        if self._loaded is None:
            return {"in_doubt": True} if self._in_doubt else {}
        store, applied = self._loaded
        in_place = isinstance(self._base.target, LoaderMap)
        reapplied = self._mended + self._preparer.reapplied
        report = {"store": store, "in_place": in_place, "reapplied": reapplied, **asdict(applied)}
        if isinstance(self._base.target, RankMap):
            report["sums"] = self._judged.report()
        return report

    def close(self) -> None:
        """Free the preparations; a later update starts over."""
        self._stager.clear()
        self._preparer.close()

    def _preparing(self, request: RequestedVersion) -> Callable[[], PreparedVersion]:
        """The preparation as a callable, bound to the version loaded now."""
        check_sinks(self._model)
        base = self._base_for(request.store)
        receiver = self._preparer.receiver(request.store)
        return lambda: self._preparer.prepared(receiver, base, request)

    def _base_for(self, store: str) -> UpdateBase:
        target = self._base.target
        aside = self._derived.storages()
        if isinstance(target, LoaderMap) and not target.is_current(self._model, aside):
            return UpdateBase()
        if self._loaded is None or self._loaded[0] != store:
            return UpdateBase(target)
        return self._base

    def _settled(
        self,
        receiver: Receiver,
        staged: Staged,
        trial: Trial,
        target: Target,
        verdict: SumVerdict | None,
    ) -> Applied:
        """Raises the errors of the attempt from a full checkpoint, and Corrupt if it leads to other
        parts than those that were verified; the state is then in doubt."""
        mends = False
        if isinstance(target, LoaderMap) and is_provable(staged):
            try:
                applied = applied_in_place(staged, trial, target, self._pool, self._clock)
            except ConfigError:
                raise
            except Exception as error:
                _logger.warning(
                    "the update failed half-applied, taking a full checkpoint: %r", error
                )
                mends = True
                staged = receiver.prepare(None, staged.plan.target)
            else:
                receiver.wrote(staged, trial.digests, trial.sums)
                return applied
        applied = receiver.settle(staged, target)
        if mends and verdict is not None:
            for name, digest in receiver.written_parts.items():
                if trial.digests.get(name) != digest:
                    raise Corrupt(f"{name} of a full checkpoint differs from its verified deltas")
        self._mended += mends
        return applied

    def _new_target(self, layout: Layout) -> Target:
        """The loader's map if it holds, else vLLM's own loader."""
        loading = self._derived.loading if self._derived.exist else None
        entered = loading() if loading else None
        try:
            trace = traced_rank if self._sliced else traced
            return trace(self._model, layout, self._derive, entered, is_dummy=self._is_dummy)
        except Unsupported as reason:
            _logger.warning("weights go through vLLM's own loader: %s", reason)
        return ShadowTarget(self._model, layout, self._derive_all, loading)

    def _derive(self, touched: Collection[int]) -> None:
        """Update all forms derived from weights that the engine computes from."""
        forms, self._forms = self._forms, {}
        self._retired.append(cpu_linear.put_in_force(forms))
        stale = [
            layer for layers in self._packed.values() for layer in layers if layer not in forms
        ]
        cpu_linear.repack(stale, touched, self._pool)
        self._derived.derive(touched)
        refresh_sinks(self._model, self._dtype)

    def _derive_all(self) -> None:
        # The loader has processed the derived layers itself.
        layers = [layer for layers in self._packed.values() for layer in layers]
        cpu_linear.repack(layers, self._packed, self._pool)
        refresh_sinks(self._model, self._dtype)
