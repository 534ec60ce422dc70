"""A Hugging Face checkpoint as version 0 of a store: the deltas of other trainers build on it.

The index is made from the shards' headers, because the checkpoint's own index may be missing and
names no version. Serves the shards alone, and writes nothing.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from harvester.contracts.errors import UNDECODABLE, ConfigError, Corrupt
from harvester.contracts.ids import is_name
from weightsync.layout.names import INDEX_FILE, MAX_INDEX_BYTES
from weightsync.transport.directory import DirectorySource, local_path, readable

VARIABLE = "ROSEMUX_BASE_CHECKPOINT"


def has_shards(directory: str) -> bool:
    """Whether it is a local directory with safetensors, as a model of an engine may be."""
    return bool(directory) and any(Path(directory).glob("*.safetensors"))


class BaseCheckpoint:
    """Raises ConfigError if the directory holds no safetensors."""

    def __init__(self, directory: Path | str) -> None:
        path = local_path(directory)
        with readable(path):
            if not path.is_dir():
                raise ConfigError(
                    f"base checkpoint {directory}: no such directory; give the local directory of "
                    "the Hugging Face checkpoint that the trainer started from"
                )
        self.source = DirectorySource(path)

    def __str__(self) -> str:
        return str(self.source)

    @cached_property
    def index(self) -> bytes:
        """An index of version 0; raises ConfigError if a shard cannot be read."""
        weight_map: dict[str, str] = {}
        for shard in self._shards():
            for name in self._names_in(shard):
                if name in weight_map:
                    raise ConfigError(
                        f"base checkpoint {self}: {name} is in {weight_map[name]} and in {shard}"
                    )
                weight_map[name] = shard
        return msgspec.json.encode({"metadata": {"version": 0}, "weight_map": weight_map})

    @cached_property
    def shards(self) -> frozenset[str]:
        """Files of its index."""
        return frozenset(msgspec.json.decode(self.index)["weight_map"].values())

    def _shards(self) -> list[str]:
        """The shards named by the checkpoint's index; a copy in one file may lie beside them."""
        names = self.source.directories()
        found = {name for name in names if name.endswith(".safetensors")}
        if INDEX_FILE in names:
            try:
                own = msgspec.json.decode(
                    self.source.read_small(INDEX_FILE, MAX_INDEX_BYTES), type=dict[str, Any]
                )
                found = set(own["weight_map"].values())
            except (*UNDECODABLE, KeyError, AttributeError, TypeError, Corrupt) as error:
                raise ConfigError(f"base checkpoint {self}/{INDEX_FILE}: {error!r}") from error
        if not found or not all(isinstance(name, str) and is_name(name) for name in found):
            raise ConfigError(f"base checkpoint {self}: no safetensors, or a shard with a path")
        return sorted(found)

    def _names_in(self, shard: str) -> list[str]:
        try:
            size = self.source.size_bytes(shard)
            length = int.from_bytes(self.source.bytes_at(shard, 0, 8), "little")
            if length > min(size - 8, MAX_INDEX_BYTES):
                raise Corrupt(f"a file of {size} bytes claims a header of {length} bytes")
            raw = self.source.bytes_at(shard, 8, length)
            header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (FileNotFoundError, Corrupt, *UNDECODABLE) as error:
            raise ConfigError(f"base checkpoint {self}/{shard}: {error}") from error
        return [name for name in header if name != "__metadata__"]
