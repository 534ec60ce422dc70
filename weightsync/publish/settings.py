"""A publisher's settings that most trainers leave as they are, checked where they are given.

Every error is a ConfigError that names the field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError
from weightsync.encoding.codec import Encoding

MAX_ANCHOR_EVERY = 25
_MAX_VERSION = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSettings:
    """Contents of a store."""

    anchor_every: int = MAX_ANCHOR_EVERY
    """Versions between full checkpoints, at most 25."""
    keep_versions: int = 50
    """Number of newest versions that stay reachable."""
    max_bytes: int | None = None
    """Bound on the store; older chains go first."""
    first_version: int = 1
    """The least number of the next version: a job that goes on in another store begins above its
    last version, since its versions only rise."""
    encoding: Encoding = Encoding.ROSEMUX
    """ROSEMUX takes the smallest encoding per tensor; XOR and OVERWRITE suit readers of the shared
    layout."""
    skip_deltas: bool = True
    """Also write deltas over several versions, for receivers that have fallen behind."""
    check_finite: bool = False
    """Refuse a state with NaN or infinite elements, by the tensor's name."""

    def __post_init__(self) -> None:
        if self.anchor_every not in range(1, MAX_ANCHOR_EVERY + 1):
            raise ConfigError(f"anchor_every must be a whole number from 1 to {MAX_ANCHOR_EVERY}")
        if not (isinstance(self.first_version, int) and 1 <= self.first_version < _MAX_VERSION):
            raise ConfigError(f"first_version {self.first_version!r}: use a number from 1")
        _check_positive(self, "keep_versions")
        if self.max_bytes is not None:
            _check_positive(self, "max_bytes")
        for field in ("skip_deltas", "check_finite"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field} {getattr(self, field)!r}: use True or False")
        if self.encoding not in {Encoding.ROSEMUX, Encoding.XOR, Encoding.OVERWRITE}:
            raise ConfigError("encoding: use rosemux, xor or overwrite (anchors are dense anyway)")
        object.__setattr__(self, "encoding", Encoding(self.encoding))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSettings:
    """How this process compares and encodes."""

    threads: int = 2
    in_flight_bytes: int = 64 << 20
    """Tensors that are compared at a time, above one per thread."""
    shard_bytes: int = 32 << 20
    """A delta's file is written once it is that large."""
    copy_dir: Path | str | None = None
    """A local directory for a copy of the last version that outlives the process."""
    clock: Clock = MonotonicClock()  # noqa: RUF009 - it has no state

    def __post_init__(self) -> None:
        _check_positive(self, "threads", "in_flight_bytes", "shard_bytes")
        _check_directory("copy_dir", self.copy_dir)

    @property
    def spool_dir(self) -> Path | None:
        """`copy_dir` as a path: files that are too large for the memory wait there too."""
        return None if self.copy_dir is None else Path(self.copy_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """How the ranks of a sharded trainer agree."""

    ranks_dir: Path | str | None = None
    """A directory that every rank reaches; by default the store's own, which an object store
    lacks."""
    rank_timeout_s: float = 600.0
    """Bound on rank 0's wait for the slowest rank."""

    def __post_init__(self) -> None:
        given = self.rank_timeout_s
        if not (isinstance(given, int | float) and 0 < given < inf):
            raise ConfigError(f"rank_timeout_s {given!r}: use a number of seconds above 0")
        _check_directory("ranks_dir", self.ranks_dir)


@dataclass(frozen=True, slots=True)
class AnnounceSettings:
    """Gateways that rank 0 tells of every version. Files are read again when they change."""

    jobs: str | Sequence[str]
    """The job's URL at each, `http://127.0.0.1:8300/v1/jobs/job-a`."""
    token_file: Path | str | None = None
    """The tenant's bearer token."""
    ca_file: Path | str | None = None
    """Certificates to trust besides the system's."""

    def __post_init__(self) -> None:
        given: object = self.jobs
        if isinstance(given, bytes) or not isinstance(given, Sequence):
            raise ConfigError(
                f"announce {given!r}: give the job's URL at each gateway, or leave out"
            )
        for url in self.urls:
            if not isinstance(url, str):
                raise ConfigError(f"announce: {url!r} is no job's URL: give strings")

    @property
    def urls(self) -> tuple[str, ...]:
        """None for an empty `jobs`, as a command's option may be."""
        jobs = (self.jobs,) if isinstance(self.jobs, str) else self.jobs
        return tuple(filter(None, jobs))


def _check_positive(settings: VersionSettings | WorkSettings, *fields: str) -> None:
    for field in fields:
        value = getattr(settings, field)
        if not (isinstance(value, int | float) and value >= 1):
            raise ConfigError(f"{field} {value!r}: use a number from 1")


def _check_directory(field: str, given: object) -> None:
    if not (given is None or isinstance(given, Path | str)):
        raise ConfigError(f"{field} {given!r}: give a directory")
