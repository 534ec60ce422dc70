"""A rank's process is killed while it writes: the others name it, the store stays as it was."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from harvester.contracts.ids import WeightVersion
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

RANKS = 3
RANK = """
import os, signal, sys
from pathlib import Path
import torch
from harvester.contracts.errors import Exhausted
from weightsync.publisher import Publisher
from weightsync.publish.intake import ShardSlice
from weightsync.layout.durable import write_durably

store, rank, ranks, victim = Path(sys.argv[1]), *map(int, sys.argv[2:])
step = 0

def write(path, chunks):
    if step == 2 and rank == victim:
        path.write_bytes(b"".join(map(bytes, chunks))[:100])
        os.kill(os.getpid(), signal.SIGKILL)
    return write_durably(path, chunks)

with Publisher(store, rank=rank, ranks=ranks, rank_timeout_s=10.0, write=write) as publisher:
    print("ready", flush=True)
    for line in sys.stdin:
        step = int(line)
        part = torch.arange(64.0).reshape(8, 8) * step
        try:
            publisher.publish([("w", ShardSlice(part, (8 * ranks, 8), 0, 8 * rank))], step=step)
            print("published", flush=True)
        except Exhausted as error:
            print(error, flush=True)
"""


@contextmanager
def _ranks(store: Path, victim: int) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(store), str(rank), str(RANKS), str(victim)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for process in processes:
            assert _line(process) == "ready"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _step(processes: list[subprocess.Popen[str]], step: int) -> list[str]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{step}\n")
        process.stdin.flush()
    return [_line(process) for process in processes]


def _held(store: Path, version: int) -> torch.Tensor:
    held = torch.zeros(8 * RANKS, 8)
    Receiver(store).sync(None, WeightVersion(version), TensorTarget({"w": held}))
    return held


@pytest.mark.parametrize("victim", [0, 2])
def test_the_version_before_stays_and_the_killed_rank_is_named(tmp_path: Path, victim: int) -> None:
    first = torch.arange(64.0).reshape(8, 8).repeat(RANKS, 1)
    with _ranks(tmp_path, victim) as processes:
        assert _step(processes, 1) == ["published"] * RANKS
        said = _step(processes, 2)
    assert said[victim] == ""
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {victim}" in said[rank]
        assert "did not report for" in said[rank]
    assert Receiver(tmp_path).latest() == 1
    assert torch.equal(_held(tmp_path, 1), first)
    with _ranks(tmp_path, victim=-1) as processes:
        assert _step(processes, 3) == ["published"] * RANKS
    assert torch.equal(_held(tmp_path, 2), first * 3)
