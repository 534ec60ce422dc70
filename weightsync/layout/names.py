"""Names in a store: directories of versions and their marker files.

Imports nothing heavy, so that servers and relays run without a framework.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from harvester.contracts.ids import WeightVersion

LATEST_FILE = "LATEST"
READY_FILE = "READY"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "adapter_config.json"
"""File beside the index in a store of LoRA adapters."""
MAX_VERSION = 10**15 - 1
"""Numbers of directories have at most fifteen digits."""
MAX_LATEST_BYTES = 64
MAX_INDEX_BYTES = 32 << 20
_DIRECTORY = re.compile(r"(?:(weight|anchor)|skip_v(\d{6,15}))_v(\d{6,15})\Z", re.ASCII)


class Kind(StrEnum):
    WEIGHT = "weight"
    ANCHOR = "anchor"
    SKIP = "skip"
    """A delta over several versions."""


@dataclass(frozen=True, slots=True)
class VersionRef:
    """One directory of a store."""

    kind: Kind
    version: WeightVersion
    base: WeightVersion | None = None
    """The version that a skip delta builds on; others have theirs in the index alone."""

    @property
    def directory(self) -> str:
        begin = f"{self.kind}_v" if self.base is None else f"{self.kind}_v{self.base:06d}_v"
        return f"{begin}{self.version:06d}"


def latest_line(version: WeightVersion) -> bytes:
    """A LATEST file's bytes."""
    return f"{VersionRef(Kind.WEIGHT, version).directory}\n".encode()


def refs_in(names: Iterable[str]) -> frozenset[VersionRef]:
    """The versions among directory names."""
    return frozenset(ref for name in names if (ref := named_ref(name)) is not None)


def named_ref(directory: str) -> VersionRef | None:
    """The version of a directory name; None if the name is not a version's."""
    match = _DIRECTORY.match(directory)
    if match is None:
        return None
    version = WeightVersion(int(match[3]))
    if match[1]:
        return VersionRef(Kind(match[1]), version)
    base = WeightVersion(int(match[2]))
    return VersionRef(Kind.SKIP, version, base) if base < version else None
