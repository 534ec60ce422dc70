"""Queries this machine's GPUs through nvidia-smi. Read-only."""

import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harvester.contracts.errors import Unsupported

_TIMEOUT_S = 20.0
_FIELDS = 2
_MAX_OUTPUT_BYTES = 300
_CONTROL_DEVICE = Path("/dev/nvidiactl")


class ComputeMode(StrEnum):
    DEFAULT = "Default"
    EXCLUSIVE_PROCESS = "Exclusive_Process"
    """Only one process may use the GPU: with MPS the server, for all of its clients."""
    PROHIBITED = "Prohibited"


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    compute_mode: ComputeMode


def gpus(command: str = "nvidia-smi") -> tuple[Gpu, ...]:
    """GPUs of this machine; empty without a driver. Raises Unsupported if the driver is broken."""
    lines = smi_lines(command, "--query-gpu=uuid,compute_mode", "--format=csv,noheader")
    return tuple(_gpu(line) for line in lines)


def smi_lines(command: str, *arguments: str) -> tuple[str, ...]:
    """Lines of the command's output; empty if the command and the driver are missing."""
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        if _CONTROL_DEVICE.exists():
            # Taking this for a machine without GPUs would let vLLM claim nine tenths of one.
            raise Unsupported(
                f"{command} is not installed here, and {_CONTROL_DEVICE} is: in a container, add "
                "`utility` to NVIDIA_DRIVER_CAPABILITIES"
            ) from error
        return ()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unsupported(f"{command} gives no answer: {error}") from error
    if done.returncode != 0:
        output = (done.stdout + done.stderr)[:_MAX_OUTPUT_BYTES].decode(errors="replace").split()
        raise Unsupported(
            f"{command} ended with {done.returncode}: the GPU or its driver has failed: "
            f"{' '.join(output) or 'no output'}"
        )
    return tuple(line for line in done.stdout.decode(errors="replace").splitlines() if line)


def _gpu(line: str) -> Gpu:
    words = [word.strip() for word in line.split(",")]
    if len(words) != _FIELDS or words[1] not in tuple(ComputeMode):
        raise Unsupported(f"nvidia-smi printed {line!r}, not a GPU with its compute mode")
    return Gpu(words[0], ComputeMode(words[1]))
