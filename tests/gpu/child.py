"""A process on a device, as a test starts it: `accelerator_child.py` is its other end."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 120.0
_MODULE = "tests.gpu.accelerator_child"


class Child:
    """`device` is "cpu", "cuda" or "fake", a client of the fake MPS daemon."""

    def __init__(
        self, device: str, environment: Mapping[str, str] | None = None, *, module: str = _MODULE
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd=ROOT,
            env=os.environ | dict(environment or {}),
        )
        self.pid = self._process.pid

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")

    def answer(self, *, within_s: float = WITHIN_S) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], within_s)
        if not ready:
            pytest.fail(f"process {self.pid} gave no answer in {within_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"process {self.pid} ended with {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, *words: object, within_s: float = WITHIN_S) -> dict[str, Any]:
        """Fails where the child could not do it."""
        self.tell(*words)
        said = self.answer(within_s=within_s)
        assert not said.get("error"), f"{' '.join(map(str, words))}: {said['error']}"
        return said

    def end(self) -> None:
        """End the process. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
