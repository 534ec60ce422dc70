"""The part of an index that a relay and `rosemux weights ls` read; manifest.py has the whole index.

Unknown fields are skipped, so that a relay passes on what only newer receivers read, and so are all
fields of tensors, of which there may be many. Imports nothing heavy.
"""

import msgspec


class FileSummary(msgspec.Struct, frozen=True):
    bytes: int
    xxh3_128: str


class IndexMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    version: str | int
    base_version: str | int | None = None
    delta_encoding: str | None = None
    compression_format: str | None = None
    checksum_format: str | None = None
    total_size: int | None = None


class SectionSummary(msgspec.Struct, frozen=True):
    files: msgspec.Raw


class IndexSummary(msgspec.Struct, frozen=True):
    """An index whose tables stay encoded: a few kilobytes may be a table of 512 MiB."""

    metadata: IndexMetadata
    weight_map: msgspec.Raw
    rosemux: SectionSummary | None = None
