"""Weights of an engine with LoRA: a base model, and adapters on it by the name in requests.

An adapter's version names the base that it was trained on. It is put in force on exactly that base:
the engine first brings its base there, in the same pause. A base with adapters in force moves in no
other way, so that no request is ever sampled by an adapter on a foreign base. Decides the order of
versions; `storage` holds the adapters in vLLM.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from harvester.contracts.errors import ConfigError, Stale
from harvester.contracts.ids import checked_name
from weightsync.layout.adapter import base_of
from weightsync.layout.manifest import AdapterRecord, Manifest
from weightsync.receive.rank_sums import RankSums, SumVerdict
from weightsync.receive.staged import Applied
from weightsync.vllm.adapter_stores import AdapterCopy, AdapterStores
from weightsync.vllm.engine_weights import KEEPING_LEVEL, EngineWeights
from weightsync.vllm.paced_pool import Pace
from weightsync.vllm.prepared_version import RequestedVersion
from weightsync.vllm.stager import Stager, StageState, StageStatus

_RESTART = "or restart the engine to serve another base"


class AdapterStorage(Protocol):
    """An engine's storage for adapters. A form is its representation of PEFT's files."""

    def read(self, directory: Path) -> Any:
        """The form of the files in a directory; raises Unsupported. Called from another thread."""

    def check(self, form: Any) -> None:
        """Raises ConfigError if the form does not fit the model; changes nothing."""

    def put(self, name: str, form: Any) -> None:
        """Put a form in force under a name; raises ConfigError, and keeps the previous one."""


@dataclass(frozen=True, slots=True)
class _ComingAdapter:
    copy: AdapterCopy
    form: Any
    held: AdapterCopy | None
    """The copy that it was made from."""


class AdaptedWeights:
    """The engine's own thread calls its methods."""

    def __init__(self, base: EngineWeights, stores: AdapterStores, storage: AdapterStorage) -> None:
        self._base = base
        self._stores = stores
        self._storage = storage
        self._stager: Stager[_ComingAdapter] = Stager()
        self._reader: Stager[Manifest | None] = Stager()
        self._moves_base = False
        """Whether the sums of a base were asked for."""
        self._held: dict[str, AdapterCopy] = {}
        """Copies in force, by the name in requests."""

    @property
    def is_loaded(self) -> bool:
        """Whether all weights are known to be published versions that fit each other."""
        fits = all(self._is_on(copy.record) for copy in self._held.values())
        return self._base.is_loaded and fits

    def stage(self, request: RequestedVersion) -> StageStatus:
        """See EngineWeights; if an adapter needs another base, that base is staged next.

        Raises ConfigError or Stale where `load` would refuse a base: callers need not pause.
        """
        self._forget_other(request)
        manifest = self._stores.known(*request.key)
        if manifest is None:
            # A store that does not answer holds up no step.
            read = partial(self._stores.manifest, *request.key)
            status = self._reader.begin(request.key, read)
            if status.state is not StageState.READY:
                return status
            manifest = self._reader.take(request.key, read)
        if manifest is None:
            return self._base.stage(request)
        if (record := manifest.adapter) is None:
            self._check_base_stays(request)
            return self._base.stage(request)
        moves = not self._is_on(record)
        if moves:
            self._check_base_moves(request.adapter, record)
        ready = self._stager.ready(request.key)
        if ready is not None and not self._fits(ready, request):
            self._stager.clear()
        status = self._stager.begin(request.key, self._preparing(request))
        if status.state is StageState.READY and moves:
            return self._base.stage(_base_request(record))
        return status

    def load(self, request: RequestedVersion) -> Applied:
        """Bring the engine to a version of a base or of an adapter; see EngineWeights.

        Raises ConfigError for a base that adapters in force do not fit, for an adapter without a
        name, and for one whose base differs from another adapter's in force.
        """
        self._forget_other(request)
        try:
            if not self._is_adapter(request):
                self._check_base_stays(request)
                return self._base.load(request)
            if request.adapter is None:
                raise ConfigError(
                    f"{request.store} holds LoRA adapters: give the name that requests ask for it "
                    "by as `adapter`"
                )
            return self._load_adapter(checked_name(request.adapter, what="adapter"), request)
        finally:
            self._forget(request)

    def sums(self, request: RequestedVersion, *, anew: bool = False) -> RankSums:
        """See EngineWeights: of the base that the update brings. Ranks have whole adapters."""
        self._forget_other(request)
        manifest = self._stores.manifest(*request.key)
        record = manifest.adapter if manifest is not None else None
        self._moves_base = record is None or not self._is_on(record)
        if not self._moves_base:
            return RankSums()
        base = request if record is None else _base_request(record)
        return self._base.sums(base, anew=anew)

    def judge(self, verdict: SumVerdict) -> None:
        if self._moves_base:
            self._base.judge(verdict)

    def paced_by(self, pace: Pace) -> None:
        """See EngineWeights."""
        self._base.paced_by(pace)
        self._stores.paced_by(pace)

    def fall_asleep(self, level: int) -> None:
        self._base.fall_asleep(level)
        self._stager.clear()
        if level > KEEPING_LEVEL:
            self._held.clear()

    def release(self) -> None:
        self._base.release()

    def report(self) -> dict[str, Any]:
        """The base's report, with each adapter in force under `adapters`."""
        base = self._base.report()
        if not self.is_loaded:
            return {"in_doubt": True} if base else {}
        return base | {"adapters": {n: _shown(c) for n, c in self._held.items()}}

    def close(self) -> None:
        self._stager.clear()
        self._reader.clear()
        self._base.close()
        self._stores.close()

    def _forget_other(self, request: RequestedVersion) -> None:
        """Forget what was read of another run's version of this number: it names another base."""
        if self._stores.has_other(*request.key, request.state_hash):
            self._forget(request)

    def _forget(self, request: RequestedVersion) -> None:
        self._stores.forget(*request.key)
        if self._reader.ready(request.key) is not None:
            self._reader.clear()

    def _load_adapter(self, name: str, request: RequestedVersion) -> Applied:
        coming = self._stager.take(request.key, self._preparing(request))
        if not self._fits(coming, request):
            coming = self._stager.take(request.key, self._preparing(request))
        applied, record = coming.copy.applied, coming.copy.record
        request.check(applied.state_hash)
        if not self._is_on(record):
            self._move_base(name, record, coming.form)
        self._storage.put(name, coming.form)
        self._held[name] = coming.copy
        return applied

    def _fits(self, coming: _ComingAdapter, request: RequestedVersion) -> bool:
        """Whether a preparation is for what is loaded now, and of the version that the store has
        under this number now."""
        copy, receiver = coming.copy, self._stores.receiver(request.store)
        is_other = request.is_other(receiver, copy.applied.state_hash, copy.stamp)
        published = self._stores.known(*request.key)
        if published is not None and published.adapter != copy.record:
            # The same adapter, on another base.
            receiver.forget()
            is_other = True
        return not is_other and coming.held is self._of_store(request.store)

    def _move_base(self, name: str, record: AdapterRecord, form: Any) -> None:
        self._check_base_moves(name, record)
        # Faults of the adapter are found before the base moves.
        self._storage.check(form)
        self._base.load(_base_request(record))

    def _check_base_moves(self, name: str | None, record: AdapterRecord) -> None:
        """Raises ConfigError or Stale if the base cannot become an adapter's. `name`: unknown to
        callers that stage by store and version alone."""
        base = f"{record.base_store} version {record.base_version}"
        if name is not None and (others := sorted(self._held.keys() - {name})):
            raise ConfigError(
                f"adapter {name} belongs to {base}, adapter {others[0]} to another base: an engine "
                f"holds one base, {_RESTART}"
            )
        held = self._base.report()
        if held.get("store") == record.base_store and held["version"] > record.base_version:
            raise Stale(
                f"the adapter's base, {base}, is older than version {held['version']} of that "
                "store, which this engine holds: publish the adapter on a newer base, keep its "
                f"bases in a store of their own, {_RESTART}"
            )

    def _check_base_stays(self, request: RequestedVersion) -> None:
        if not self._held:
            return
        manifest = self._stores.manifest(*request.key)
        published = manifest.state_hash if manifest else None
        for name, copy in self._held.items():
            if copy.record.base_state_hash != published:
                raise ConfigError(
                    f"{request.store} version {request.version} is not the base of adapter {name} "
                    f"({copy.record.base_store} version {copy.record.base_version}): load an "
                    f"adapter version for the new base, which brings the base along, {_RESTART}"
                )

    def _is_adapter(self, request: RequestedVersion) -> bool:
        manifest = self._stores.manifest(*request.key)
        return manifest is not None and manifest.adapter is not None

    def _is_on(self, record: AdapterRecord) -> bool:
        """Whether the engine is known to hold the adapter's base."""
        return bool(self._base.report().get("state_hash") == record.base_state_hash)

    def _of_store(self, store: str) -> AdapterCopy | None:
        return next((copy for copy in self._held.values() if copy.store == store), None)

    def _preparing(self, request: RequestedVersion) -> Callable[[], _ComingAdapter]:
        """The preparation as a callable, bound to the copy in force now."""
        held = self._of_store(request.store)
        return lambda: self._prepared(request, held)

    def _prepared(self, request: RequestedVersion, held: AdapterCopy | None) -> _ComingAdapter:
        copy = self._stores.copied(*request.key, held, check=request.check)
        with TemporaryDirectory(prefix="rosemux-adapter-") as directory:
            copy.write_to(Path(directory))
            return _ComingAdapter(copy, self._storage.read(Path(directory)), held)


def _base_request(record: AdapterRecord) -> RequestedVersion:
    base = base_of(record)
    return RequestedVersion(store=base.store, version=base.version, state_hash=base.state_hash)


def _shown(copy: AdapterCopy) -> dict[str, Any]:
    base = {"base_store": copy.record.base_store, "base_version": copy.record.base_version}
    return {"store": copy.store, **base, **asdict(copy.applied)}
