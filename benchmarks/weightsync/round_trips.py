"""Cost of a small version over a long link: `python -m benchmarks.weightsync.round_trips`.

A receiver follows `rosemux weights serve` through a proxy on the loopback that holds each way's
bytes back for half of a round trip of 20 ms, and counts the requests. Each version is 1 MB: a
quarter of 8 M elements moves by one unit. The state that was reached is compared with the
published one. Times begin when `publish` has returned, when the receiver already waits.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch

from benchmarks.testbed.reporting import report
from benchmarks.weightsync.children import weight_server
from harvester.contracts.ids import WeightVersion
from weightsync.publish.settings import VersionSettings
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

VERSIONS = 24
ONE_WAY_S = 0.01
_ELEMENTS = 8 << 20
_PIECE_BYTES = 64 << 10


class DelayingProxy:
    """Stands before one server. Belongs to the loop that runs it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.requests: list[str] = []

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._accepted, "127.0.0.1", 0)

    async def _accepted(self, near: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        far, questions = await asyncio.open_connection(self._host, self._port)
        with suppress(asyncio.CancelledError), closing(questions), closing(answers):
            await asyncio.gather(
                self._carry(near, questions, counts=True), self._carry(far, answers, counts=False)
            )

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, counts: bool
    ) -> None:
        """Each piece leaves when it is old enough: the link is long and not narrow."""
        later = asyncio.get_running_loop().call_later
        while piece := await _read(source):
            if counts and piece.startswith((b"GET ", b"HEAD ")):
                self.requests.append(" ".join(piece.decode("latin-1").split(" ", 2)[:2]))
            later(ONE_WAY_S, sink.write, piece)
        later(ONE_WAY_S, sink.close)


async def _read(source: asyncio.StreamReader) -> bytes:
    with suppress(ConnectionError):
        return await source.read(_PIECE_BYTES)
    return b""


@contextmanager
def delayed(url: str) -> Iterator[tuple[str, DelayingProxy]]:
    """The URL of a proxy before the server at `url`, and the proxy, until the block ends."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    proxy, ports, ended = DelayingProxy(host, int(port)), SimpleQueue[int](), Event()

    async def serve() -> None:
        async with await proxy.serve() as server:
            ports.put(server.sockets[0].getsockname()[1])
            await asyncio.to_thread(ended.wait)

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{ports.get()}", proxy
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.round_trips", description=__doc__)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    report("weightsync.round_trips", measure, given.json, engines=False)


def measure() -> dict[str, Any]:
    torch.manual_seed(1)
    bits = torch.randint(0x3C00, 0x3F00, (_ELEMENTS,), dtype=torch.int16)
    state = {"w": bits.view(torch.bfloat16)}
    requests: list[list[str]] = []
    seconds: list[float] = []
    sizes: list[int] = []
    with tempfile.TemporaryDirectory(prefix="weights-") as directory:
        store = Path(directory) / "job-a"
        versions = VersionSettings(skip_deltas=False)
        with Publisher(store, versions=versions) as publisher, weight_server(store.parent) as url:
            held = publisher.publish(state).version
            with delayed(url) as (link, proxy), closing(Receiver(f"{link}/stores/job-a")) as reader:
                taken = {"w": torch.zeros_like(state["w"])}
                target = TensorTarget(taken)
                reader.sync(None, held, target)
                for _ in range(VERSIONS):
                    bits += torch.rand(_ELEMENTS) < 0.25
                    before = len(proxy.requests)
                    found: list[tuple[float, WeightVersion]] = []
                    waiter = Thread(target=_take_next, args=(reader, held, target, found))
                    waiter.start()
                    time.sleep(0.5)  # Until the receiver waits: its questions before are counted.
                    sizes.append(publisher.publish(state).bytes_sent)
                    began_s = time.perf_counter()
                    waiter.join()
                    seconds.append(found[0][0] - began_s)
                    held = found[0][1]
                    requests.append(proxy.requests[before:])
                    if not torch.equal(taken["w"], state["w"]):
                        raise AssertionError(f"version {held} is not what was published")
    return {
        "round_trip_ms": 2e3 * ONE_WAY_S,
        "versions": VERSIONS,
        "version_bytes": round(statistics.median(sizes)),
        "requests": round(statistics.median(map(len, requests)), 1),
        "of_one_version": requests[VERSIONS // 2],
        "ms": round(1e3 * statistics.median(seconds)),
        "ms_range": [round(1e3 * min(seconds)), round(1e3 * max(seconds))],
    }


def _take_next(
    reader: Receiver,
    held: WeightVersion,
    target: TensorTarget,
    found: list[tuple[float, WeightVersion]],
) -> None:
    newest = reader.newer(held, wait_s=20.0)
    assert newest is not None
    reader.sync(held, newest, target)
    found.append((time.perf_counter(), newest))


if __name__ == "__main__":
    main()
