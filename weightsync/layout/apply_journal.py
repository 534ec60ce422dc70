"""The write-ahead record of a checkpoint directory: what it holds, or what it is being turned into.

    held        every tensor is that of one version
    applying    every tensor is that of the base, that of the new version, or torn

One file, replaced atomically and sealed by its own digest. It goes over to `applying` before the
first byte of a tensor changes and back to `held` after the last one was verified, so that a kill in
between is seen at the next start. `repair` then decides per tensor by digest: a difference (XOR,
units in the last place) is applied only to bits that are still the old ones, so never twice.

Never touches a tensor.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec
import xxhash

from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.layout.durable import replace_file

RECORD_FILE = "rosemux.json"
MAX_RECORD_BYTES = 64 << 20
FORMAT = 1

Digests = dict[str, str]
"""xxh3-128 per tensor name."""


class Held(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="state",
    tag="held",
    forbid_unknown_fields=True,
):
    """The directory is exactly this version."""

    version: WeightVersion
    state_hash: str
    """The published one."""
    contents_hash: str
    """Of names, dtypes, shapes and digests: what the files are compared with."""
    sequence: int
    """Rises with every record: equal before and after reading the shards means unchanged."""
    digests: Digests
    format: int = FORMAT
    seal: str = ""


class Applying(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="state",
    tag="applying",
    forbid_unknown_fields=True,
):
    """The directory is on its way to this version and is none until then."""

    version: WeightVersion
    state_hash: str
    contents_hash: str
    base_version: WeightVersion | None
    base_state_hash: str | None
    """Version and hash of what `before` describes; None where nothing is built upon."""
    sequence: int
    before: Digests
    after: Digests
    """Of every tensor; those that stay are in both."""
    format: int = FORMAT
    seal: str = ""


Record = Held | Applying


class Repair(StrEnum):
    """What one tensor of an interrupted apply needs."""

    KEEP = "keep"
    ROLL_FORWARD = "roll_forward"
    REWRITE = "rewrite"


def repair(*, before: str | None, now: str | None, after: str) -> Repair:
    """By digests: the new bits stay, the old ones take the delta, all others are written anew."""
    if now == after:
        return Repair.KEEP
    if now is not None and now == before:
        return Repair.ROLL_FORWARD
    return Repair.REWRITE


def repairs(record: Applying, now: Mapping[str, str]) -> dict[str, Repair]:
    """`repair` for every tensor of the version that was being applied."""
    return {
        name: repair(before=record.before.get(name), now=now.get(name), after=after)
        for name, after in record.after.items()
    }


def encoded_record(record: Record) -> bytes:
    """The file's bytes."""
    return msgspec.json.encode(_sealed(record))


def decoded_record(raw: bytes) -> Record:
    """Raises Corrupt for anything that `encoded_record` did not write."""
    try:
        record: Record = msgspec.json.decode(raw, type=Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"{RECORD_FILE}: {error}") from error
    if record.format != FORMAT or record.seal != _sealed(record).seal:
        raise Corrupt(f"{RECORD_FILE} is not what was written")
    return record


def read_record(directory: Path) -> Record | None:
    """None where there is none; raises Corrupt."""
    try:
        with (directory / RECORD_FILE).open("rb") as file:
            raw = file.read(MAX_RECORD_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Corrupt(f"{RECORD_FILE} cannot be read: {error}") from error
    if len(raw) > MAX_RECORD_BYTES:
        raise Corrupt(f"{RECORD_FILE} is over the limit of {MAX_RECORD_BYTES} bytes")
    return decoded_record(raw)


def write_record(directory: Path, record: Record) -> None:
    """Replaces the record; raises Exhausted where the disk is full, with the old one in force."""
    replace_file(directory / RECORD_FILE, encoded_record(record))


def _sealed(record: Record) -> Record:
    bare = msgspec.structs.replace(record, seal="")
    seal = xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))
    return msgspec.structs.replace(bare, seal=seal)
