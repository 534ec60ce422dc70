"""Rank 0's part of a publish: version numbers, the one manifest, LATEST, anchors, pruning, quota.

Only rank 0 names a version, so a publish that any rank leaves early has changed nothing. Relies on
the ranks' reports; never reads a shard.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from harvester.contracts.errors import (
    ConfigError,
    Corrupt,
    Exhausted,
    RoseMuxError,
    Stale,
    Unsupported,
)
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Layout
from weightsync.elements.state_hash import combined
from weightsync.layout.adapter import FULL_SHARD_FILE, Adapter
from weightsync.layout.manifest import INDEX_FORMAT, IndexSection, Manifest, encoded_manifest
from weightsync.layout.names import CONFIG_FILE, INDEX_FILE, MAX_VERSION, Kind, VersionRef
from weightsync.publish.agreement import (
    Anchored,
    PublishOrder,
    PublishResult,
    RankEntries,
    RankReport,
    Shard,
    SkippedEntries,
    WrittenShare,
    common_version,
    merged_contents,
    reported_contents,
    version_manifest,
)
from weightsync.publish.composing import SkipDelta
from weightsync.publish.last_published import Contents
from weightsync.publish.settings import VersionSettings
from weightsync.publish.store_writer import StoreWriter

_LOG = logging.getLogger(__name__)


class StoreFull(Exhausted):
    """`max_bytes` has no room for a skip delta, of a store that answers."""


class VersionWriter:
    """`writer` owns the store exclusively."""

    def __init__(
        self, writer: StoreWriter, settings: VersionSettings, adapter: Adapter | None
    ) -> None:
        self.writer = writer
        self._settings = settings
        self._config = adapter.config_bytes() if adapter else b""
        self._adapter = adapter.record() if adapter else None
        latest, fulls = self._latest(), writer.store.full_checkpoints(writer.refs())
        # Numbers are never reused: not an orphan's above LATEST, nor that of a LATEST that is gone.
        least = WeightVersion(settings.first_version - 1)
        self._newest = max(writer.newest(), latest or least, least)
        if self._newest >= MAX_VERSION:
            raise ConfigError(f"{writer.store} has a version {self._newest}: numbers end there")
        self._check_kind(latest)
        # No version builds on an orphan, so no chain begins with an orphan.
        self._fulls = {ref for ref in fulls if latest is None or ref.version <= latest}
        self._listed: frozenset[VersionRef] = frozenset()
        """Versions that the store was seen to have: an object store may list one late."""
        self._broken = WeightVersion(0)
        """The newest version that was deleted: chains that began before it end there."""
        self._known: Contents | None = None
        """All ranks' entries in LATEST."""
        self._next = Contents()
        """All ranks' entries in the next version."""

    def _check_kind(self, latest: WeightVersion | None) -> None:
        """Raises ConfigError where the store has models and this publisher adapters, or vice versa:
        every receiver of the store would then fail."""
        if latest is None:
            return
        with suppress(Corrupt, Stale, Unsupported):
            there = self.writer.store.manifest(VersionRef(Kind.WEIGHT, latest)).adapter
            if (there is None) != (self._adapter is None):
                kind = "whole models" if there is None else f"adapters of {there.base_store}"
                raise ConfigError(f"the store has {kind}: publish to a store of its own")

    def order(self, reports: Sequence[RankReport]) -> PublishOrder:
        """Decide the version and its base, and begin it in the store. Raises ConfigError if ranks
        encode differently."""
        for rank, report in enumerate(reports):
            if report.encoding is not (ours := self._settings.encoding):
                raise ConfigError(
                    f"rank {rank} publishes encoding {report.encoding}, rank 0 {ours}: give every "
                    "rank the same"
                )
        base = common_version(reports)
        if base != self._latest():
            base = None
        if base is not None and self._known is None:
            self._known = reported_contents(reports)
        version = WeightVersion(self._newest + 1)
        begun = self.writer.begin(VersionRef(Kind.WEIGHT, version))
        if base is None or self._known is None:
            return PublishOrder(version, 0, begun)
        self._next = self._known
        return PublishOrder(version, base, begun)

    def settle(self, held: Sequence[RankEntries]) -> SkippedEntries:
        """Set the contents of a full version; raises ConfigError if they form no single model."""
        self._next, skipped = merged_contents(held)
        return skipped

    def _latest(self) -> WeightVersion | None:
        """The published version; None too if LATEST is torn, which the next version repairs."""
        try:
            return self.writer.store.latest()
        except Corrupt:
            return None

    def commit(self, order: PublishOrder, written: Sequence[WrittenShare]) -> PublishResult:
        """Make the version visible and point LATEST to it."""
        version = WeightVersion(order.version)
        changed = {entry: digest for part in written for entry, digest in part.digests.items()}
        self._next = replace(self._next, digests=self._next.digests | changed)
        state_hash = combined(self._next.digests, self._next.layout)
        shards = [shard for part in written for shard in part.shards]
        names, small = self._complete(order.directory, version, order.base, shards, state_hash)
        size = _size_bytes(shards, small)
        since = version - self.newest_full if self.newest_full else self._settings.anchor_every
        anchor_due = bool(order.base) and since >= self._settings.anchor_every
        self._make_room(size, anchor_due=anchor_due)
        # From here on an object may have this number, even after a failure.
        self._newest = version
        self.writer.finish(order.directory, VersionRef(Kind.WEIGHT, version), small)
        if not order.base:
            self._fulls.add(VersionRef(Kind.WEIGHT, version))
        self.writer.point_latest(version)
        self._known = self._next
        anchor_directory = ""
        if anchor_due:
            # The version is published: an anchor without a place stays due.
            with suppress(RoseMuxError):
                anchor_directory = self.writer.begin(VersionRef(Kind.ANCHOR, version))
        return PublishResult(
            state_hash=state_hash,
            bytes_sent=size,
            bytes_dense=self._bytes_dense(),
            shards=names,
            anchor_directory=anchor_directory,
        )

    def commit_anchor(
        self, order: PublishOrder, outcome: PublishResult, written: Sequence[WrittenShare]
    ) -> Anchored:
        """Make the anchor of the version just published visible; a failure leaves no anchor."""
        version, begun = WeightVersion(order.version), outcome.anchor_directory
        try:
            if faults := [part.fault for part in written if part.fault]:
                raise Exhausted(faults[0])
            shards = [shard for part in written for shard in part.shards]
            _, small = self._complete(begun, version, 0, shards, outcome.state_hash)
            self.writer.finish(begun, VersionRef(Kind.ANCHOR, version), small)
        except RoseMuxError as error:
            self.writer.sweep()
            return Anchored(0, f"version {version} has no anchor: {error}")
        self._fulls.add(VersionRef(Kind.ANCHOR, version))
        self.prune()
        return Anchored(_size_bytes(shards, small))

    @property
    def newest_full(self) -> WeightVersion:
        """The newest version with a full checkpoint that leads to the newest one; 0 without one."""
        fulls = (ref.version for ref in self._fulls if ref.version >= self._broken)
        return max(fulls, default=WeightVersion(0))

    def _full_versions(self, refs: frozenset[VersionRef]) -> set[WeightVersion]:
        """Versions with a full checkpoint in a store with these directories. Where another hand
        deleted one, or a delta of its chain, an anchor is due again."""
        gone = self._listed - refs
        self._fulls -= gone
        deltas = (ref.version for ref in gone if ref.kind is Kind.WEIGHT)
        self._broken = max(self._broken, *deltas, WeightVersion(0))
        self._listed = refs
        return {ref.version for ref in self._fulls}

    @property
    def layout(self) -> Layout:
        """All ranks' entries in the newest version."""
        return self._next.layout

    def begin_skip(self, ref: VersionRef, *, size_bytes: int) -> str:
        """Begin a skip delta in the store. Raises StoreFull if it has no room, and Stale if its
        version was pruned meanwhile."""
        self._check_quota(size_bytes)
        if VersionRef(Kind.WEIGHT, ref.version) not in self.writer.refs():
            raise Stale(f"version {ref.version} was pruned")
        return self.writer.begin(ref)

    def commit_skip(self, begun: str, skip: SkipDelta) -> None:
        """Make a skip delta visible."""
        names = self.writer.place(begun, skip.shards, alone="")
        small = self._small_files(skip.manifest(names))
        self._check_quota(_size_bytes(skip.shards, small))
        self.writer.finish(begun, skip.ref, small)

    def _check_quota(self, size_bytes: int) -> None:
        if (limit := self._settings.max_bytes) is not None:
            used_bytes = sum(self.writer.sizes().values())
            if used_bytes + size_bytes > limit:
                raise StoreFull(f"{self.writer.store}: {used_bytes} of {limit} are used")

    def prune(self) -> None:
        """Delete versions older than `keep_versions` that no newer one needs; what cannot be
        deleted now is pruned next time."""
        try:
            refs = self.writer.refs()
            doomed = superseded(
                refs,
                full_versions=self._full_versions(refs),
                latest=self._newest,
                keep_versions=self._settings.keep_versions,
            )
            self._remove(doomed)
        except RoseMuxError as error:
            _LOG.warning("old versions cannot be removed yet: %s", error)

    def _complete(
        self,
        begun: str,
        version: WeightVersion,
        base: int,
        shards: Sequence[Shard],
        state_hash: str,
    ) -> tuple[dict[str, str], dict[str, bytes]]:
        """The final name of each written file, and the small files still to be written."""
        alone = FULL_SHARD_FILE if self._adapter and not base else ""
        names = self.writer.place(begun, shards, alone=alone)
        section = IndexSection(
            format=INDEX_FORMAT,
            state_hash=state_hash,
            bytes_dense=self._bytes_dense(),
            files={},
            slices={} if base else self._next.slices,
            adapter=self._adapter,
        )
        builds_on = WeightVersion(base) if base else None
        manifest = version_manifest(
            version, builds_on, self._settings.encoding, section, shards, names
        )
        return names, self._small_files(manifest)

    def _small_files(self, manifest: Manifest) -> dict[str, bytes]:
        config = {CONFIG_FILE: self._config} if self._adapter else {}
        return {**config, INDEX_FILE: encoded_manifest(manifest)}

    def _make_room(self, needed: int, *, anchor_due: bool) -> None:
        """Delete older chains if the quota requires it. Raises Exhausted, deleting nothing, if that
        is not enough."""
        if self._settings.max_bytes is None:
            return
        needed += self._bytes_dense() if anchor_due else 0
        sizes = self.writer.sizes()
        doomed = making_room(
            sizes,
            full_versions=self._full_versions(frozenset(sizes)),
            latest=self._latest() or self.newest_full,
            needed_bytes=needed,
            max_bytes=self._settings.max_bytes,
        )
        if doomed is None:
            raise Exhausted(
                f"{needed} bytes more are needed in {self.writer.store}, where "
                f"{sum(sizes.values())} of "
                f"max_bytes={self._settings.max_bytes} are in use and the newest chain has to stay"
            )
        self._remove(doomed)

    def _remove(self, doomed: Sequence[VersionRef]) -> None:
        for ref in doomed:
            self.writer.remove(ref)
            self._fulls.discard(ref)

    def _bytes_dense(self) -> int:
        return sum(spec.size_bytes for spec in self._next.layout.values())


def _size_bytes(shards: Sequence[Shard], small: Mapping[str, bytes]) -> int:
    """Size of a version: its shards and its small files."""
    return sum(shard.record.bytes for shard in shards) + sum(map(len, small.values()))


def superseded(
    refs: Collection[VersionRef],
    *,
    full_versions: Collection[WeightVersion],
    latest: WeightVersion,
    keep_versions: int,
) -> tuple[VersionRef, ...]:
    """The directories to delete, oldest first. All others stay reachable from a full checkpoint.

    `full_versions`: versions with a full checkpoint, as anchor or as the version itself. The newest
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

    `latest` stays reachable whatever the next version becomes: skip deltas go first. None if that
    leaves too little room.
    """
    skips = tuple(ref for ref in sizes if ref.kind is Kind.SKIP)
    beginnings = sorted({0, *(version for version in full_versions if version <= latest)})
    for beginning in beginnings:
        chains = _before(sizes, beginning)
        for doomed in (chains, (*chains, *(ref for ref in skips if ref not in chains))):
            kept_bytes = sum(sizes.values()) - sum(sizes[ref] for ref in doomed)
            if kept_bytes + needed_bytes <= max_bytes:
                return doomed
    return None


def _before(refs: Collection[VersionRef], beginning: int) -> tuple[VersionRef, ...]:
    doomed = (ref for ref in refs if ref.version < beginning)
    return tuple(sorted(doomed, key=lambda ref: (ref.version, ref.kind)))
