"""The weight-transfer engine of one vLLM worker: pulls a version and applies it in place.

    POST /init_weight_transfer_engine  {"init_info": {}}
    POST /start_weight_update          {}
    POST /update_weights               {"update_info": {"store": "job-a", "version": 7,
                                                        "state_hash": "..."}}
    POST /finish_weight_update         {"weight_version": "7"}

An update that returns has been verified: the state read back from runtime storage is the published
one, and the given one where `state_hash` is given; anything else is an exception, so HTTP 500.
`/collective_rpc {"method": "rosemux_weights"}` tells what is loaded. Where stores are is decided by
ROSEMUX_WEIGHT_ROOT, never by the wire. Does not pause, abort or drop any cache: its caller does.
"""

import logging
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from harvester.contracts.errors import ConfigError, Corrupt, PeerProtocolError, Unsupported
from harvester.contracts.ids import WeightVersion, checked_name
from weightsync.bits import Layout
from weightsync.codec import warm_up
from weightsync.receiver import Applied, Receiver
from weightsync.staging import Staged
from weightsync.vllm import cpu_linear
from weightsync.vllm.layers import check_layers
from weightsync.vllm.loader_map import LoaderMap, traced
from weightsync.vllm.shadow_target import ShadowTarget

_logger = logging.getLogger("vllm.rosemux.weightsync")

ROOT_VARIABLE = "ROSEMUX_WEIGHT_ROOT"
REPORT_METHOD = "rosemux_weights"


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


class RoseMuxWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker; vLLM calls it between two steps."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._root = _weight_root()
        if vllm_config.parallel_config.world_size != 1:
            raise Unsupported("backend rosemux: tensor and pipeline parallel size must be 1 so far")
        check_layers(model)
        if device.type == "cpu":
            cpu_linear.check_installed()
        warm_up()
        self._receivers: dict[str, Receiver] = {}
        self._target: LoaderMap | ShadowTarget | None = None
        self._loaded: tuple[str, Applied] | None = None
        _add_report_method()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No rendezvous: an engine may join at any time."""

    def start_weight_update(self) -> None:
        """Nothing to prepare: weights are changed in place."""

    def finish_weight_update(self) -> None:
        """Refuses to finish an update that changed nothing for certain."""
        if self._loaded is None:
            raise ConfigError("no version is loaded: call update_weights first")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class waits for the accelerator here; a CPU has none to wait for."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads the version; raises where the engine does not hold exactly it afterwards.

        What fails before anything is touched (version unknown, payload broken, other shapes)
        leaves the loaded version in force.
        """
        receiver = self._receiver(update_info.store)
        staged = receiver.prepare(
            self._current(update_info.store), WeightVersion(update_info.version)
        )
        _check_expected(staged, update_info)
        if self._target is not None and self._target.layout() != staged.layout:
            raise ConfigError(f"store {update_info.store} holds another model than this engine's")
        self._loaded = None
        if self._target is None:
            self._target = self._new_target(staged.layout)
        applied = receiver.settle(staged, self._target)
        self._loaded = (update_info.store, applied)

    def shutdown(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()

    def trainer_send_weights(*_: object, **__: object) -> None:
        """Part of the base class until vLLM 0.27; our trainers publish to a store instead."""
        raise Unsupported("publish with weightsync.publisher.Publisher")

    def report(self) -> dict[str, Any]:
        """What is loaded; empty before the first update and while the state is in doubt."""
        if self._loaded is None:
            return {}
        store, applied = self._loaded
        in_place = isinstance(self._target, LoaderMap)
        reapplied = sum(receiver.reapplied for receiver in self._receivers.values())
        return {"store": store, "in_place": in_place, "reapplied": reapplied, **asdict(applied)}

    def _receiver(self, store: str) -> Receiver:
        if store not in self._receivers:
            self._receivers[store] = Receiver(self._root / store)
        return self._receivers[store]

    def _current(self, store: str) -> WeightVersion | None:
        """The version that deltas may build on."""
        if isinstance(self._target, LoaderMap) and not self._target.is_current(self.model):
            self._target = None
        if self._target is None or self._loaded is None or self._loaded[0] != store:
            return None
        return self._loaded[1].version

    def _new_target(self, layout: Layout) -> LoaderMap | ShadowTarget:
        """The loader's map where it holds, else vLLM's own loader."""

        def repack(touched: Collection[int]) -> None:
            cpu_linear.repack(self.model, touched)

        def repack_all() -> None:
            repack({p.untyped_storage().data_ptr() for p in self.model.parameters()})

        try:
            return traced(self.model, layout, repack)
        except Unsupported as reason:
            _logger.warning("weights go through vLLM's own loader: %s", reason)
            return ShadowTarget(self.model, layout, repack_all)


def _check_expected(staged: Staged, update_info: UpdateInfo) -> None:
    published = staged.expected.state_hash
    if update_info.state_hash is not None and published != update_info.state_hash:
        raise Corrupt(
            f"{update_info.store} version {update_info.version} is state {published}, the caller "
            f"expects {update_info.state_hash}: it means another store"
        )


def _weight_root() -> Path:
    root = os.environ.get(ROOT_VARIABLE, "")
    if not root or not Path(root).is_dir():
        raise ConfigError(
            f"{ROOT_VARIABLE}={root!r}: set it to the directory that holds the weight stores"
        )
    return Path(root)


def _add_report_method() -> None:
    """Gives workers the method that `/collective_rpc` calls by name."""
    from vllm.v1.worker.gpu_worker import Worker

    def rosemux_weights(worker: Any) -> dict[str, Any]:
        report: dict[str, Any] = worker.weight_transfer_engine.report()
        return report

    setattr(Worker, REPORT_METHOD, rosemux_weights)
