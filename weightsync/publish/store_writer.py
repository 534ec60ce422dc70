"""Writing a store: what its one writer and every rank need of the place where it is kept.

    directory_writer.py   a local or shared file system: versions are renamed into place
    object_writer.py      objects: versions are put under names that nothing names yet

A version appears whole or not at all. A kill at any byte leaves the version before as it was, and
the next writer sweeps the leftovers. Nothing here decides about contents.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bytes
from weightsync.publish.agreement import Written
from weightsync.reading.store import Store, VersionRef


class FileWriter(Protocol):
    def __call__(self, path: Path, chunks: Iterable[Any]) -> int:
        """Writes a new file durably; returns its size in bytes."""
        ...


class Draft(Protocol):
    """A version in the making, as one rank writes it.

    Raises Exhausted where there is no room or no answer, ConfigError where the user must act.
    """

    @property
    def full_file_bytes(self) -> int:
        """How large one file of a full checkpoint should become."""
        ...

    def write(self, file: str, chunks: Iterable[Any]) -> int:
        """Takes a file of a delta and returns its size; `settle` waits until it is there."""
        ...

    def write_all(self, files: Mapping[str, Iterable[Any]]) -> None:
        """Writes files of a full checkpoint, which can be iterated again until this returns."""
        ...

    def settle(self) -> None:
        """Returns when every file that was taken is there for good."""
        ...

    def written(self, file: str, published: str) -> Bytes:
        """The bytes of a file that `write` took, which is `published` in the store by now."""
        ...

    def close(self) -> None:
        """Nothing of it is written any more."""
        ...


class StoreWriter(Protocol):
    """The one writer of a store. Errors as those of a draft."""

    store: Store

    def close(self) -> None: ...

    def newest(self) -> WeightVersion:
        """The highest number that any version has, published or not; 0 where there is none."""
        ...

    def refs(self) -> frozenset[VersionRef]:
        """Every version that is there, finished or not."""
        ...

    def begin(self, ref: VersionRef) -> str:
        """A name to write a version under; nobody who was given an earlier one writes there.

        There is one at a time: a straggler may have kept an earlier one from being deleted.
        """
        ...

    def place(self, begun: str, written: Sequence[Written], *, alone: str) -> dict[str, str]:
        """The name in the version of each written file, `alone` for one that is the only one.

        Raises Corrupt where one is not as long as its rank wrote it.
        """
        ...

    def finish(self, begun: str, ref: VersionRef, small: Mapping[str, bytes]) -> None:
        """Makes a version appear whose files are placed; `small` are the others, its index too."""
        ...

    def point_latest(self, version: WeightVersion) -> None:
        """Replaces LATEST."""
        ...

    def remove(self, ref: VersionRef) -> None:
        """Deletes one version; a reader sees it whole or not at all."""
        ...

    def sizes(self) -> dict[VersionRef, int]:
        """What each version takes, finished or not, but for the one that was begun last."""
        ...

    def sweep(self) -> None:
        """Deletes what was begun and not finished."""
        ...


class WritableStore(Protocol):
    """A place for a store, before anybody writes it."""

    ranks_dir: Path | None
    """Where ranks can agree through files; None where there are none."""

    def reader(self) -> Store: ...

    def writer(self) -> StoreWriter:
        """Takes the store over. Raises ConfigError where it has a writer already."""
        ...

    def draft(self, begun: str) -> Draft:
        """Raises PeerProtocolError for a name that `begin` does not give."""
        ...
