"""Which versions of a store may go: a pure rule.

Every kept version must be reachable from a full checkpoint that is kept too.
"""

from collections.abc import Collection

from harvester.contracts.ids import WeightVersion
from weightsync.store import VersionRef


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
    doomed = (ref for ref in refs if ref.version < beginning)
    return tuple(sorted(doomed, key=lambda ref: (ref.version, ref.kind)))
