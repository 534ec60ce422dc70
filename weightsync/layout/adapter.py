"""LoRA adapters as separate versions in a separate store.

An adapter's manifest names the store, version and state hash of the base that it was trained on; a
receiver that holds another base refuses it. The PEFT configuration travels beside the index as a
checked small file. Decides which adapter fits which base; never reads a tensor.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from harvester.contracts.errors import UNDECODABLE, ConfigError, Corrupt, Stale
from harvester.contracts.ids import WeightVersion, checked_name
from weightsync.elements.state_hash import digest_of
from weightsync.layout.manifest import AdapterRecord, FileRecord, Manifest
from weightsync.layout.names import CONFIG_FILE

FULL_SHARD_FILE = "adapter_model.safetensors"
"""PEFT's name for the tensors: a full version is a directory that PEFT loads."""
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The weights that an adapter works on."""

    store: str
    version: WeightVersion
    state_hash: str


class _PeftConfig(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """`config` is PEFT's: the path of adapter_config.json, its fields, or a LoraConfig."""

    base: Base
    config: Mapping[str, Any] | _PeftConfig | Path | str

    def __post_init__(self) -> None:
        if not isinstance(self.base, Base):
            raise ConfigError(f"adapter base {self.base!r}: use Base(store, version, state_hash)")

    def config_bytes(self) -> bytes:
        """The file to publish; raises ConfigError where it is not PEFT's."""
        try:
            if isinstance(self.config, (str, Path)):
                raw = Path(self.config).read_bytes()
            else:
                given = self.config if isinstance(self.config, Mapping) else self.config.to_dict()
                # PEFT keeps target modules in a set.
                kept = {k: sorted(v) if isinstance(v, set) else v for k, v in given.items()}
                raw = msgspec.json.format(msgspec.json.encode(kept), indent=2)
            fields = msgspec.json.decode(raw, type=dict[str, Any])
        except (OSError, AttributeError, TypeError, *UNDECODABLE) as error:
            raise ConfigError(f"adapter config: {error}") from error
        if not isinstance(fields.get("peft_type"), str) or len(raw) > MAX_CONFIG_BYTES:
            raise ConfigError(f"adapter config: no peft_type, or over {MAX_CONFIG_BYTES} bytes")
        return raw

    def record(self) -> AdapterRecord:
        raw = self.config_bytes()
        if not re.fullmatch("[0-9a-f]{32}", self.base.state_hash):
            raise ConfigError(f"base state hash {self.base.state_hash[:80]!r}: use 32 hex digits")
        return AdapterRecord(
            base_store=checked_name(self.base.store, what="base store"),
            base_version=self.base.version,
            base_state_hash=self.base.state_hash,
            config=_file_record(raw),
        )


def base_of(record: AdapterRecord) -> Base:
    version = WeightVersion(record.base_version)
    return Base(store=record.base_store, version=version, state_hash=record.base_state_hash)


def check_base(manifest: Manifest, held: Base | None) -> None:
    """Refuses an adapter for another base than `held`, and takes weights for no adapter.

    `held` None is a receiver of whole models. Raises ConfigError, or Stale where an adapter's base
    is another version of the same store.
    """
    record = manifest.adapter
    if record is None:
        if held is not None:
            raise ConfigError(f"version {manifest.version} is no adapter but a whole model")
        return
    if held is None:
        raise ConfigError(
            f"version {manifest.version} is an adapter for {record.base_store}: give the base you "
            "hold"
        )
    if record.base_state_hash == held.state_hash:
        return
    mismatch = (
        f"adapter version {manifest.version} belongs to {record.base_store} version "
        f"{record.base_version} ({record.base_state_hash}); here is {held.store} version "
        f"{held.version} ({held.state_hash})"
    )
    raise Stale(mismatch) if record.base_store == held.store else ConfigError(mismatch)


def checked_config(raw: bytes, record: AdapterRecord, *, where: str) -> dict[str, Any]:
    """The PEFT configuration of a version, checked against its record; raises Corrupt."""
    if len(raw) > MAX_CONFIG_BYTES or _file_record(raw) != record.config:
        raise Corrupt(f"{where}/{CONFIG_FILE} differs from the published one")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except UNDECODABLE as error:
        raise Corrupt(f"{where}/{CONFIG_FILE}: {error}") from error


def _file_record(raw: bytes) -> FileRecord:
    return FileRecord(len(raw), digest_of(np.frombuffer(raw, np.uint8)))
