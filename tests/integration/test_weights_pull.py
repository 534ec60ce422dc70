"""`rosemux weights pull` in a process of its own that is killed while it writes."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from weightsync.layout.apply_journal import Applying, Held, read_record
from weightsync.publisher import Publisher

State = dict[str, torch.Tensor]
LAYERS = 24
ROUNDS = 20


def first() -> State:
    generator = torch.Generator().manual_seed(5)
    return {
        f"layers.{i}.weight": torch.randn(512, 1024, generator=generator).bfloat16()
        for i in range(LAYERS)
    }


def move(state: State) -> None:
    for tensor in state.values():
        tensor.view(torch.int16).add_(1)


def pull(store: Path, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "harvester.cli", "weights", "pull", str(store), str(directory)],
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return said


def killed_while_it_applies(process: subprocess.Popen[str], directory: Path) -> bool:
    """False where it was done before the kill."""
    while process.poll() is None:
        if isinstance(read_record(directory), Applying):
            process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    return isinstance(read_record(directory), Applying)


def holds(directory: Path, state: Mapping[str, torch.Tensor]) -> bool:
    found: State = {}
    for shard in directory.glob("*.safetensors"):
        found |= load_file(shard)
    return all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_pull_that_is_killed_while_it_writes_is_repaired_by_the_next(tmp_path: Path) -> None:
    state, store, directory = first(), tmp_path / "store", tmp_path / "held"
    with Publisher(store) as publisher:
        publisher.publish(state)
        finished(pull(store, directory))
        for _ in range(ROUNDS):
            move(state)
            publisher.publish(state)
            if killed_while_it_applies(pull(store, directory), directory):
                break
            assert holds(directory, state)
        else:
            raise AssertionError("no kill came in time")
    said = finished(pull(store, directory))
    assert "an apply was interrupted" in said
    assert "repaired" in said
    assert isinstance(read_record(directory), Held)
    assert holds(directory, state)
