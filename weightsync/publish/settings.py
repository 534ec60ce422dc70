"""A publisher's settings that most trainers leave as they are, checked where they are given.

Every error is a ConfigError that names the field and its value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from numbers import Integral, Real
from operator import le
from pathlib import Path
from typing import Any, TypeAlias

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError
from weightsync.encoding.codec import Encoding
from weightsync.layout.names import MAX_VERSION
from weightsync.transport.directory import local_path

MAX_ANCHOR_EVERY = 25
_PUBLISHED = frozenset(Encoding) - {Encoding.DENSE}
_Rule: TypeAlias = Callable[[Any], bool]
_FROM_1 = "use a number from 1"
_is_from_1: _Rule = partial(le, 1)


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
    """ROSEMUX takes the smallest encoding per tensor; CONTEXT a quarter less, at half the speed,
    for receivers of whole tensors behind a slow link, without skip deltas; XOR and OVERWRITE suit
    readers of the shared layout."""
    skip_deltas: bool = True
    """Write skip deltas too, for receivers that have fallen behind."""
    check_finite: bool = False
    """Refuse a state with NaN or infinite elements, by the tensor's name."""

    def __post_init__(self) -> None:
        whole, most = "use a whole number from 1", MAX_ANCHOR_EVERY
        _check(self, f"{whole} to {most}", Integral, "anchor_every", fits=lambda n: 1 <= n <= most)
        _check(self, whole, Integral, "first_version", fits=lambda n: 1 <= n <= MAX_VERSION)
        _check(self, _FROM_1, Real, "keep_versions", fits=_is_from_1)
        _check(self, _FROM_1, Real | None, "max_bytes", fits=lambda n: n is None or n >= 1)
        _check(self, "use True or False", bool, "skip_deltas", "check_finite")
        known = "use rosemux, context, xor or overwrite (anchors are dense anyway)"
        _check(self, known, str, "encoding", fits=_PUBLISHED.__contains__)
        object.__setattr__(self, "encoding", Encoding(self.encoding))
        object.__setattr__(self, "first_version", int(self.first_version))


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
        _check(self, _FROM_1, Real, "threads", "in_flight_bytes", "shard_bytes", fits=_is_from_1)
        _check(self, "give a directory", Path | str | None, "copy_dir")
        _check(self, "give a clock", object, "clock", fits=lambda clock: hasattr(clock, "now"))

    @property
    def spool_dir(self) -> Path | None:
        """`copy_dir` as a path: files that are too large for the memory wait there too."""
        return None if self.copy_dir is None else local_path(self.copy_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """How the ranks of a sharded trainer agree."""

    ranks_dir: Path | str | None = None
    """A directory that every rank reaches; by default the store's own, which an object store
    lacks."""
    rank_timeout_s: float = 600.0
    """Bound on rank 0's wait for the slowest rank."""

    def __post_init__(self) -> None:
        seconds = "use a number of seconds above 0"
        _check(self, seconds, Real, "rank_timeout_s", fits=lambda s: 0 < s < inf)
        _check(self, "give a directory", Path | str | None, "ranks_dir")


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
        announce = "give announce the job's URL at each gateway, or leave it out"
        _check(self, announce, Sequence, "jobs", fits=lambda jobs: not isinstance(jobs, bytes))
        for url in self.urls:
            if not isinstance(url, str):
                raise ConfigError(f"announce: {url!r} is no job's URL: give strings")
        _check(self, "give a file", Path | str | None, "token_file", "ca_file")

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the jobs; empty for an empty string in `jobs`, as a command's option may be."""
        jobs = (self.jobs,) if isinstance(self.jobs, str) else self.jobs
        return tuple(filter(None, jobs))


def check_rank(rank: Any, ranks: Any) -> None:
    if not (isinstance(rank, Integral) and isinstance(ranks, Integral) and 0 <= rank < ranks):  # type: ignore[operator]
        raise ConfigError(f"rank {rank!r} of ranks={ranks!r}: use one from 0 to ranks - 1")


def _check(
    settings: object, remedy: str, kinds: Any, *fields: str, fits: _Rule = lambda _: True
) -> None:
    for field in fields:
        value = getattr(settings, field)
        if not (isinstance(value, kinds) and fits(value)):
            raise ConfigError(f"{field} {value!r}: {remedy}")
