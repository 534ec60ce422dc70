"""`from weightsync import ...`: few names, light to import, and an example that runs."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import weightsync

HEAVY = ("aiohttp", "fsspec", "msgspec", "numba", "numpy", "torch", "vllm")


def test_exports_five_names_and_all_of_them_exist() -> None:
    assert weightsync.__all__ == [
        "Follower",
        "Publisher",
        "Receiver",
        "ShardSlice",
        "TensorTarget",
    ]
    assert [getattr(weightsync, name).__name__ for name in weightsync.__all__] == weightsync.__all__


def test_another_name_is_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'weightsync' has no attribute 'Nothing'"):
        weightsync.Nothing  # noqa: B018 - the access is the test


def test_importing_it_imports_nothing_heavy() -> None:
    script = f"import sys, weightsync; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_publisher_and_follower_need_neither_a_framework_nor_a_server(tmp_path: Path) -> None:
    extras = ("aiohttp", "blake3", "fsspec", "pydantic", "torch", "typer", "uvloop", "vllm")
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({extras!r}))\n"
        "from weightsync import Follower, Publisher, Receiver, ShardSlice, TensorTarget\n"
        "Publisher.Versions(), Publisher.Work(), Publisher.Exchange(), Publisher.Announce(())\n"
        "import numpy\n"
        "state = {'w': numpy.ones((64, 8), numpy.float32)}\n"
        "with Publisher(sys.argv[1]) as publisher:\n"
        "    publisher.publish(state)\n"
        "    state['w'][3] += 1\n"
        "    assert not publisher.publish(state).is_full\n"
        "with Follower(Receiver(sys.argv[1]), sys.argv[2]) as follower:\n"
        "    assert follower.pull().version == 2\n"
        "held = {'w': numpy.zeros((64, 8), numpy.float32)}\n"
        "Receiver(sys.argv[1]).sync(None, 2, TensorTarget(held))\n"
        "assert (held['w'] == state['w']).all()"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "store"), str(tmp_path / "policy")]
    subprocess.run(arguments, check=True)


def test_the_example_in_the_docstring_runs() -> None:
    found = doctest.testmod(weightsync)
    assert (found.failed, found.attempted > 0) == (0, True)
