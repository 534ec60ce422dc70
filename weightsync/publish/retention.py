"""Which versions of a store may go: pure rules.

Every kept version must be reachable from a full checkpoint that is kept too.
"""

from collections.abc import Collection, Mapping

from harvester.contracts.ids import WeightVersion
from weightsync.reading.store import VersionRef


def superseded(
    refs: Collection[VersionRef],
    *,
    full_versions: Collection[WeightVersion],
    latest: WeightVersion,
    keep_versions: int,
) -> tuple[VersionRef, ...]:
    """The directories to delete, oldest first.

    `full_versions` are those with a full checkpoint, as anchor or as the version itself. The newest
    of them at or below the oldest version to keep becomes the store's new beginning.
    """
    oldest_kept = latest - keep_versions + 1
    beginning = max((v for v in full_versions if v <= oldest_kept), default=0)
    return _before(refs, beginning)


def making_room(
    sizes: Mapping[VersionRef, int],
    *,
    full_versions: Collection[WeightVersion],
    latest: WeightVersion,
    needed_bytes: int,
    max_bytes: int,
) -> tuple[VersionRef, ...] | None:
    """The fewest directories to delete, oldest first, so that `needed_bytes` more fit.

    `latest` stays reachable whatever the next version becomes. None where that leaves too little.
    """
    beginnings = sorted({0, *(version for version in full_versions if version <= latest)})
    for beginning in beginnings:
        doomed = _before(sizes, beginning)
        kept_bytes = sum(sizes.values()) - sum(sizes[ref] for ref in doomed)
        if kept_bytes + needed_bytes <= max_bytes:
            return doomed
    return None


def _before(refs: Collection[VersionRef], beginning: int) -> tuple[VersionRef, ...]:
    doomed = (ref for ref in refs if ref.version < beginning)
    return tuple(sorted(doomed, key=lambda ref: (ref.version, ref.kind)))
