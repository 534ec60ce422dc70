"""`nvidia-smi` as a driver of the 580 series answers, for machines without one."""

from pathlib import Path

UUIDS = ("GPU-5f0c1b7e-93a4-4c1d-8e02-6b0f3d2a9c11", "GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9")
QUERY = "--query-gpu=uuid,compute_mode --format=csv,noheader"


def played(folder: Path, *modes: str) -> str:
    """A program that knows one GPU for each compute mode, and one question."""
    lines = "".join(f"{uuid}, {mode}\\n" for uuid, mode in zip(UUIDS, modes, strict=False))
    command = folder / "nvidia-smi"
    command.write_text(
        f'#!/bin/sh\n[ "$*" = "{QUERY}" ] || {{ echo "Field \\"$*\\" is not a valid field"; '
        f"exit 2; }}\nprintf '{lines}'\n"
    )
    command.chmod(0o755)
    return str(command)
