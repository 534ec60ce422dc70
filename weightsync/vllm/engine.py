"""The weight-transfer engine of one vLLM worker: pulls a version and applies it in place.

    POST /collective_rpc               {"method": "rosemux_stage",
                                        "kwargs": {"store": "job-a", "version": 7}}
    POST /init_weight_transfer_engine  {"init_info": {}}
    POST /start_weight_update          {}
    POST /update_weights               {"update_info": {"store": "job-a", "version": 7,
                                                        "state_hash": "..."}}
    POST /finish_weight_update         {"weight_version": "7"}

A store of LoRA adapters is followed by the same calls, with "adapter": NAME in the update.
`rosemux_stage` returns at once and prepares the version while the engine runs; asked again it tells
how far that is: `{"state": "running" | "ready" | "failed" | "asleep", "message": ...}`. An update
works without it and then prepares inside the pause. An update that returns has been verified: the
state read back from runtime storage is the published one, and the given one where `state_hash` is
given; anything else is an exception, so HTTP 500. `/collective_rpc {"method": "rosemux_weights"}`
reports the loaded versions. Where stores are is decided by ROSEMUX_WEIGHT_ROOT, never by the wire.
Does not pause, abort or drop any cache: its caller does.
"""

from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.v1.worker.gpu_worker import Worker

from harvester.contracts.errors import Unsupported
from weightsync.vllm.worker_weights import InitInfo, UpdateInfo, WorkerWeights, add_worker_methods


class RoseMuxWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One engine per worker; vLLM from 0.25 on calls it between two steps."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._weights = WorkerWeights(model, vllm_config, device)
        self.stage, self.report = self._weights.stage, self._weights.report
        self.sums, self.judge = self._weights.sums, self._weights.judge
        # Called where production is beside this engine, and by the worker's sleep and wake-up.
        self.paced_by, self.set_asleep = self._weights.paced_by, self._weights.set_asleep
        add_worker_methods(Worker)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """No rendezvous: an engine may join at any time."""

    def start_weight_update(self) -> None:
        """No-op: weights are changed in place."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class waits for the accelerator here; a CPU has none to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._weights.load(update_info)

    def finish_weight_update(self) -> None:
        self._weights.finish()

    def shutdown(self) -> None:
        self._weights.close()

    def trainer_send_weights(*_: object, **__: object) -> None:
        """Part of the base class until vLLM 0.27; our trainers publish to a store instead."""
        raise Unsupported("publish with weightsync.publisher.Publisher")
