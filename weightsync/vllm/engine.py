"""The weight-transfer engine of one vLLM worker: pulls a version and applies it in place.

    POST /collective_rpc               {"method": "rosemux_stage",
                                        "kwargs": {"store": "job-a", "version": 7}}
    POST /init_weight_transfer_engine  {"init_info": {}}
    POST /start_weight_update          {}
    POST /update_weights               {"update_info": {"store": "job-a", "version": 7,
                                                        "state_hash": "..."}}
    POST /finish_weight_update         {"weight_version": "7"}

`rosemux_stage` returns at once and prepares the version while the engine runs; asked again it tells
how far that is: `{"state": "running" | "ready" | "failed", "message": ...}`. An update works
without it and then prepares inside the pause. An update that returns has been verified: the state
read back from runtime storage is the published one, and the given one where `state_hash` is given;
anything else is an exception, so HTTP 500. `/collective_rpc {"method": "rosemux_weights"}` tells
what is loaded. Where stores are is decided by ROSEMUX_WEIGHT_ROOT, never by the wire. Does not
pause, abort or drop any cache: its caller does.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from harvester.contracts.errors import ConfigError, PeerProtocolError, Unsupported
from harvester.contracts.ids import WeightVersion, checked_name
from weightsync.codec import warm_up
from weightsync.memory_room import STAGING_BYTES
from weightsync.transport.location import StoreRoot
from weightsync.vllm import cpu_linear
from weightsync.vllm.engine_weights import EngineWeights, Ranks, Wanted

ROOT_VARIABLE = "ROSEMUX_WEIGHT_ROOT"
PACKED_AHEAD_VARIABLE = "ROSEMUX_PACKED_AHEAD_BYTES"
PACKED_AHEAD_BYTES = 2 << 30
STAGING_VARIABLE = "ROSEMUX_STAGING_BYTES"
REPORT_METHOD = "rosemux_weights"
STAGE_METHOD = "rosemux_stage"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: a store is named by each update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version of which store to load."""

    store: str
    version: int
    state_hash: str | None = None

    def __post_init__(self) -> None:
        checked_name(self.store, what="store")
        if type(self.version) is not int or self.version < 1:
            raise PeerProtocolError(f"version {self.version!r}: a number from 1")

    def wanted(self) -> Wanted:
        return Wanted(
            store=self.store, version=WeightVersion(self.version), state_hash=self.state_hash
        )


class RoseMuxWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker; vLLM calls it between two steps."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        root = _weight_root()
        if device.type == "cpu":
            cpu_linear.check_installed()
        warm_up()
        self._weights = EngineWeights(
            model,
            vllm_config.model_config,
            root,
            packed_ahead_bytes=_bytes_of(PACKED_AHEAD_VARIABLE, PACKED_AHEAD_BYTES),
            staging_bytes=_bytes_of(STAGING_VARIABLE, STAGING_BYTES),
            ranks=_ranks(vllm_config.parallel_config),
        )
        _add_worker_methods()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No rendezvous: an engine may join at any time."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: weights are changed in place."""

    def stage(self, update_info: UpdateInfo) -> dict[str, str]:
        """Prepares a version in the background; tells how far that is."""
        status = self._weights.stage(update_info.wanted())
        return {"state": status.state.value, "message": status.message}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class waits for the accelerator here; a CPU has none to wait for."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads the version; raises where the engine does not hold exactly it afterwards."""
        self._weights.load(update_info.wanted())

    def finish_weight_update(self) -> None:
        """Refuses to finish an update that changed nothing for certain."""
        self._weights.release()
        if not self._weights.is_loaded:
            raise ConfigError("no version is loaded: call update_weights first")

    def shutdown(self) -> None:
        self._weights.close()

    def trainer_send_weights(*_: object, **__: object) -> None:
        """Part of the base class until vLLM 0.27; our trainers publish to a store instead."""
        raise Unsupported("publish with weightsync.publisher.Publisher")

    def report(self) -> dict[str, Any]:
        """What is loaded; empty before the first update and while the state is in doubt."""
        return self._weights.report()


def _ranks(parallel_config: Any) -> Ranks:
    if parallel_config.world_size == 1:
        return Ranks.ONE
    if parallel_config.pipeline_parallel_size > 1 or parallel_config.enable_expert_parallel:
        return Ranks.PARTIAL
    return Ranks.SLICES


def _weight_root() -> StoreRoot:
    location = os.environ.get(ROOT_VARIABLE, "")
    try:
        if not location:
            raise ConfigError("it is not set")
        return StoreRoot(location)
    except ConfigError as error:
        raise ConfigError(
            f"{ROOT_VARIABLE}={location!r}: set it to the directory that holds the weight stores, "
            "or to the URL of their server"
        ) from error


def _bytes_of(variable: str, default: int) -> int:
    given = os.environ.get(variable, str(default))
    if not given.isdecimal():
        raise ConfigError(f"{variable}={given!r}: a number of bytes")
    return int(given)


def _add_worker_methods() -> None:
    """Gives workers the methods that `/collective_rpc` calls by name."""
    from vllm.v1.worker.gpu_worker import Worker

    def rosemux_weights(worker: Any) -> dict[str, Any]:
        report: dict[str, Any] = worker.weight_transfer_engine.report()
        return report

    def rosemux_stage(worker: Any, store: str, version: int) -> dict[str, str]:
        told: dict[str, str] = worker.weight_transfer_engine.stage(UpdateInfo(store, version))
        return told

    setattr(Worker, REPORT_METHOD, rosemux_weights)
    setattr(Worker, STAGE_METHOD, rosemux_stage)
