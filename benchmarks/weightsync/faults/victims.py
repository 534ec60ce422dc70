"""A fork server whose children are killed: `python -m benchmarks.weightsync.faults.victims`.

It imports and compiles everything once; each line on its standard input is a `Task` for a fresh
child, each line on its standard output reports the end of a child. A child publishes, copies or
pulls with the product's own code and is ended by SIGKILL at a byte, at a call to the operating
system, or at an instant. Nothing in it runs after that.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from benchmarks.weightsync.faults.states import states, tensors
from benchmarks.weightsync.faults.tasks import ChildDeath, ChildEnd, ChildTask
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import Bits
from weightsync.encoding.codec import Encoding
from weightsync.follower import Follower
from weightsync.layout.apply_journal import Applying, ApplyRecord, write_record
from weightsync.publish.directory_writer import WritableDirectory
from weightsync.publish.settings import VersionSettings, WorkSettings
from weightsync.publisher import Publisher
from weightsync.receive import checkpoint_directory
from weightsync.receive.checkpoint import Checkpoint
from weightsync.receiver import Receiver
from weightsync.serve.metrics import TransferMetrics
from weightsync.serve.object_cache import ObjectCache
from weightsync.serve.relay import RelayedStores
from weightsync.serve.served_stores import ServedStores, SourceStores
from weightsync.serve.server import ListenSettings, ServingLimits, listen
from weightsync.transport.location import StoreRoot

HANGS_AFTER_S = 60.0
_FILES_MAX = 256
_CALLS = ("open", "os.", "shutil.", "fcntl.", "mmap.")


class Meter:
    """Counts a child's actions and kills it at its `Death`."""

    def __init__(self, death: ChildDeath) -> None:
        self._death = death
        self._clock = MonotonicClock()
        self._began_s = self._clock.now()
        self._began = False
        self.bytes = 0
        self.calls = 0
        self.tensors = 0
        sys.addaudithook(self._called)

    def ended(self) -> ChildEnd:
        return ChildEnd(
            killed=False,
            status=0,
            bytes=self.bytes,
            calls=self.calls,
            seconds=self._clock.now() - self._began_s,
            tensors=self.tensors,
        )

    def begin(self) -> None:
        """The phase begins: calls and the instant count from here."""
        self._began = True
        self.calls = 0
        self._began_s = self._clock.now()
        if self._death.after_s is None:
            return
        victim = os.pidfd_open(os.getpid())
        armed, arm = os.pipe()
        if os.fork() == 0:
            # Every process that inherits a file shares its locks.
            for handle in range(3, _FILES_MAX):
                if handle not in {victim, arm}:
                    _close(handle)
            os.write(arm, b"!")
            time.sleep(self._death.after_s)
            signal.pidfd_send_signal(victim, signal.SIGKILL)
            os._exit(0)
        os.read(armed, 1)
        for handle in (victim, armed, arm):
            os.close(handle)
        self._began_s = self._clock.now()

    def write(self, path: Path, chunks: Iterable[Any]) -> int:
        """Writes as a publisher does, up to the byte at which the child dies."""
        with path.open("wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                limit = self._death.after_bytes
                if limit is not None and self.bytes + len(view) >= limit:
                    file.write(view[: limit - self.bytes])
                    _die()
                file.write(view)
                self.bytes += len(view)
            os.fsync(file.fileno())
            return file.tell()

    def wrote_tensor(self, before: Bits, bits: Bits) -> None:
        self.tensors += 1
        if self.tensors - 1 == self._death.in_tensor:
            cut = int(bits.size * self._death.written_ratio)
            bits[cut:] = before[cut:]
            _die()

    def _called(self, event: str, _: tuple[Any, ...]) -> None:
        if not self._began or not event.startswith(_CALLS):
            return
        self.calls += 1
        if self.calls == self._death.after_calls:
            _die()


def _close(handle: int) -> None:
    with suppress(OSError):
        os.close(handle)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANGS_AFTER_S)


def publish(task: ChildTask, meter: Meter) -> None:
    meter.begin()
    with Publisher(
        WritableDirectory(Path(task.store), write=meter.write),
        versions=VersionSettings(
            encoding=task.encoding, anchor_every=task.anchor_every, keep_versions=task.keep_versions
        ),
        work=WorkSettings(shard_bytes=task.shard_bytes, copy_dir=task.copy_dir or None),
    ) as publisher:
        for index in task.state_indices:
            publisher.publish(tensors(states(task.seed)[index]))


def copy(task: ChildTask, meter: Meter) -> None:
    """Mirrors a store as a dumb tool does: file by file in any order, nothing atomic."""
    meter.begin()
    files = sorted(path for path in Path(task.store).rglob("*") if path.is_file())
    np.random.default_rng(task.seed).shuffle(files)
    for source in files:
        there = Path(task.target) / source.relative_to(task.store)
        there.parent.mkdir(parents=True, exist_ok=True)
        meter.write(there, [source.read_bytes() or b""])


def pull(task: ChildTask, meter: Meter) -> None:
    class Watched(Checkpoint):
        """Remembers each tensor as it was before it is written."""

        def __init__(self, directory: Path) -> None:
            super().__init__(directory)
            self._before = {name: self.bits(name).copy() for name in self.layout()}

        def commit(self, name: str, bits: Bits) -> None:
            meter.wrote_tensor(self._before[name], bits)

    class WatchedReceiver(Receiver):
        def prepare(self, *arguments: Any, **held: Any) -> Any:
            if task.phase == "stage":
                meter.begin()
            return super().prepare(*arguments, **held)

    def write(directory: Path, record: ApplyRecord) -> None:
        write_record(directory, record)
        if task.phase == "apply" and isinstance(record, Applying):
            meter.begin()

    with (
        patch.object(checkpoint_directory, "Checkpoint", Watched),
        patch.object(checkpoint_directory, "write_record", write),
    ):
        if task.phase == "run":
            meter.begin()
        with Follower(WatchedReceiver(task.store), task.target) as follows:
            follows.pull()


def serve(task: ChildTask, meter: Meter) -> None:
    """Serves the stores under a directory until its stop file is there."""
    _listen(task, meter, lambda _: SourceStores(StoreRoot(Path(task.store))))


def relay(task: ChildTask, meter: Meter) -> None:
    """Relays the stores of a server, with a cache that outlives it."""

    def served(metrics: TransferMetrics) -> RelayedStores:
        held = ObjectCache(Path(task.cache), 64 << 20, metrics=metrics)
        return RelayedStores(StoreRoot(task.store), held, streams=3, metrics=metrics)

    _listen(task, meter, served)


def _listen(
    task: ChildTask, meter: Meter, served: Callable[[TransferMetrics], ServedStores]
) -> None:
    def wait() -> None:
        while not os.access(task.target, os.F_OK):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait, daemon=True).start()
    listening = ListenSettings(port=task.port)
    asyncio.run(listen(served, listening, ServingLimits(), started=lambda _: meter.begin()))


ROLES: dict[str, Callable[[ChildTask, Meter], None]] = {
    "publish": publish,
    "copy": copy,
    "pull": pull,
    "serve": serve,
    "relay": relay,
}


def _child(task: ChildTask, report: Path) -> None:
    meter = Meter(task.death)
    ROLES[task.role](task, meter)
    report.write_bytes(msgspec.json.encode(meter.ended()))


def _ended(task: ChildTask, report: Path) -> ChildEnd:
    report.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _child(task, report)
            status = 0
        finally:
            os._exit(status)
    clock = MonotonicClock()
    until_s = clock.now() + HANGS_AFTER_S
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if clock.now() > until_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return ChildEnd(killed=False, status=-1)
        time.sleep(0.0005)
    status = os.waitstatus_to_exitcode(found[1])
    if status == 0:
        return msgspec.json.decode(report.read_bytes(), type=ChildEnd)
    return ChildEnd(killed=status == -signal.SIGKILL, status=status)


def main() -> None:
    # torch's own threads would not be there in a child.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        _warm(Path(directory))
        report = Path(directory) / "report"
        print("ready", flush=True)
        for line in sys.stdin.buffer:
            task = msgspec.json.decode(line, type=ChildTask)
            states(task.seed)
            print(msgspec.json.encode(_ended(task, report)).decode(), flush=True)


def _warm(directory: Path) -> None:
    """Every kernel for every width of element, before any process is forked."""
    for encoding in (Encoding.ROSEMUX, Encoding.XOR, Encoding.OVERWRITE):
        store = directory / encoding
        with Publisher(store, versions=VersionSettings(encoding=encoding)) as publisher:
            for state in states(0)[:2]:
                publisher.publish(tensors(state))
        receiver = Receiver(store)
        with Follower(receiver, directory / f"{encoding}.held") as follows:
            follows.pull(WeightVersion(1))
            follows.pull()
        receiver.close()


if __name__ == "__main__":
    main()
