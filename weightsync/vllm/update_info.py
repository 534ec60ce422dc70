"""Arguments of vLLM's weight-update calls."""

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from harvester.contracts.errors import PeerProtocolError
from harvester.contracts.ids import WeightVersion, checked_name
from weightsync.vllm.engine_weights import Wanted


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: each update names its store."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Store and version to load."""

    store: str
    version: int
    state_hash: str | None = None
    adapter: str | None = None
    """For a store of LoRA adapters: the name that requests give as their model."""

    def __post_init__(self) -> None:
        checked_name(self.store, what="store")
        if self.adapter is not None:
            checked_name(self.adapter, what="adapter")
        if type(self.version) is not int or self.version < 1:
            raise PeerProtocolError(f"version {self.version!r}: a number from 1")

    def wanted(self) -> Wanted:
        return Wanted(
            store=self.store,
            version=WeightVersion(self.version),
            state_hash=self.state_hash,
            adapter=self.adapter,
        )
