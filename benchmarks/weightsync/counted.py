"""Sources that count the bytes that a receiver reads from them."""

from weightsync.transport.directory import DirectorySource
from weightsync.transport.http_source import HttpSource
from weightsync.transport.source import StoreSource


class Counted(StoreSource):
    """Stands before a real source's class."""

    read_total = 0

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        self.read_total += len(into)
        super().read_range(path, start, into)  # type: ignore[safe-super]

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        raw = super().read_small(path, limit_bytes)  # type: ignore[safe-super]
        self.read_total += len(raw)
        return raw


class CountedDirectory(Counted, DirectorySource):
    """A store in a directory."""


class CountedHttp(Counted, HttpSource):
    """A store behind a server; an index that was not sent again counts as if it were."""

    def directories(self) -> frozenset[str]:
        found = super().directories()
        self.read_total += sum(len(name) + 3 for name in found)
        return found
