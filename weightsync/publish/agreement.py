"""What the ranks of a sharded trainer say to each other in one publish, and what rank 0 decides.

    offer      every rank: which version its copy is of
    order      rank 0: the version to write, the base of its delta, where to write
    holding    every rank, for a full version: which entries it has
    settled    rank 0: which entries are another rank's; the slices tile every tensor
    written    every rank: its shard files
    outcome    rank 0: what was published
    anchored   rank 0, after every rank has written its part of an anchor that was due

A publisher without other ranks says the same to itself. Pure: no file, socket or clock.
"""

from collections.abc import Sequence

import msgspec

from harvester.contracts.errors import ConfigError, Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import TensorSpec
from weightsync.encoding.codec import Encoding
from weightsync.layout.manifest import FileRecord
from weightsync.layout.slices import SliceRecord, Slicing
from weightsync.publish.last_published import Contents


class Holding(msgspec.Struct, frozen=True):
    """A rank's entries: dtype, shape and digest of each, and which of them are slices."""

    entries: dict[str, tuple[str, tuple[int, ...], str]]
    slices: dict[str, SliceRecord]


class Offer(msgspec.Struct, frozen=True):
    """What a rank's next delta could build on. Version 0: on nothing."""

    version: int
    state_hash: str
    holding: Holding | None = None
    """Given by a rank that took over the copy of an earlier process."""


class Order(msgspec.Struct, frozen=True):
    """`base` 0 is a full version. `directory` is a name in the store."""

    version: int
    base: int
    directory: str


class Settled(msgspec.Struct, frozen=True):
    """Per rank the entries that it leaves to a lower one, which has the same bits."""

    skipped: list[list[str]]


class Shard(msgspec.Struct, frozen=True):
    """One file that a rank wrote into the order's directory."""

    file: str
    record: FileRecord
    encodings: dict[str, Encoding]
    """Of every entry in it; DENSE throughout in a full checkpoint."""


class Written(msgspec.Struct, frozen=True):
    """All files of one rank; `digests` are those of entries that changed."""

    shards: list[Shard]
    digests: dict[str, str]
    failed: bool = False
    """This rank's part of an anchor could not be written."""


class Outcome(msgspec.Struct, frozen=True):
    """What is in the store now."""

    state_hash: str
    bytes_sent: int
    bytes_dense: int
    shards: dict[str, str]
    """The name that each written file has now."""
    anchor_directory: str = ""
    """Where an anchor's shards go; empty where none is due."""


class Anchored(msgspec.Struct, frozen=True):
    """The end of a publish; 0 where no anchor was written."""

    bytes_anchor: int


def holding_of(contents: Contents) -> Holding:
    entries = {
        entry: (spec.dtype, spec.shape, contents.digests[entry])
        for entry, spec in contents.layout.items()
    }
    return Holding(entries, contents.slices)


def common_version(offers: Sequence[Offer]) -> WeightVersion | None:
    """The version that every rank's copy is of; None where they differ or somebody has none."""
    found = {(offer.version, offer.state_hash) for offer in offers}
    version = offers[0].version
    return WeightVersion(version) if len(found) == 1 and version else None


def told_contents(offers: Sequence[Offer]) -> Contents | None:
    """All entries as the ranks tell them; None where somebody does not, or they are no model."""
    told = [offer.holding for offer in offers if offer.holding is not None]
    if len(told) < len(offers):
        return None
    try:
        return settled(told)[0]
    except ConfigError:
        return None


def settled(holdings: Sequence[Holding]) -> tuple[Contents, Settled]:
    """The whole version, and who leaves what to whom.

    Raises ConfigError where ranks hold different bits under one name, or where slices leave a gap.
    """
    whole = Contents()
    owners: dict[str, int] = {}
    skipped: list[list[str]] = [[] for _ in holdings]
    for rank, holding in enumerate(holdings):
        for entry, (dtype, shape, digest) in holding.entries.items():
            spec = TensorSpec(dtype, shape)
            owner = owners.setdefault(entry, rank)
            if owner == rank:
                whole.layout[entry] = spec
                whole.digests[entry] = digest
                if entry in holding.slices:
                    whole.slices[entry] = holding.slices[entry]
                continue
            if (whole.layout[entry], whole.digests[entry]) != (spec, digest):
                raise ConfigError(
                    f"{entry} differs between ranks {owner} and {rank}: publish it from one of "
                    "them, or as slices"
                )
            skipped[rank].append(entry)
    try:
        Slicing(whole.slices).whole(whole.layout)
    except Corrupt as error:
        raise ConfigError(f"{error}: every rank has to publish its slices") from error
    return whole, Settled(skipped)


def final_names(written: Sequence[Written], *, alone: str = "") -> dict[str, str]:
    """What each written file is called in the version, ranks in order.

    `alone` is the name of a file that is the only one.
    """
    files = [shard.file for part in written for shard in part.shards]
    if alone and len(files) == 1:
        return {files[0]: alone}
    return {
        file: f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for number, file in enumerate(files, 1)
    }


def odd_encodings(written: Sequence[Written], usual: Encoding) -> dict[str, Encoding]:
    """Entries of a delta that are encoded otherwise than the version says."""
    return {
        entry: encoding
        for part in written
        for shard in part.shards
        for entry, encoding in shard.encodings.items()
        if encoding is not usual
    }


def changed_digests(written: Sequence[Written]) -> dict[str, str]:
    return {entry: digest for part in written for entry, digest in part.digests.items()}
