"""A rank's process is killed while it writes: the others name it, the store stays as it was."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harvester.contracts.ids import WeightVersion
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver

RANKS = 3
TRAINER = """
import json, os, signal, sys
from multiprocessing import get_context
from pathlib import Path
import torch
from harvester.contracts.errors import Exhausted
from weightsync.encoding.codec import warm_up
from weightsync.publisher import Publisher
from weightsync.publish.directory_writer import WritableDirectory
from weightsync.publish.trainer_state import ShardSlice
from weightsync.publish.settings import ExchangeSettings
from weightsync.layout.durable import write_durably

def rank_process(store, rank, ranks, victim, trainer):
    step = 0

    def write(path, chunks):
        if step == 2 and rank == victim:
            path.write_bytes(b"".join(map(bytes, chunks))[:100])
            os.kill(os.getpid(), signal.SIGKILL)
        return write_durably(path, chunks)

    with Publisher(
        WritableDirectory(Path(store), write=write),
        rank=rank, ranks=ranks, exchange=ExchangeSettings(rank_timeout_s=6.0),
    ) as publisher:
        trainer.send("ready")
        while True:
            step = trainer.recv()
            part = torch.arange(64.0).reshape(8, 8) * step
            slices = [("w", ShardSlice(part, (8 * ranks, 8), 0, 8 * rank))]
            try:
                publisher.publish(slices, step=step)
                trainer.send("published")
            except Exhausted as error:
                trainer.send(str(error))

def started(*arguments):
    ours, theirs = fork.Pipe()
    process = fork.Process(target=rank_process, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours

def line(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return ""

# What all ranks need is there before they are forked, so that none is late at the others.
warm_up((4,))
fork = get_context("fork")
group = []
for order in map(json.loads, sys.stdin):
    if isinstance(order, int):
        for _, pipe in group:
            pipe.send(order)
    else:
        for process, _ in group:
            process.kill()
            process.join()
        store, ranks, victim = order
        group = [started(store, rank, ranks, victim) for rank in range(ranks)]
    print(json.dumps([line(pipe) for _, pipe in group]), flush=True)
"""


class Trainer:
    """Forks the ranks of one group after another, each a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, store: Path, *, victim: int) -> None:
        assert self._answers([str(store), RANKS, victim]) == ["ready"] * RANKS

    def step(self, step: int) -> list[str]:
        """Reads each rank's word on its publication; "" where it was killed."""
        return self._answers(step)

    def _answers(self, order: list[str | int] | int) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answers: list[str] = json.loads(self._process.stdout.readline())
        return answers


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield Trainer(process)
    process.communicate(timeout=30)


def _held(store: Path, version: int) -> torch.Tensor:
    held = torch.zeros(8 * RANKS, 8)
    Receiver(store).sync(None, WeightVersion(version), TensorTarget({"w": held}))
    return held


@pytest.mark.parametrize("victim", [0, 2])
def test_the_version_before_stays_and_the_killed_rank_is_named(
    tmp_path: Path, trainer: Trainer, victim: int
) -> None:
    first = torch.arange(64.0).reshape(8, 8).repeat(RANKS, 1)
    trainer.start(tmp_path, victim=victim)
    assert trainer.step(1) == ["published"] * RANKS
    said = trainer.step(2)
    assert said[victim] == ""
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {victim}" in said[rank]
        assert "did not report for" in said[rank]
    assert Receiver(tmp_path).latest() == 1
    assert torch.equal(_held(tmp_path, 1), first)
    trainer.start(tmp_path, victim=-1)
    assert trainer.step(3) == ["published"] * RANKS
    assert torch.equal(_held(tmp_path, 2), first * 3)
