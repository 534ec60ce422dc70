"""Which processes belong to which, as the kernel tells."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from harvester.contracts.process import family, lineage, start_ticks


@pytest.fixture
def shell() -> Iterator["subprocess.Popen[str]"]:
    """A parent with a child that waits for it; prints the child's process id."""
    script = "sleep 60 & echo $!; read line; kill $!; wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate("\n")


def test_a_process_and_what_it_started_are_a_family(shell: "subprocess.Popen[str]") -> None:
    assert shell.stdout is not None
    child = int(shell.stdout.readline())

    assert family(shell.pid) == tuple(sorted((shell.pid, child)))
    assert {shell.pid, child} <= set(family(os.getpid()))


def test_a_process_descends_from_whoever_started_it(shell: "subprocess.Popen[str]") -> None:
    assert shell.stdout is not None
    child = int(shell.stdout.readline())

    assert lineage(child)[:3] == (child, shell.pid, os.getpid())
    assert lineage(os.getpid()) == lineage(child)[2:]


def test_a_process_that_is_not_there_has_none() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    assert start_ticks(ended.pid) is None
    with pytest.raises(OSError):
        family(ended.pid)
    assert lineage(ended.pid) == (ended.pid,)
