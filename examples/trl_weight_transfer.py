"""TRL's AsyncGRPOTrainer over a gateway: `AsyncGRPOTrainer(weight_transfer=StoreTransfer(...))`.

Each sync is a version of the job's store. Nothing is paused: the gateway switches its engines, and
open turns go on. The trainer's rollout worker asks the gateway (`vllm_server_base_url`).
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from weightsync import Publisher


class StoreTransfer:
    """Has the shape of TRL's `WeightTransferProtocol`."""

    def __init__(self, store: Path | str, job_url: str, *, timeout_s: float = 600.0) -> None:
        """`job_url`: the job's at the gateway, `http://HOST:8300/v1/jobs/NAME`."""
        self.version = 0
        self._publisher = Publisher(store, announce=job_url)
        self._timeout_s = timeout_s

    def init_weight_transfer(self) -> None:
        """No group of ranks."""

    def pause(self) -> None:
        """Left to the gateway."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Returns when every dedicated engine serves the version; harvested ones catch up."""
        self.version = self._publisher.publish(iterator).version
        if not self._publisher.announced(self._timeout_s):
            why = self._publisher.announce_faults
            raise TimeoutError(f"version {self.version} is published, and not in force: {why}")

    def resume(self) -> None:
        """Left to the gateway."""

    def destroy(self) -> None:
        self._publisher.close()
