"""One copy over the slow link: `python -m benchmarks.weightsync.fanout --json PATH`.

A weight server at one end of a link of 100 Mbit/s, a relay and eight receiving processes at the
other. First all of them join at once and take a whole checkpoint with its deltas; then they wait
for the next version, which is published once. Bytes are counted by the link's device.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch

from benchmarks.testbed.reporting import report
from benchmarks.weightsync.netns import SlowLink, slow_link
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import Exhausted
from weightsync.encoding.codec import warm_up
from weightsync.publisher import Publisher
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

_PORT, _RELAY_PORT = 9731, 9732
_STORE = "job-a"
_TENSORS = 12
_CHANGED = 0.02
_PATIENCE_S = 240.0
_COMMAND = (sys.executable, "-m", "harvester.cli", "weights")
State = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.weightsync.fanout", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--megabytes", type=int, default=48, help="of the whole model")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.receive is not None:
        _receive_all(given.receive, given.receivers)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report(
        "weightsync.fanout",
        lambda: measure(receivers=given.receivers, mbit=given.mbit, megabytes=given.megabytes),
        given.json,
        engines=False,
    )


def measure(*, receivers: int = 8, mbit: float = 100.0, megabytes: int = 48) -> dict[str, Any]:
    """The figures; raises Unsupported where no slow link can be made.

    `copies_over_link` counts everything that the link carried, packet headers included, in units
    of what one receiver reads. `seconds_over_ideal` is the time until the last receiver holds the
    verified state, less the time that one copy takes at the link's rate.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rosemux-fanout-")))
        publisher = stack.enter_context(Publisher(folder / "stores" / _STORE))
        state = _first_state(megabytes)
        publisher.publish(state)
        for step in range(2):
            publisher.publish(_next_state(state, step))
        link = stack.enter_context(slow_link(mbit=mbit))
        url = stack.enter_context(_served_and_relayed(link, folder))
        group = stack.enter_context(_ReceiverGroup.started(link, url, receivers))
        joined = group.phase(link, mbit, lambda: None)
        last = _next_state(state, 2)
        followed = group.phase(link, mbit, lambda: publisher.publish(last))
    return {"receivers": receivers, "link_mbit": mbit, **joined, "next_version": followed}


def _first_state(megabytes: int) -> State:
    generator = torch.Generator().manual_seed(0)
    elements = megabytes * 1_000_000 // 2 // _TENSORS
    return {
        f"layer{at}.weight": torch.randn(elements, generator=generator).mul_(0.02).bfloat16()
        for at in range(_TENSORS)
    }


def _next_state(state: State, step: int) -> State:
    """About one element in fifty moves by one unit in the last place, in place."""
    generator = torch.Generator().manual_seed(step + 1)
    for tensor in state.values():
        bits = tensor.view(torch.int16)
        bits += torch.rand(bits.shape, generator=generator) < _CHANGED
    return state


@contextmanager
def _served_and_relayed(link: SlowLink, folder: Path) -> Iterator[str]:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text("a token for one benchmark")
    upstream = f"http://{link.origin_address}:{_PORT}"
    serve = f"serve {folder}/stores --host {link.origin_address} --port {_PORT}"
    relay = f"relay {upstream} --port {_RELAY_PORT} --cache {folder}/cache"
    commands = (
        link.run(link.origin, [*_COMMAND, *serve.split(), "--token-file", str(token)]),
        link.run(link.edge, [*_COMMAND, *relay.split(), "--upstream-token-file", str(token)]),
    )
    with _process(commands[0]) as serving, _process(commands[1]) as relaying:
        for process in (serving, relaying):
            _line(process.stdout)
        yield f"http://127.0.0.1:{_RELAY_PORT}/stores/{_STORE}"


@dataclass(slots=True)
class _ReceiverGroup:
    """Processes beside the relay; each line to them begins a phase, each of theirs ends one."""

    process: subprocess.Popen[str]
    receivers: int

    @classmethod
    @contextmanager
    def started(cls, link: SlowLink, url: str, receivers: int) -> Iterator["_ReceiverGroup"]:
        command = [sys.executable, "-m", "benchmarks.weightsync.fanout", "--receive", url]
        command += ["--receivers", str(receivers)]
        with _process(link.run(link.edge, command)) as process:
            group = cls(process, receivers)
            for _ in range(receivers):
                _line(process.stdout)
            yield group

    def phase(self, link: SlowLink, mbit: float, begin: Any) -> dict[str, Any]:
        clock = MonotonicClock()
        assert self.process.stdin is not None
        before, began_s = link.received_bytes(), clock.now()
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        begin()
        reports = [json.loads(_line(self.process.stdout)) for _ in range(self.receivers)]
        seconds = clock.now() - began_s
        (payload_bytes,) = {each["bytes_read"] for each in reports}
        if len({(each["version"], each["state_hash"]) for each in reports}) != 1:
            raise Exhausted(f"receivers ended in different states: {reports}")
        link_bytes = link.received_bytes() - before
        ideal_s = payload_bytes * 8 / (mbit * 1e6)
        return {
            "payload_bytes": payload_bytes,
            "link_bytes": link_bytes,
            "copies_over_link": link_bytes / payload_bytes,
            "seconds": seconds,
            "ideal_seconds": ideal_s,
            "seconds_over_ideal": seconds - ideal_s,
        }


def _receive_all(url: str, receivers: int) -> None:
    """Forks eight receivers, which share one copy of their imports."""
    warm_up()
    context = multiprocessing.get_context("fork")
    phases = [context.Event() for _ in range(2)]
    children = [
        context.Process(target=_receive, args=(url, phases), daemon=True) for _ in range(receivers)
    ]
    for child in children:
        child.start()
    for phase in phases:
        if not sys.stdin.readline():
            return
        phase.set()
    for child in children:
        child.join()


def _receive(url: str, phases: list[Any]) -> None:
    torch.set_num_threads(1)
    receiver = Receiver(url, threads=1)
    held: State | None = None
    current = None
    _say({"ready": os.getpid()})
    for phase in phases:
        phase.wait()
        newest = receiver.newer(current, wait_s=_PATIENCE_S)
        assert newest is not None
        staged = receiver.prepare(current, newest)
        if held is None:
            held = {
                name: torch.zeros(spec.shape, dtype=torch.bfloat16)
                for name, spec in staged.layout.items()
            }
        applied = receiver.settle(staged, TensorTarget(held))
        current = applied.version
        del staged
        _say(
            {
                "version": applied.version,
                "state_hash": applied.state_hash,
                "bytes_read": applied.bytes_read,
            }
        )
    receiver.close()


def _say(reports: dict[str, Any]) -> None:
    """One write, so that lines of several processes do not mix."""
    os.write(sys.stdout.fileno(), json.dumps(reports).encode() + b"\n")


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        # A session of its own: Ctrl-C ends this process first, and this one ends all others.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline()
    if not line:
        raise Exhausted("a part of the benchmark ended early; see its output above")
    return line


if __name__ == "__main__":
    main()
