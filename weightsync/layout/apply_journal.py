"""The write-ahead record of a checkpoint directory: its version, or the version being applied.

    held        every tensor is that of one version
    applying    every tensor is that of the base, that of the new version, or torn

One file, replaced atomically and sealed by its own digest. It changes to `applying` before the
first byte of a tensor changes and back to `held` after the last tensor was verified, so that the
next start detects a kill in between. `behind` then decides per tensor by digest: a difference (XOR,
units in the last place) is applied only to bits that are still the old ones, so never twice.

Never touches a tensor.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from harvester.contracts.errors import UNDECODABLE, Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.layout.durable import read_plain, replace_file

RECORD_FILE = "rosemux.json"
MAX_RECORD_BYTES = 64 << 20
FORMAT = 1

Digests = dict[str, str]
"""xxh3-128 per tensor name."""


class _ApplyState(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="state", forbid_unknown_fields=True
):
    version: WeightVersion
    state_hash: str
    """The published state hash."""
    contents_hash: str
    """Hash of names, dtypes, shapes and digests, to compare the files with."""


class Held(_ApplyState, frozen=True, kw_only=True, tag="held"):
    """The directory is exactly this version."""

    sequence: int
    """Rises with every record: equal before and after reading the shards means unchanged."""
    digests: Digests
    format: int = FORMAT
    seal: str = ""


class Applying(_ApplyState, frozen=True, kw_only=True, tag="applying"):
    """The directory is being brought to this version and holds no version until then."""

    base_version: WeightVersion | None
    base_state_hash: str | None
    """Version and hash of the state that `before` describes; None without a base."""
    sequence: int
    before: Digests
    after: Digests
    """Digests of every tensor of the new version; unchanged tensors are in both maps."""
    format: int = FORMAT
    seal: str = ""

    def behind(self, now: Mapping[str, str]) -> list[str] | None:
        """The tensors with the base's bits, which take the deltas; the others have the new ones.
        None if one is torn, or the files have other tensors: all are then written again."""
        old = [name for name, digest in now.items() if digest != self.after.get(name)]
        is_whole = now.keys() == self.after.keys() and all(
            now[name] == self.before.get(name) for name in old
        )
        return old if is_whole else None


ApplyRecord = Held | Applying


def encoded_record(record: ApplyRecord) -> bytes:
    """Serialise a record, with its seal."""
    return msgspec.json.encode(_sealed(record))


def decoded_record(raw: bytes) -> ApplyRecord:
    """Raises Corrupt for anything that `encoded_record` did not write."""
    try:
        record: ApplyRecord = msgspec.json.decode(raw, type=ApplyRecord)
    except UNDECODABLE as error:
        raise Corrupt(f"{RECORD_FILE}: {error}") from error
    if record.format != FORMAT or record.seal != _sealed(record).seal:
        raise Corrupt(f"{RECORD_FILE} does not match its seal")
    return record


def read_record(directory: Path) -> ApplyRecord | None:
    """The record; None without a record. Raises Corrupt."""
    try:
        return decoded_record(read_plain(directory / RECORD_FILE, MAX_RECORD_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Corrupt(f"{RECORD_FILE} cannot be read: {error}") from error


def write_record(directory: Path, record: ApplyRecord) -> None:
    """Replace the record. Raises Exhausted if the disk is full, and keeps the old one."""
    replace_file(directory / RECORD_FILE, encoded_record(record))


def _sealed(record: ApplyRecord) -> ApplyRecord:
    bare = msgspec.structs.replace(record, seal="")
    seal = xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))
    return msgspec.structs.replace(bare, seal=seal)
