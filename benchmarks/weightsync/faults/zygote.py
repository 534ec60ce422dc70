"""The harness's end of the fork server in victims.py."""

import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import IO, Self

import msgspec

from benchmarks.weightsync.faults.tasks import ChildDeath, ChildEnd, ChildTask

_TRIES = 8


class Zygote:
    """One fork server; ends with the `with` block."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weightsync.faults.victims"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._ready = False
        self._full: dict[str, ChildEnd] = {}
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._pipe(self._process.stdin), self._pipe(self._process.stdout)):
            pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, task: ChildTask) -> ChildEnd:
        """One child from its start to its end."""
        self.begin(task)
        return self.ended()

    def begin(self, task: ChildTask) -> None:
        """Starts a child; `ended` waits for its end."""
        if not self._ready:
            self._expect("ready")
            self._ready = True
        pipe = self._pipe(self._process.stdin)
        pipe.write(msgspec.json.encode(task) + b"\n")
        pipe.flush()

    def ended(self) -> ChildEnd:
        return msgspec.json.decode(self._line(), type=ChildEnd)

    def whole(self, key: str, task: Callable[[], ChildTask]) -> ChildEnd:
        """Progress of a task of this kind that lives; measured once."""
        if key not in self._full:
            self._full[key] = self.run(task())
        return self._full[key]

    def kill(
        self, task: Callable[[ChildDeath], ChildTask], *, how: str, whole: ChildEnd, rng: Random
    ) -> None:
        """Runs a task that dies: at a random byte, call or instant, or within a random tensor.

        A child that was faster than its death is no fault: a new one dies earlier, and where the
        machine is too busy for instants, at a call.
        """
        for number in range(2 * _TRIES):
            reach = 0.6 ** (number % _TRIES)
            at = how if number < _TRIES else "call"
            ended = self.run(task(_death(at, whole, reach, rng)))
            if ended.killed:
                return
            if ended.status != 0:
                raise RuntimeError(f"a child ended with {ended.status} before it was killed")
        raise RuntimeError(f"no child died: {how}, {whole}")

    def _expect(self, word: str) -> None:
        line = self._line()
        if line.strip() != word.encode():
            raise RuntimeError(f"the fork server replied {line!r}")

    def _line(self) -> bytes:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError("the fork server ended")
        return line

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise RuntimeError("the fork server has no pipes")
        return pipe


def _death(how: str, whole: ChildEnd, reach: float, rng: Random) -> ChildDeath:
    part = rng.random() * reach
    if how == "byte":
        return ChildDeath(after_bytes=int(part * whole.bytes))
    if how == "call":
        return ChildDeath(after_calls=1 + int(part * whole.calls))
    if how == "tensor":
        return ChildDeath(in_tensor=int(part * whole.tensors), written_ratio=rng.random())
    return ChildDeath(after_s=part * whole.seconds)
