"""LATEST with all that a follower would ask for next, where that is small."""

import asyncio

import msgspec

from harvester.contracts.errors import Exhausted, RoseMuxError
from harvester.contracts.ids import checked_name
from weightsync.layout.names import INDEX_FILE, READY_FILE, named_ref
from weightsync.serve.published import published_files
from weightsync.serve.served_stores import ServedStores
from weightsync.transport.ranges import ByteSpan
from weightsync.transport.wire import MAX_NEWS_BYTES, News, StoreVersions

_WITHIN_S = 5.0
"""A relay's upstream may be silent: LATEST is answered without files then."""
_MAX_TABLE_BYTES = 8 << 20
"""Bound on an unpacked index: some 28,000 slices. It may have been packed a thousandfold."""


async def news_of(served: ServedStores, store: str, latest: bytes) -> bytes | None:
    """A `News`; None where its files are too many bytes or cannot be read now."""
    directory = latest.decode(errors="replace").strip()
    if named_ref(directory) is None:
        return None
    try:
        async with asyncio.timeout(_WITHIN_S):
            files = await _files(served, store, directory)
            found, composes = await served.directories(store), await served.composes(store)
    except (OSError, RoseMuxError):
        return None
    versions = StoreVersions(directories=found, composes=composes)
    return msgspec.msgpack.encode(News(latest, versions, files))


async def _files(served: ServedStores, store: str, directory: str) -> dict[str, bytes]:
    """The version's files by path; raises Exhausted if they are too large."""
    files: dict[str, bytes] = {}
    names, left_bytes = [INDEX_FILE], MAX_NEWS_BYTES
    for name in names:
        path = f"{directory}/{checked_name(name, what='file')}"
        async with served.open(store, path, doubted=False) as file:
            left_bytes -= file.size_bytes
            if left_bytes < 0:
                raise Exhausted(f"{path} is too large")
            span = ByteSpan(0, file.size_bytes)
            file.expect(span)
            files[path] = bytes(await file.read(span))
        if name == INDEX_FILE:
            # Outside the loop: it may be a large table when it is unpacked.
            shards = await asyncio.to_thread(
                published_files, files[path], table_limit_bytes=_MAX_TABLE_BYTES
            )
            if sum(each.size_bytes or MAX_NEWS_BYTES for each in shards.values()) > left_bytes:
                raise Exhausted(f"the shards of {directory} are too large")
            names += [*shards, READY_FILE]
    return files
