"""Opens a user's location as a source: a directory, an HTTP URL, or a URL that fsspec knows."""

from contextlib import closing
from pathlib import Path

from harvester.contracts.errors import ConfigError
from harvester.contracts.ids import checked_name, is_name
from weightsync.transport.access import Access
from weightsync.transport.any_layout import AnyLayoutSource
from weightsync.transport.base_checkpoint import BaseCheckpoint
from weightsync.transport.directory import DirectorySource, local_path, readable
from weightsync.transport.source import StoreSource

_SCHEME = "://"
_HTTP = ("http://", "https://")


def source_at(
    location: Path | str,
    access: Access | None = None,
    *,
    base: BaseCheckpoint | None = None,
) -> StoreSource:
    """One store; without `access`, the environment's credentials apply. Raises ConfigError.

    `base`: the checkpoint on which another trainer's deltas build.
    """
    if isinstance(location, Path) or _SCHEME not in location:
        return AnyLayoutSource(DirectorySource(local_path(location)), base)
    access = access or Access.from_environment()
    if location.startswith(_HTTP):
        from weightsync.transport.http_source import HttpSource

        return HttpSource(location, access)
    from weightsync.transport.objects import ObjectStore

    objects = ObjectStore(location, streams=access.streams, retries=access.retries)
    return AnyLayoutSource(objects, base)


class StoreRoot:
    """A place with stores by name: a directory, a bucket's prefix, or `http(s)://HOST:PORT`.

    `base_checkpoint`: its directory, for every store of another trainer.
    """

    def __init__(
        self,
        location: Path | str,
        access: Access | None = None,
        *,
        base_checkpoint: Path | str | None = None,
    ) -> None:
        self._base = None if base_checkpoint is None else BaseCheckpoint(base_checkpoint)
        self._access = access
        if isinstance(location, str):
            # fsspec would follow links out of a store.
            location = location.removeprefix("file://")
            location = location.rstrip("/") or location[:1]
        if isinstance(location, str) and _SCHEME in location:
            self._location: Path | str = location
            # A URL that is none would be refused at each request, as an unknown store.
            source_at(location, access).close()
            return
        self._location = root = local_path(location)
        with readable(root):
            if not root.is_dir():
                raise ConfigError(f"{location} is no directory: give the one that holds the stores")

    def __str__(self) -> str:
        return str(self._location)

    def names(self) -> tuple[str, ...]:
        """Names of the existing stores."""
        if isinstance(self._location, Path):
            with readable(self._location):
                found = [path.name for path in self._location.iterdir() if path.is_dir()]
        elif self._location.startswith(_HTTP):
            from weightsync.transport.http_source import HttpSource

            access = self._access or Access.from_environment()
            with closing(HttpSource(f"{self._location}/stores", access)) as server:
                return server.stores()
        else:
            found = list(source_at(self._location, self._access).directories())
        return tuple(sorted(name for name in found if is_name(name)))

    def store(self, name: str) -> StoreSource:
        """A source for the named store, in whose directory no link leads out of it: its writer is
        another user than its readers. Raises ConfigError if it evidently does not exist."""
        checked_name(name, what="store")
        if isinstance(self._location, Path):
            source = DirectorySource(self._location / name, links_out=False)
            return AnyLayoutSource(source, self._base)
        between = "/stores/" if self._location.startswith(_HTTP) else "/"
        return source_at(f"{self._location}{between}{name}", self._access, base=self._base)
