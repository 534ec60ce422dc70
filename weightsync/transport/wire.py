"""A weight server's messages besides files: small records, and the entity tags."""

import msgspec
import xxhash

MAX_LISTING_BYTES = 4 << 20
MAX_NEWS_BYTES = 2 << 20
"""Bound on the files in one `News`."""
NEWS_TYPE = "application/vnd.rosemux.news"


class StoreList(msgspec.Struct, frozen=True):
    """`GET /stores`."""

    stores: tuple[str, ...]


class StoreVersions(msgspec.Struct, frozen=True, omit_defaults=True):
    """`GET /stores/{store}`: names of the directories of versions, finished or not."""

    directories: tuple[str, ...]
    composes: bool = False
    """Whether a skip delta that is not among them may be asked for."""


class News(msgspec.Struct, frozen=True):
    """LATEST for a reader that accepts NEWS_TYPE, as msgpack: with what it would ask for next."""

    latest: bytes
    versions: StoreVersions
    files: dict[str, bytes]
    """Every file of the newest version, by its path in the store."""


def index_etag(raw: bytes) -> str:
    """The entity tag of an index: its digest."""
    return f'"{xxhash.xxh3_128_hexdigest(raw)}"'


def latest_etag(raw: bytes) -> str:
    """The entity tag of a LATEST file: its bytes."""
    return f'"{raw.hex()}"'
