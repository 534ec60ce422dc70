"""Interfaces for writing a store: a location, its single writer, and each rank's draft.

    directory_writer.py   a local or shared file system: versions are renamed into place
    object_writer.py      objects: versions are put under names that no index mentions yet

A version appears whole or not at all. A kill at any byte leaves the previous version as it was, and
the next writer sweeps the leftovers.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bytes
from weightsync.layout.names import VersionRef
from weightsync.publish.agreement import Shard
from weightsync.reading.store import Store
from weightsync.transport.directory import local_path

WHOLE_PUTS = frozenset({"abfs", "abfss", "az", "gcs", "gs", "memory", "oss", "s3", "s3a"})
"""Schemes whose stores show an object only once it is complete, and replace it atomically: with
others, a kill could leave half of LATEST."""
_LOCAL = frozenset({"file", "local"})


class DeltaDraft(Protocol):
    """A delta in the making, as one rank writes it.

    Raises Exhausted without space or an answer, ConfigError if the user must act.
    """

    def write(self, file: str, chunks: Iterable[Any]) -> int:
        """Start writing a file of a delta, which `settle` waits for; returns its size."""

    def settle(self) -> None:
        """Wait until every file of `write` is stored durably."""
        return


class Draft(DeltaDraft, Protocol):
    """A version in the making, a delta or a full checkpoint."""

    @property
    def full_file_bytes(self) -> int:
        """Target size of one file of a full checkpoint."""

    def write_all(self, files: Mapping[str, Iterable[Any]]) -> None:
        """Write files of a full checkpoint. Their chunks may be iterated more than once."""

    def written(self, file: str, published: str) -> Bytes:
        """The bytes of a file that `write` took; `published` is its path in the store by now."""

    def close(self) -> None:
        """Stop writing to the draft."""
        return


class StoreWriter(Protocol):
    """The one writer of a store. Raises the errors of a draft."""

    store: Store

    def close(self) -> None:
        """Give the store back. Without a lock the next writer takes it over anyway."""
        return

    def newest(self) -> WeightVersion:
        """The highest number of any version, published or not; 0 for an empty store."""

    def refs(self) -> frozenset[VersionRef]:
        """Every version directory, finished or not."""

    def begin(self, ref: VersionRef) -> str:
        """A unique name to write a version under; earlier ones, of late ranks, are invalid."""

    def place(self, begun: str, shards: Sequence[Shard], *, alone: str) -> dict[str, str]:
        """The final name of each written file, of a single one `alone`; raises Corrupt if a file's
        size differs from its rank's report."""

    def finish(self, begun: str, ref: VersionRef, small: Mapping[str, bytes]) -> None:
        """Make a version with placed files visible; `small` are all others, with the index."""

    def point_latest(self, version: WeightVersion) -> None:
        """Replace LATEST."""

    def remove(self, ref: VersionRef) -> None:
        """Delete one version; a reader sees it whole or not at all."""

    def sizes(self) -> dict[VersionRef, int]:
        """Size of each version, finished or not, except the one begun last."""

    def sweep(self) -> None:
        """Delete unfinished versions."""


class WritableStore(Protocol):
    """A location for a store, before it is opened for writing."""

    ranks_dir: Path | None
    """Directory in which ranks can agree through files; None without a file system."""

    def reader(self) -> Store: ...

    def writer(self) -> StoreWriter:
        """Take the store over. Raises ConfigError if it has a writer already."""

    def draft(self, begun: str) -> Draft:
        """Raises PeerProtocolError for a name that `begin` does not give."""


def writable_store(
    location: Path | str | WritableStore, *, spool_dir: Path | None = None
) -> WritableStore:
    """Raises ConfigError for a location that cannot be published to. `spool_dir` holds deltas that
    await upload."""
    if not isinstance(location, Path | str):
        if not hasattr(location, "draft"):
            raise ConfigError(f"store {location!r}: give its directory or URL")
        return location
    if isinstance(location, Path) or "://" not in location:
        from weightsync.publish.directory_writer import WritableDirectory

        return WritableDirectory(local_path(location))
    scheme = location.partition("://")[0].lower()
    if scheme in _LOCAL:
        return writable_store(Path(url2pathname(urlsplit(location).path)))
    if scheme in {"http", "https"}:
        raise ConfigError(
            f"{location}: weight servers only read; publish to the directory that they serve"
        )
    if scheme not in WHOLE_PUTS:
        raise ConfigError(
            f"{location}: {scheme} is not known to replace an object in one piece; publish to a "
            f"directory, or to one of {', '.join(sorted(WHOLE_PUTS))}"
        )
    from weightsync.publish.object_writer import WritableObjectStore

    return WritableObjectStore(location, spool_dir=spool_dir)


def store_name(location: Path | str) -> str:
    """Name of a store among others: the last part of its location."""
    return str(location).rstrip("/").rpartition("/")[2]
