"""Messages between the ranks of a sharded trainer in one publish, and rank 0's decisions.

    report     every rank: the version of its copy
    order      rank 0: the version to write, the base of its delta, the directory
    entries    every rank, for a full version: its entries
    skipped    rank 0: entries that another rank publishes; the slices tile every tensor
    written    every rank: its shard files
    outcome    rank 0: the published version
    anchored   rank 0, after every rank has written its part of an anchor that was due

A publisher without other ranks exchanges them with itself. Pure: no file, socket or clock.
"""

from collections.abc import Mapping, Sequence

import msgspec

from harvester.contracts.errors import ConfigError, Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import TensorSpec
from weightsync.elements.state_hash import ALGORITHM
from weightsync.encoding.codec import Encoding
from weightsync.layout.manifest import FileRecord, IndexSection, Manifest
from weightsync.layout.slices import SliceRecord, Slicing
from weightsync.publish.last_published import Contents


class RankEntries(msgspec.Struct, frozen=True):
    """A rank's entries: dtype, shape and digest of each, and the slices among them."""

    entries: dict[str, tuple[str, tuple[int, ...], str]]
    slices: dict[str, SliceRecord]


class RankReport(msgspec.Struct, frozen=True):
    """The base that a rank's next delta can build on; version 0 is no base."""

    version: int
    state_hash: str
    entries: RankEntries | None = None
    """Set by a rank that took over the copy of an earlier process."""
    encoding: Encoding = Encoding.ROSEMUX
    """The rank's setting: one index names it for all."""


class PublishOrder(msgspec.Struct, frozen=True):
    """`base` 0 is a full version. `directory` is a name in the store."""

    version: int
    base: int
    directory: str


class SkippedEntries(msgspec.Struct, frozen=True):
    """Entries of each rank that a lower rank with the same bits publishes instead."""

    by_rank: list[list[str]]


class Shard(msgspec.Struct, frozen=True):
    """One file that a rank wrote into the order's directory."""

    file: str
    record: FileRecord
    encodings: dict[str, Encoding]
    """Encoding of every entry in the file; always DENSE in a full checkpoint."""


class WrittenShare(msgspec.Struct, frozen=True):
    """All files of one rank, and the `digests` of changed entries."""

    shards: list[Shard]
    digests: dict[str, str]
    fault: str = ""
    """Why this rank did not write its part of an anchor."""


class PublishResult(msgspec.Struct, frozen=True):
    """The published version."""

    state_hash: str
    bytes_sent: int
    bytes_dense: int
    shards: dict[str, str]
    """Final name of each written file."""
    anchor_directory: str = ""
    """Directory for an anchor's shards; empty if no anchor is due."""


class Anchored(msgspec.Struct, frozen=True):
    """The end of a publish; 0 if no anchor was written. `fault`: why a due one was not."""

    bytes_anchor: int
    fault: str = ""


def entries_of(contents: Contents) -> RankEntries:
    entries = {
        entry: (spec.dtype, spec.shape, contents.digests[entry])
        for entry, spec in contents.layout.items()
    }
    return RankEntries(entries, contents.slices)


def common_version(reports: Sequence[RankReport]) -> WeightVersion | None:
    """The version of every rank's copy; None if they differ or a rank has none."""
    found = {(report.version, report.state_hash) for report in reports}
    version = reports[0].version
    return WeightVersion(version) if len(found) == 1 and version else None


def reported_contents(reports: Sequence[RankReport]) -> Contents | None:
    """All entries as the ranks report them; None if a rank reports none, or they form no model."""
    held = [report.entries for report in reports if report.entries is not None]
    if len(held) < len(reports):
        return None
    try:
        return merged_contents(held)[0]
    except ConfigError:
        return None


def merged_contents(held: Sequence[RankEntries]) -> tuple[Contents, SkippedEntries]:
    """The contents of the whole version, and the entries that each rank skips.

    Raises ConfigError if ranks hold different bits under one name, or if slices leave a gap.
    """
    whole = Contents()
    owners: dict[str, int] = {}
    skipped: list[list[str]] = [[] for _ in held]
    for rank, own in enumerate(held):
        for entry, (dtype, shape, digest) in own.entries.items():
            spec = TensorSpec(dtype, shape)
            owner = owners.setdefault(entry, rank)
            if owner == rank:
                whole.layout[entry] = spec
                whole.digests[entry] = digest
                if entry in own.slices:
                    whole.slices[entry] = own.slices[entry]
                continue
            if (whole.layout[entry], whole.digests[entry]) != (spec, digest):
                raise ConfigError(
                    f"{entry} differs between ranks {owner} and {rank}: publish it from one of "
                    "them, or as slices"
                )
            skipped[rank].append(entry)
    if not owners:
        raise ConfigError("no tensor to publish: empty, or a generator that was read before")
    try:
        Slicing(whole.slices).whole(whole.layout)
    except Corrupt as error:
        raise ConfigError(f"{error}: every rank has to publish its slices") from error
    return whole, SkippedEntries(skipped)


def version_manifest(
    version: WeightVersion,
    base: WeightVersion | None,
    encoding: Encoding,
    section: IndexSection,
    shards: Sequence[Shard],
    names: Mapping[str, str],
) -> Manifest:
    """The index of a version, or of a skip delta to it, made of these shards.

    `base`: None for a full version. `section`: without what depends on the shards. `names`: the
    final name of each file.
    """
    others = {
        entry: other
        for shard in shards
        for entry, other in shard.encodings.items()
        if base and other is not encoding
    }
    files = {names[shard.file]: shard.record for shard in shards}
    return Manifest(
        version=version,
        base_version=base,
        delta_encoding=encoding if base else None,
        checksum_format=ALGORITHM,
        weight_map={entry: names[shard.file] for shard in shards for entry in shard.encodings},
        section=msgspec.structs.replace(section, files=files, encodings=others),
    )


def final_names(shards: Sequence[Shard], *, alone: str = "") -> dict[str, str]:
    """The final name of each written file, ranks in order; a single one is `alone`, if given."""
    if alone and len(shards) == 1:
        return {shards[0].file: alone}
    return {
        shard.file: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, shard in enumerate(shards, 1)
    }
