"""Tables of a version, its index and the headers of its deltas, compressed where they are large.

A table has hundreds of bytes for each tensor, or for each slice of a sharded trainer: most are
names that repeat. Imports nothing heavy.
"""

import zstandard

from harvester.contracts.errors import Corrupt

MAX_TABLE_BYTES = 512 << 20
"""Bound on an uncompressed table: some 1.8 million slices, of a mixture of 18,867 tensors from 96
ranks."""
_MAGIC = zstandard.FRAME_HEADER
_LEVEL = 3


def packed_table(table: bytes) -> bytes:
    """A zstd frame."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(table)


def is_packed(raw: bytes) -> bool:
    """Whether `packed_table` made it, which no other system uses."""
    return raw.startswith(_MAGIC)


def plain_table(raw: bytes, *, limit_bytes: int = MAX_TABLE_BYTES) -> bytes:
    """A table as it was before `packed_table`, or that never was packed; raises Corrupt."""
    if not is_packed(raw):
        return raw
    try:
        announced = zstandard.get_frame_parameters(raw).content_size
        if announced > limit_bytes:
            raise Corrupt(f"a table of {announced} bytes; the limit is {limit_bytes}")
        return zstandard.ZstdDecompressor().decompress(raw, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"a compressed table: {error}") from error
