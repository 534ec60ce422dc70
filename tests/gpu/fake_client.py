"""A client of the MPS daemon that `tests/fake_mps.py` plays, as CUDA makes one of a process.

It joins where CUDA_MPS_PIPE_DIRECTORY names a daemon, starts the server as the first, and computes
until the daemon ends its work. Without a daemon it computes all the same and reports nothing.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from harvester.platform.mps import DEFAULT_PIPE_DIRECTORY, PIPE_VARIABLE, THREADS_VARIABLE

MULTIPROCESSORS = 132
SERVER = 1 << 22
"""A process id above Linux's largest pid."""


class FakeClient:
    def __init__(self) -> None:
        pipes = os.environ.get(PIPE_VARIABLE, str(DEFAULT_PIPE_DIRECTORY))
        self._file = Path(pipes) / "state.json"
        self._joined = False

    def start(self) -> int:
        if not self._file.exists():
            return MULTIPROCESSORS
        state = self._state()
        server = state["servers"].setdefault(str(SERVER), {"clients": [], "status": "ACTIVE"})
        server["clients"].append(os.getpid())
        self._file.write_text(json.dumps(state))
        self._joined = True
        share = float(os.environ.get(THREADS_VARIABLE, "100")) / 100
        return math.ceil(MULTIPROCESSORS * share)

    def work(self) -> None:
        time.sleep(0.01)
        if self._joined and os.getpid() not in self._state()["servers"][str(SERVER)]["clients"]:
            raise RuntimeError("CUDA error: the client was terminated")

    def leave(self) -> None:
        if not self._joined:
            return
        state = self._state()
        clients = state["servers"][str(SERVER)]["clients"]
        if os.getpid() in clients:
            clients.remove(os.getpid())
            self._file.write_text(json.dumps(state))

    def _state(self) -> Any:
        while True:
            try:
                return json.loads(self._file.read_text())
            except json.JSONDecodeError:
                # The daemon is about to write it.
                time.sleep(0.001)
