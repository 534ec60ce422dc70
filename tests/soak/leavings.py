"""The agent's small disk, and the look at all that a piece has left behind."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coserve.guest import isolation
from tests.soak.node import SoakNode
from tests.soak.parts import AGENT
from tests.soak.processes import marked

SHARED = Path("/dev/shm")
_STATE_SIZE = "size=160m"
_UNDO_S = 240.0


@contextmanager
def agent_disk(folder: Path, *, own_mounts: bool) -> Iterator[None]:
    """A small file system for the agent's state, where this process has mounts of its own."""
    folder.mkdir(parents=True)
    if own_mounts:
        command = ["mount", "-t", "tmpfs", "-o", _STATE_SIZE, "tmpfs", str(folder)]
        subprocess.run(command, check=True)
    try:
        yield
    finally:
        if own_mounts:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def leavings(node: SoakNode, *, mark: str, own_mounts: bool) -> list[str]:
    """Processes, pages and shared memory that are there once all parts have ended and an operator
    has run `rosemux undo`."""
    left = [f"process {pid}" for pid in marked(mark)]
    command = [*node.commands()[AGENT].arguments[:3], "undo", "--config", str(node.agent_file)]
    undo = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_UNDO_S)
    if undo.returncode:
        left.append(f"rosemux undo: {undo.stdout[-300:]}{undo.stderr[-300:]}")
    if node.page_root.exists():
        left += [str(path.relative_to(node.page_root)) for path in node.page_root.rglob("*")]
    if own_mounts:
        names = (path.name for path in SHARED.iterdir() if path != node.root)
        left += [f"/dev/shm/{name}" for name in sorted(names)]
    isolation.clear()
    return left
