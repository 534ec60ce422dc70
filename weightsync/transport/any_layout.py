"""A store in any known layout, presented in RoseMux's: its own stores are passed through untouched.

For another trainer's store it makes LATEST (the name of the newest complete version), the directory
of version 0 from the base checkpoint, and every index, with the stamp of its file: the run that
wrote it is then known through servers and relays too. The store is only read. Which layout it is
shows once the first version is complete; until then there is no version. Names of another layout
are noticed when the newest version or the directories are asked for.
"""

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.layout.names import (
    INDEX_FILE,
    LATEST_FILE,
    MAX_INDEX_BYTES,
    MAX_VERSION,
    Kind,
    VersionRef,
    named_ref,
)
from weightsync.transport.base_checkpoint import BaseCheckpoint
from weightsync.transport.foreign_layouts import (
    ForeignLayout,
    is_ours,
    kinds,
    layout_of,
    pointed,
    stamped,
)
from weightsync.transport.source import StoreSource

_MAX_POINTER_BYTES = 1024
_BASE = VersionRef(Kind.WEIGHT, WeightVersion(0)).directory


class AnyLayoutSource(StoreSource):
    """`base`: the checkpoint that is version 0 of another trainer's store."""

    def __init__(self, source: StoreSource, base: BaseCheckpoint | None = None) -> None:
        self._source = source
        self.streams, self.range_bytes = source.streams, source.range_bytes
        self._base = base
        self._is_ours = False
        self._found: ForeignLayout | None = None
        self._names: frozenset[str] = frozenset()
        """The store's directories and files as they were read last."""

    def __str__(self) -> str:
        return str(self._source)

    def writer(self) -> str | None:
        layout = self._layout()
        return layout.writer if layout else None

    def directories(self) -> frozenset[str]:
        layout = self._layout(again=True)
        if layout is None:
            return self._names or self._source.directories()
        found = {*self._versions(layout), *([0] if self._base else [])}
        return frozenset(VersionRef(Kind.WEIGHT, WeightVersion(n)).directory for n in found)

    def latest(self, known: bytes | None = None, *, wait_s: float = 0.0) -> bytes | None:
        if self._layout() is None and self._is_ours:
            found = self._source.latest(known, wait_s=wait_s)
            if found is not None or self._layout(again=True) is None:
                return found
        return super().latest(known, wait_s=wait_s)

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        layout = self._layout(again=path == LATEST_FILE)
        if layout is not None and path == LATEST_FILE:
            return self._latest(layout)
        made, source, there = self._located(layout, path)
        return source.read_small(there, limit_bytes) if made is None else made

    def size_bytes(self, path: str) -> int:
        made, source, there = self._located(self._layout(), path)
        return source.size_bytes(there) if made is None else len(made)

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        made, source, there = self._located(self._layout(), path)
        if made is None:
            source.read_range(there, start, into)
            return
        if start + len(into) > len(made):
            raise Corrupt(f"{self}/{path} ends before byte {start + len(into)}")
        into[:] = made[start : start + len(into)]

    def stamp(self, path: str) -> str:
        layout = self._layout()
        if layout is None:
            return self._source.stamp(path)
        source, there = self._at(layout, path)
        stamp = source.stamp(there)
        if layout.pointer is not None:
            stamp = f"{self._pointed(layout.pointer)[0]} {stamp}".strip()
        return stamp

    def doubt(self, path: str) -> None:
        if self._found is None:
            self._source.doubt(path)

    def close(self) -> None:
        self._source.close()

    def _layout(self, *, again: bool = False) -> ForeignLayout | None:
        """The store's foreign layout; None for ours, and before the first complete version. `again`
        lists the store again: another system may have written or replaced its versions."""
        is_found = self._is_ours or self._found is not None
        if is_found and not again:
            return self._found
        try:
            names = self._source.directories()
        except FileNotFoundError:
            # A restarting trainer clears its directory first.
            self._names = frozenset()
            return self._found
        if not is_found or kinds(names) != kinds(self._names):
            self._is_ours, self._found = is_ours(names), None
            if not self._is_ours:
                self._found = layout_of(names, self._index_of, store=str(self))
        self._names = names
        return self._found

    def _index_of(self, directory: str) -> bytes | None:
        try:
            return self._source.read_small(f"{directory}/{INDEX_FILE}", MAX_INDEX_BYTES)
        except FileNotFoundError:
            return None

    def _versions(self, layout: ForeignLayout) -> list[int]:
        """Versions in the folder `below`, or else among the names last read."""
        if not layout.below:
            return layout.versions(self._names)
        try:
            return layout.versions(self._source.names_in(layout.below))
        except FileNotFoundError:
            return []

    def _latest(self, layout: ForeignLayout) -> bytes:
        """Content of LATEST: the newest version with an index. Raises FileNotFoundError."""
        newest = MAX_VERSION
        if layout.pointer is not None:
            newest = self._pointed(layout.pointer)[1]
        for version in self._versions(layout):
            if 0 < version <= newest and self._source.has(layout.path(version, layout.index)):
                return VersionRef(Kind.WEIGHT, WeightVersion(version)).directory.encode()
        raise FileNotFoundError(LATEST_FILE)

    def _pointed(self, pointer: str) -> tuple[str, int]:
        """Run and version in force."""
        raw = self._source.read_small(self._inside(pointer), _MAX_POINTER_BYTES)
        return pointed(raw, path=f"{self}/{pointer}")

    def _located(
        self, layout: ForeignLayout | None, path: str
    ) -> tuple[bytes | None, StoreSource, str]:
        """A file's bytes where they are made here, else None, and where the file lies."""
        if layout is None:
            return None, self._source, path
        made = self._made(layout, path)
        return (None, *self._at(layout, path)) if made is None else (made, self._source, path)

    def _made(self, layout: ForeignLayout, path: str) -> bytes | None:
        """The index in our form, which the store does not have; None for every other file."""
        directory, _, file = path.partition("/")
        if file != INDEX_FILE:
            return None
        if directory == _BASE and self._base is not None:
            return self._base.index
        source, there = self._at(layout, path)
        # Reads the stamp before the bytes: a stamp that is too old only makes a reader restart.
        stamp = self.stamp(path)
        raw = source.read_small(there, MAX_INDEX_BYTES)
        return stamped(layout.shared(raw, f"{self}/{there}") if layout.shared else raw, stamp)

    def _at(self, layout: ForeignLayout, path: str) -> tuple[StoreSource, str]:
        """A file's source and path. Raises FileNotFoundError, and Corrupt for a link out of it."""
        directory, _, file = path.partition("/")
        ref = named_ref(directory)
        if ref is None or ref.kind is not Kind.WEIGHT:
            raise FileNotFoundError(path)
        if ref.version == 0 and self._base is not None:
            if file not in self._base.shards:
                raise FileNotFoundError(path)
            return self._base.source, file
        there = layout.path(ref.version, layout.index if file == INDEX_FILE else file)
        return self._source, self._inside(there)

    def _inside(self, path: str) -> str:
        if not self._source.is_inside(path):
            raise Corrupt(f"{self}/{path} is a link out of the store: it is not read")
        return path
