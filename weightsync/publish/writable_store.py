"""Opens a user's location for publishing: a directory or an object store."""

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from harvester.contracts.errors import ConfigError
from weightsync.layout.durable import write_durably
from weightsync.publish.store_writer import FileWriter, WritableStore

WHOLE_PUTS = frozenset({"abfs", "abfss", "az", "gcs", "gs", "memory", "oss", "s3", "s3a"})
"""Schemes whose stores show an object only once it is complete, and replace it atomically: with
others, a kill could leave half of LATEST."""
_LOCAL = frozenset({"file", "local"})


def writable_store(
    location: Path | str, *, write: FileWriter = write_durably, spool_dir: Path | None = None
) -> WritableStore:
    """Raises ConfigError for a location that cannot be published to.

    `write` is the writer for files of a directory; `spool_dir` holds deltas that await upload.
    """
    if isinstance(location, Path) or "://" not in location:
        from weightsync.publish.directory_writer import WritableDirectory

        return WritableDirectory(Path(location), write=write)
    scheme = location.partition("://")[0].lower()
    if scheme in _LOCAL:
        return writable_store(Path(url2pathname(urlsplit(location).path)), write=write)
    if scheme in {"http", "https"}:
        raise ConfigError(
            f"{location}: weight servers only read; publish to the directory that they serve"
        )
    if scheme not in WHOLE_PUTS:
        raise ConfigError(
            f"{location}: {scheme} is not known to replace an object in one piece; publish to a "
            f"directory, or to one of {', '.join(sorted(WHOLE_PUTS))}"
        )
    from weightsync.publish.object_writer import WritableObjects

    return WritableObjects(location, spool_dir=spool_dir)


def store_name(location: Path | str) -> str:
    """Name of a store among others: the last part of its location."""
    return str(location).rstrip("/").rpartition("/")[2]
