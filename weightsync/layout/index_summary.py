"""The part of an index that a relay and `rosemux weights ls` read; manifest.py has the whole index.

Unknown fields are skipped, so that a relay passes on what only newer receivers read, and so are all
fields of tensors, of which there may be many. Imports nothing heavy.
"""

from collections.abc import Mapping

import msgspec


class FileSummary(msgspec.Struct, frozen=True):
    bytes: int
    xxh3_128: str


class SectionSummary(msgspec.Struct, frozen=True):
    format: int
    state_hash: str
    bytes_dense: int
    files: Mapping[str, FileSummary]


class IndexMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    version: str | int
    base_version: str | int | None = None
    delta_encoding: str | None = None
    compression_format: str | None = None
    checksum_format: str | None = None
    total_size: int | None = None


class IndexSummary(msgspec.Struct, frozen=True):
    metadata: IndexMetadata
    weight_map: dict[str, str]
    rosemux: SectionSummary | None = None
