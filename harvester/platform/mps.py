"""The control daemon of NVIDIA's Multi-Process Service, through its own command.

`nvidia-cuda-mps-control` takes commands on its standard input; CUDA_MPS_PIPE_DIRECTORY names the
daemon. RoseMux asks, and ends the GPU work of one client. It starts and stops nothing and sets no
limit: a server's limits hold for every next client, production included. Words and meanings:
NVIDIA, "Multi-Process Service", the chapter on `nvidia-cuda-mps-control`.
"""

import os
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harvester.contracts.errors import PeerProtocolError, Unsupported

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
THREADS_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PRIORITY_VARIABLE = "CUDA_MPS_CLIENT_PRIORITY"

DEFAULT_CONTROL = "nvidia-cuda-mps-control"
DEFAULT_PIPE_DIRECTORY = Path("/tmp/nvidia-mps")
NO_DAEMON = Path("/nonexistent")
"""Pipe directory without a daemon: CUDA runs a process there without MPS."""

_MAX_REPLY_BYTES = 1 << 16
_MAX_NUMBERS = 4096
_NOBODY = b"Cannot find MPS control daemon"


class ServerStatus(StrEnum):
    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"
    """A client's fault ended the server: every client, production included, must restart."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class MpsControl:
    """One daemon. Every call runs the command once; Unsupported without a daemon."""

    pipe_directory: Path = DEFAULT_PIPE_DIRECTORY
    executable: str = DEFAULT_CONTROL
    timeout_s: float = 2.0

    def servers(self) -> tuple[int, ...]:
        """Process ids of the servers; empty before the first client."""
        return self._numbers("get_server_list")

    def clients(self, server: int) -> tuple[int, ...]:
        """Process ids of a server's clients, as the daemon's pid namespace counts."""
        return self._numbers(f"get_client_list {server}")

    def status(self, server: int) -> ServerStatus:
        reply = self._ask(f"get_server_status {server}").strip().upper()
        return next((one for one in ServerStatus if one == reply), ServerStatus.UNKNOWN)

    def terminate_client(self, server: int, client: int) -> bool:
        """End a client's GPU work at any point. False if that failed.

        Call this before the client's process is killed: a signal alone can leave the server, and
        with it production, in an undefined state.
        """
        reply = self._ask(f"terminate_client {server} {client}").strip()
        # The reply is CUDA's result, 0 or its name; some versions reply nothing on success.
        return reply in {"", "0"} or "CUDA_SUCCESS" in reply

    def _numbers(self, command: str) -> tuple[int, ...]:
        words = self._ask(command).split()
        if len(words) > _MAX_NUMBERS or not all(word.isdigit() for word in words):
            raise PeerProtocolError(f"{self.executable}: {command}: no list of process ids")
        return tuple(int(word) for word in words)

    def _ask(self, command: str) -> str:
        environment = os.environ | {PIPE_VARIABLE: str(self.pipe_directory)}
        try:
            done = subprocess.run(
                [self.executable],
                input=f"{command}\n".encode(),
                capture_output=True,
                env=environment,
                timeout=self.timeout_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise Unsupported(f"{self.executable} is not installed here") from error
        except OSError as error:
            raise Unsupported(f"{self.executable}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise Unsupported(f"the MPS daemon gave no answer in {self.timeout_s} s") from error
        reply = done.stdout[:_MAX_REPLY_BYTES].decode(errors="replace")
        # The stream of that message and the exit status differ by driver.
        if done.returncode != 0 or _NOBODY in done.stdout + done.stderr:
            raise Unsupported(f"no MPS daemon answers in {self.pipe_directory}")
        return reply
