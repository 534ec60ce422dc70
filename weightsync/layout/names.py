"""Names in a store: directories of versions and their marker files.

Imports nothing heavy, so that servers and relays run without a framework.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from harvester.contracts.ids import WeightVersion

LATEST_FILE = "LATEST"
READY_FILE = "READY"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "adapter_config.json"
"""Beside the index in a store of LoRA adapters."""
MAX_LATEST_BYTES = 64
MAX_INDEX_BYTES = 32 << 20
_DIRECTORY = re.compile(r"(weight|anchor)_v(\d{6,15})\Z", re.ASCII)


class Kind(StrEnum):
    WEIGHT = "weight"
    ANCHOR = "anchor"


@dataclass(frozen=True, slots=True)
class VersionRef:
    """One directory of a store."""

    kind: Kind
    version: WeightVersion

    @property
    def directory(self) -> str:
        return f"{self.kind}_v{self.version:06d}"


def named_ref(directory: str) -> VersionRef | None:
    """The version of a directory name; None if the name is not a version's."""
    match = _DIRECTORY.match(directory)
    return VersionRef(Kind(match[1]), WeightVersion(int(match[2]))) if match else None
