"""A Hugging Face checkpoint directory whose tensors are changed in place.

    DIRECTORY/
      rosemux.json                         the version that it holds (apply_journal.py)
      model.safetensors.index.json         model-00001-of-00002.safetensors ...

The shards are memory-mapped, so an apply touches the pages that change and any engine can load the
directory as it is. Concurrent readers use `reading`. This module decides no writes and checks no
hash: follower.py does.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from harvester.contracts.errors import (
    UNDECODABLE,
    ConfigError,
    Corrupt,
    PeerProtocolError,
    RoseMuxError,
    Stale,
)
from harvester.contracts.ids import checked_name
from harvester.platform.whole_file import TEMPORARY, sync_directory
from weightsync.elements.bits import Bits, Layout, TensorSpec, bits_from_bytes, bytes_of
from weightsync.layout.apply_journal import Held, read_record
from weightsync.layout.durable import read_plain, replace_file, storage_error, write_durably
from weightsync.layout.names import INDEX_FILE, LATEST_FILE
from weightsync.layout.shard import (
    shard_chunks,
    shard_data,
    shard_header,
    shard_layouts,
    widest_first,
)
from weightsync.layout.tables import MAX_TABLE_BYTES
from weightsync.receive.target import HostTarget

MAX_SHARD_BYTES = 4 << 30
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors\Z")
_METADATA = {"format": "pt", "kept_by": "rosemux"}
"""transformers refuses a shard without its format."""


class _CheckpointIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: dict[str, int] = {}


class Checkpoint(HostTarget):
    """An ApplyTarget over a directory's mapped shards."""

    def __init__(self, directory: Path) -> None:
        """Raises Corrupt if the directory is not a whole checkpoint that RoseMux wrote."""
        self._shards = {name: _mapped(directory / name) for name in _shard_names(directory)}
        self._shard_of: dict[str, str] = {}
        self._layout: dict[str, TensorSpec] = {}
        self._bits: dict[str, Bits] = {}
        for shard, mapped in self._shards.items():
            data = np.asarray(mapped)
            header = shard_header(data)
            for name, spec in header.layout.items():
                if name in self._bits:
                    raise Corrupt(f"{name} is in {self._shard_of[name]} and in {shard}")
                self._shard_of[name] = shard
                self._layout[name] = spec
                self._bits[name] = bits_from_bytes(shard_data(data, header, name), spec)
        if self._shard_of != _index(directory).weight_map:
            raise Corrupt(f"{directory}: its index and its shards name different tensors")

    def bits(self, name: str) -> Bits:
        return self._bits[name]

    def finish(self, changed: Collection[str]) -> None:
        """Flush the changed shards to disk, before a record claims them."""
        for shard in sorted({self._shard_of[name] for name in changed}):
            self._shards[shard].flush()


def write_checkpoint(
    directory: Path,
    layout: Layout,
    bits: Callable[[str], Bits],
    *,
    max_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Replace the directory's checkpoint. A kill leaves the old one, the new one or a broken one.

    Raises Exhausted if the disk is full.
    """
    groups = _groups(layout, max_bytes)
    shards = {f"model-{i:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups, 1)}
    try:
        for shard, held in shards.items():
            chunks = shard_chunks(held, lambda name: bytes_of(bits(name)).data, _METADATA)
            write_durably(directory / f"{TEMPORARY}{shard}", chunks)
        for shard in _shard_names(directory):
            (directory / shard).unlink()
        for shard in shards:
            (directory / f"{TEMPORARY}{shard}").rename(directory / shard)
        sync_directory(directory)
    except OSError as error:
        sweep(directory)
        raise storage_error(error, directory) from error
    index = _CheckpointIndex(
        weight_map={name: shard for shard, held in shards.items() for name in held},
        metadata={"total_size": sum(spec.size_bytes for spec in layout.values())},
    )
    replace_file(directory / INDEX_FILE, msgspec.json.format(msgspec.json.encode(index), indent=1))


def sweep(directory: Path) -> None:
    """Remove unfinished files."""
    for leftover in directory.glob(f"{TEMPORARY}*"):
        if not leftover.is_dir():
            leftover.unlink()


def check_ours(directory: Path) -> None:
    """Raises ConfigError for a store, and for a directory of weights that RoseMux did not write."""
    if (directory / LATEST_FILE).exists():
        raise ConfigError(f"{directory} is a weight store: name another directory")
    for pattern in ("*.safetensors", "*.bin"):
        for found in sorted(directory.glob(pattern)):
            if not _is_ours(found):
                raise ConfigError(
                    f"{found} is not of our writing and would be replaced: name another directory"
                )


@contextmanager
def reading(directory: Path) -> Iterator[Held]:
    """Yield the directory's version, for the duration of a read.

    Raises Stale if an apply is in progress, and at the end if one began meanwhile: the bytes read
    may then be of two versions. Raises Corrupt if the record is broken.
    """
    held = read_record(directory)
    if not isinstance(held, Held):
        raise Stale(f"{directory} holds no version now: an apply is in progress or was interrupted")
    yield held
    if read_record(directory) != held:
        raise Stale(f"{directory} was changed while it was read: read it again")


def _is_ours(path: Path) -> bool:
    try:
        return dict(shard_header(np.asarray(_mapped(path))).metadata) == _METADATA
    except RoseMuxError:
        return False


def _shard_names(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in directory.iterdir() if _SHARD.match(entry.name)))


def _index(directory: Path) -> _CheckpointIndex:
    try:
        raw = read_plain(directory / INDEX_FILE, MAX_TABLE_BYTES)
        index = msgspec.json.decode(raw, type=_CheckpointIndex)
        for shard in set(index.weight_map.values()):
            checked_name(shard, what="shard")
    except (OSError, *UNDECODABLE, ValueError, RecursionError, PeerProtocolError) as error:
        raise Corrupt(f"{directory / INDEX_FILE}: {error}") from error
    return index


def _mapped(path: Path) -> np.memmap:
    if path.is_symlink():
        raise Corrupt(f"{path} is a link: a follower changes files of its directory alone")
    try:
        return np.memmap(path, dtype=np.uint8, mode="r+")
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} cannot be mapped: {error}") from error


def _groups(layout: Layout, max_bytes: int) -> list[Layout]:
    """Tensors per shard in name order; see `widest_first`."""
    groups = [*shard_layouts(dict(sorted(layout.items())), max_bytes)] or [{}]
    return [widest_first(group) for group in groups]
