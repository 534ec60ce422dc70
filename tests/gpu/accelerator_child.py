"""A process that does what its standard input says on one device, and answers in lines of JSON.

    start              take memory and compute; the first use of the device
    work               compute once more
    work_until_fails S compute until the device refuses, at most S seconds
    thread             one more thread on the host
    hold               be a worker with weights, KV, a graph and activations
    report             what memory_report says of that worker

A command that fails is answered with its error, and the process goes on.
"""

import sys
import threading
from typing import Any, Protocol

from harvester.contracts.clock import MonotonicClock
from tests.gpu.answered_lines import answer_lines
from tests.gpu.fake_client import FakeClient
from tests.gpu.fake_worker import FakeWorker

_SIDE = 1024


class Device(Protocol):
    def start(self) -> int:
        """Multiprocessors that this process sees."""

    def work(self) -> None:
        """Raises RuntimeError where the device refuses."""

    def leave(self) -> None: ...


class TorchDevice:
    def __init__(self, name: str) -> None:
        import torch

        self._torch, self._name = torch, name
        self._matrix: Any = None

    def start(self) -> int:
        self._matrix = self._torch.ones(_SIDE, _SIDE, device=self._name)
        self.work()
        if self._name == "cpu":
            return 0
        return int(self._torch.cuda.get_device_properties(self._name).multi_processor_count)

    def work(self) -> None:
        # The sum comes to the host: an error of the device is told here.
        total = float((self._matrix @ self._matrix).sum())
        if total != float(_SIDE**3):
            raise RuntimeError(f"the device computed {total}")

    def leave(self) -> None: ...


class Commands:
    def __init__(self, name: str) -> None:
        self._name = name
        self._device: Device = FakeClient() if name == "fake" else TorchDevice(name)
        self._worker: FakeWorker | None = None
        self.leave = self._device.leave

    def start(self) -> dict[str, Any]:
        return {"multiprocessors": self._device.start()}

    def work(self) -> dict[str, Any]:
        self._device.work()
        return {}

    def work_until_fails(self, limit_s: str) -> dict[str, Any]:
        clock = MonotonicClock()
        until_s = clock.now() + float(limit_s)
        try:
            while clock.now() < until_s:
                self._device.work()
        except RuntimeError as failed:
            return {"failed": str(failed)}
        return {"failed": ""}

    def thread(self) -> dict[str, Any]:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return {}

    def hold(self) -> dict[str, Any]:
        self._worker = FakeWorker(self._name)
        return {}

    def report(self) -> dict[str, Any]:
        assert self._worker is not None
        return self._worker.report()


def main() -> None:
    commands = Commands(sys.argv[1])
    answer_lines(commands)
    commands.leave()


if __name__ == "__main__":
    main()
