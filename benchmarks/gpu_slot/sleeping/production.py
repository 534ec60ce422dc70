"""Production beside sleeping weights: decode steps in a process of their own, each one logged.

Run as `python -m benchmarks.gpu_slot.sleeping.production KIND [--tiny]` by `Production`. Lines on
its stdin: `run` steps without a pause until `stop`, which is answered with a JSON list of steps,
each [start, end] in nanoseconds of CLOCK_MONOTONIC. It ends with its stdin.
"""

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO

from benchmarks.gpu_slot.decode_model import LLAMA_8B, TINY, DecodeModel
from benchmarks.gpu_slot.device import Device, Work, device_of
from harvester.contracts.clock import monotonic_ns
from harvester.platform.parent import end_with

BATCH = 16
CONTEXT_TOKENS = 1024
_TINY_CONTEXT_TOKENS = 16
_END_S = 5.0

Step = tuple[int, int]
"""Start and end in nanoseconds of CLOCK_MONOTONIC."""


@dataclass(slots=True)
class ProductionProcess:
    """The parent's side. Starts while the parent prepares; `wait_until_ready` comes first."""

    _process: "subprocess.Popen[bytes]"

    def wait_until_ready(self) -> None:
        self._expect("ready")

    def run(self) -> None:
        self._tell("run")
        self._expect("running")

    def stop(self) -> list[Step]:
        """Steps since `run`, the last one ended."""
        self._tell("stop")
        return [(int(start), int(end)) for start, end in json.loads(self._answer())]

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word.encode() + b"\n")
        self._process.stdin.flush()

    def _expect(self, word: str) -> None:
        answer = self._answer()
        if answer != word:
            raise RuntimeError(f"production replied {answer[:80]!r} where {word!r} was due")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"production ended with {self._process.wait(_END_S)}")
        return line.decode().strip()


@contextmanager
def production(kind: str, *, tiny: bool) -> Iterator[ProductionProcess]:
    """A production process, ended on leaving."""
    command = [sys.executable, "-m", "benchmarks.gpu_slot.sleeping.production", kind]
    process = subprocess.Popen(
        [*command, *(["--tiny"] if tiny else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509 - its parent has one thread
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield ProductionProcess(process)
    finally:
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def serve(device: Device, step: Work, commands: IO[bytes], answers: IO[bytes]) -> None:
    """Runs steps by `commands`, until they end."""

    def answer(text: str) -> None:
        answers.write(text.encode() + b"\n")
        answers.flush()

    answer("ready")
    while commands.readline() == b"run\n":
        answer("running")
        steps: list[Step] = []
        while not select.select([commands], [], [], 0)[0]:
            began_ns = monotonic_ns()
            step()
            device.synchronize()
            steps.append((began_ns, monotonic_ns()))
        if commands.readline() != b"stop\n":
            return
        answer(json.dumps(steps))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_slot.sleeping.production", description=__doc__
    )
    parser.add_argument("kind", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = device_of(given.kind)
    context_tokens = _TINY_CONTEXT_TOKENS if given.tiny else CONTEXT_TOKENS
    shape = TINY if given.tiny else LLAMA_8B
    with device.current():
        model = DecodeModel(shape, device.torch_device, BATCH * context_tokens)
        # Within: the step's buffers are filled on the stream that reads them.
        step = device.captured(model.decode(batch=BATCH, context_tokens=context_tokens))
    # Commands are unbuffered, so that select sees the unread ones.
    with open(0, "rb", buffering=0) as commands, open(1, "wb") as answers:
        serve(device, step, commands, answers)


if __name__ == "__main__":
    main()
