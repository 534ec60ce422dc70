"""Lists a location for people: stores by name, or the versions of one store."""

from collections.abc import Iterator

from harvester.contracts.errors import ConfigError, Corrupt
from weightsync.layout.names import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    READY_FILE,
    VersionRef,
    named_ref,
)
from weightsync.serve.published import described
from weightsync.transport.access import Access
from weightsync.transport.location import StoreRoot, source_at
from weightsync.transport.source import StoreSource


def listed(location: str, access: Access) -> Iterator[str]:
    """Lines to print; raises ConfigError if the location has neither a store nor stores."""
    source = source_at(location, access)
    try:
        refs = _refs(source)
        if refs:
            yield from _versions(source, refs)
            return
    finally:
        source.close()
    names = StoreRoot(location, access).names()
    if not names:
        raise ConfigError(f"no weight store at {location}: publish a version there first")
    yield from names


def _refs(source: StoreSource) -> tuple[VersionRef, ...]:
    try:
        found = source.directories()
    except FileNotFoundError:
        return ()
    refs = [ref for name in found if (ref := named_ref(name)) is not None]
    return tuple(sorted(refs, key=lambda ref: (ref.version, ref.kind)))


def _versions(source: StoreSource, refs: tuple[VersionRef, ...]) -> Iterator[str]:
    latest = (source.latest() or b"").decode(errors="replace").strip()
    for ref in refs:
        mark = "LATEST" if ref.directory == latest else ""
        yield f"{ref.directory:24} {_said(source, ref):60} {mark}".rstrip()


def _said(source: StoreSource, ref: VersionRef) -> str:
    try:
        said = described(source.read_small(f"{ref.directory}/{INDEX_FILE}", MAX_INDEX_BYTES))
    except FileNotFoundError:
        return "unfinished"
    except Corrupt as error:
        return f"broken: {error}"
    try:
        source.size_bytes(f"{ref.directory}/{READY_FILE}")
    except FileNotFoundError:
        return f"{said}, not marked {READY_FILE}"
    return said
