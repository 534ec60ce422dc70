"""A real agent process, its lease calls, and stand-ins beside it, each ended with its owner."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml

from benchmarks.testbed.prerequisites import free_ports
from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError
from harvester.platform.parent import end_with

MARKER = "ROSEMUX_BENCHMARK_SCENARIO"
"""Environment variable by which a scenario's processes are found."""
_START_S = 90.0
_CALL_S = 5.0
_TAIL_CHARS = 1000
clock = MonotonicClock()


def wait_for(holds: Callable[[], Any], *, seconds: float, every_s: float = 0.01) -> Any:
    """The first true result; a false one when the time is over."""
    end_s, tick = clock.now() + seconds, threading.Event()
    while not (value := holds()) and clock.now() < end_s:
        tick.wait(every_s)
    return value


class AgentChild:
    """`before` is a shell's line that the agent's process runs first; `namespaces` are flags of
    unshare(1) for it."""

    def __init__(
        self,
        root: Path,
        config: dict[str, Any],
        *,
        before: str = "",
        namespaces: Sequence[str] = (),
        marker: str = "",
    ) -> None:
        self.root = root
        self.port = free_ports(1)[0]
        self.slots: list[str] = [slot["name"] for slot in config["slots"]]
        self._file = root / "agent.yaml"
        self.config = {
            "node": "node",
            "mode": "harvest",
            # No withheld slice: it would close a grant without a cause of ours.
            "unsafe_experiments": True,
            "page_root": str(root / "pages"),
            "state_dir": str(root / "state"),
            **config,
            "http": {**config.get("http", {}), "port": self.port},
        }
        self._before, self._namespaces = before, namespaces
        self._environment = {**os.environ, **({MARKER: marker} if marker else {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.started_s = 0.0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Raises ConfigError if it does not answer."""
        self._file.write_text(yaml.safe_dump(self.config))
        command = [sys.executable, "-m", "harvester.cli", "agent", "--config", str(self._file)]
        if self._before or self._namespaces:
            script = f'{self._before or "true"} && exec "$@"'
            command = ["unshare", *self._namespaces, "sh", "-c", script, "sh", *command]
        parent = os.getpid()
        with (self.root / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=log,
                stdout=log,
                env=self._environment,
                preexec_fn=lambda: end_with(parent),  # noqa: PLW1509 - only makes system calls
            )
        self.started_s = clock.now()
        if not wait_for(self.answers, seconds=_START_S, every_s=0.05):
            raise ConfigError(f"the agent does not answer: {self.last_words()}")

    def last_words(self) -> str:
        return (self.root / "agent.log").read_text(errors="replace")[-_TAIL_CHARS:].strip()

    def answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return self.call("GET", "/healthz")[0] == 200
        return False

    def call(self, method: str, path: str, body: Any = None, *, token: str = "") -> tuple[int, Any]:
        """Status and reply. Raises OSError or HTTPException."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_CALL_S)
        try:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            data = None if body is None else json.dumps(body)
            connection.request(method, path, body=data, headers=headers)
            reply = connection.getresponse()
            raw = reply.read()
        finally:
            connection.close()
        return reply.status, json.loads(raw) if raw.startswith(b"{") else raw.decode()

    def send(self, raw: bytes, *, read: bool = True) -> int:
        """Sends bytes on a connection of their own. Returns the reply's status; 0 without a reply,
        or where none is waited for."""
        address = ("127.0.0.1", self.port)
        with socket.create_connection(address, timeout=1.0) as connection, suppress(OSError):
            connection.sendall(raw)
            if read:
                head = connection.recv(64).split(b" ")
                return int(head[1]) if len(head) > 1 and head[1].isdigit() else 0
        return 0

    def take(self, request_id: str, slot: str, *, duration_s: float = 10.0) -> Any:
        body = {
            "request_id": request_id,
            "slot": slot,
            "tenant": "t",
            "job": "j",
            "duration_s": duration_s,
        }
        return self.call("POST", "/v1/leases", body)[1]

    def lease_all(self, *, duration_s: float = 10.0, within_s: float = 20.0) -> None:
        """A lease on each slot. Raises ConfigError where one is refused for so long."""
        for slot in self.slots:
            taken = wait_for(
                lambda slot=slot: self._granted(slot, duration_s),  # type: ignore[misc]
                seconds=within_s,
                every_s=0.1,
            )
            if not taken:
                raise ConfigError(f"no lease on {slot}: {self.last_words()}")

    def _granted(self, slot: str, duration_s: float) -> bool:
        return bool(self.take(f"all-{slot}", slot, duration_s=duration_s)["type"] == "granted")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        """Asks it to end. Returns its status; kills it after ten seconds."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -9

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class StandInChild:
    """One process of `benchmarks.agent.stand_in`."""

    def __init__(
        self, role: str, pages: Path, log: Path, *, metrics: int | None = None, marker: str = ""
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.agent.stand_in", role, str(pages), str(log)]
        if metrics is not None:
            command += ["--metrics", str(metrics)]
        self.log = log
        self.struck = False
        """Whether the scenario itself ended it."""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={**os.environ, **({MARKER: marker} if marker else {})},
        )

    def word(self, word: str) -> None:
        pipe: IO[bytes] | None = self.process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.write(word.encode() + b"\n")
            pipe.flush()

    def facts(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        lines = self.log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.endswith("}")]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.struck = True
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Its status."""
        if self.process.poll() is None:
            self.word("end")
        try:
            status = self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        return status
