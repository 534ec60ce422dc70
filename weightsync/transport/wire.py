"""What a weight server says beside files: small JSON records, and LATEST's entity tag."""

import msgspec

MAX_LISTING_BYTES = 4 << 20


class StoreList(msgspec.Struct, frozen=True):
    """`GET /stores`."""

    stores: tuple[str, ...]


class StoreListing(msgspec.Struct, frozen=True):
    """`GET /stores/{store}`: names of the directories of versions, finished or not."""

    directories: tuple[str, ...]


class Failure(msgspec.Struct, frozen=True):
    """The body of every answer from 400 on."""

    error: str


def latest_etag(raw: bytes) -> str:
    """The entity tag of a LATEST file: its bytes."""
    return f'"{raw.hex()}"'
