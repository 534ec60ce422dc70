"""Events, effects and settings of the version policy."""

import msgspec

from harvester.contracts.ids import EngineId, JobId, WeightVersion
from scheduler.model import EngineKind


class VersionsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    retry_s: float = 2.0
    """Delay from a failed update to the next try, in s."""
    min_dedicated: int = 0
    """Dedicated engines that must serve a version before its publish counts as settled."""


class EngineJoined(msgspec.Struct, frozen=True, kw_only=True, tag="engine_joined"):
    """An engine with unknown weights: it has started, come back or been leased."""

    engine: EngineId
    kind: EngineKind


class EngineLeft(msgspec.Struct, frozen=True, kw_only=True, tag="engine_left"):
    engine: EngineId


class JobVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The last version a job published. Version 0 is the weights that its engines started with."""

    job: JobId
    store: str
    version: WeightVersion


class VersionPublished(JobVersion, frozen=True, kw_only=True, tag="version_published"):
    state_hash: str = ""
    """Hash of its weights; empty if unknown."""
    cut_exact: bool = False
    """End turns pinned to the old version, with partial output, instead of waiting for them."""
    resumed: bool = False
    """Whether the version comes from the last process's state: engines may have served it."""


class JobActivated(msgspec.Struct, frozen=True, kw_only=True, tag="job_activated"):
    job: JobId


class EngineEmptied(msgspec.Struct, frozen=True, kw_only=True, tag="engine_emptied"):
    """The last turn on a quiescing engine has gone."""

    engine: EngineId


class EngineUpdated(msgspec.Struct, frozen=True, kw_only=True, tag="engine_updated"):
    engine: EngineId
    job: JobId
    version: WeightVersion
    fault: str = ""
    """Why the update failed; empty if it did not."""
    state_hash: str = ""
    """Hash of the weights that it reports; empty if unknown."""


class TimePassed(msgspec.Struct, frozen=True, kw_only=True, tag="time_passed"):
    """A failed update may be due for its next try; an engine that fell silent may have made a
    slower one worth a queued turn."""


VersionsEvent = (
    EngineJoined
    | EngineLeft
    | VersionPublished
    | JobActivated
    | EngineEmptied
    | EngineUpdated
    | TimePassed
)


class Retarget(msgspec.Struct, frozen=True, kw_only=True, tag="retarget"):
    """New turns are for this job and version from now on: the fleet serves it or switches to it.
    An effect of the version policy, an event of routing."""

    job: JobId
    version: WeightVersion


class QuiesceEngine(msgspec.Struct, frozen=True, kw_only=True, tag="quiesce_engine"):
    """Dispatch nothing to it; cut open turns that may go on at the target."""

    engine: EngineId
    cut_exact: bool
    reason: str


class UpdateEngine(JobVersion, frozen=True, kw_only=True, tag="update_engine"):
    """Version 0 is what the engine started with: nothing to load."""

    engine: EngineId
    state_hash: str = ""
    """Hash of the weights to load; empty if unknown."""


class ServeEngine(msgspec.Struct, frozen=True, kw_only=True, tag="serve_engine"):
    engine: EngineId
    job: JobId
    version: WeightVersion


class SettlePublish(msgspec.Struct, frozen=True, kw_only=True, tag="settle_publish"):
    """Every dedicated engine serves the target."""

    job: JobId
    version: WeightVersion


class RefusePublish(msgspec.Struct, frozen=True, kw_only=True, tag="refuse_publish"):
    job: JobId
    version: WeightVersion
    reason: str


VersionsEffect = (
    Retarget | QuiesceEngine | UpdateEngine | ServeEngine | SettlePublish | RefusePublish
)
