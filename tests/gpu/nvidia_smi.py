"""`nvidia-smi` as a driver of the 580 series answers, for machines without one."""

from pathlib import Path

UUIDS = ("GPU-5f0c1b7e-93a4-4c1d-8e02-6b0f3d2a9c11", "GPU-0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9")
TOTAL_MIB = 143_771
MODES = "--query-gpu=uuid,compute_mode --format=csv,noheader"
MEMORY = "--query-gpu=uuid,memory.total,memory.free --format=csv,noheader,nounits"


def fake(folder: Path, *modes: str) -> str:
    """A program that knows one GPU for each compute mode, and two questions."""
    there = list(zip(UUIDS, modes, strict=False))
    answers = {
        MODES: "".join(f"{uuid}, {mode}\\n" for uuid, mode in there),
        MEMORY: "".join(f"{uuid}, {TOTAL_MIB}, {TOTAL_MIB - 4}\\n" for uuid, _ in there),
    }
    cases = "".join(f"'{asked}') printf '{said}';;\n" for asked, said in answers.items())
    command = folder / "nvidia-smi"
    command.write_text(
        f'#!/bin/sh\ncase "$*" in\n{cases}*) echo "\\"$*\\" is not a valid field"; exit 2;;\nesac\n'
    )
    command.chmod(0o755)
    return str(command)
