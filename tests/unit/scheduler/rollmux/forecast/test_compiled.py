"""Compiled rules follow their sources: a cache file never outlives one of the files in it."""

import errno
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

from scheduler.rollmux.forecast.compiled import compiled

_INNER = """
from scheduler.rollmux.forecast.compiled import compiled

@compiled
def inner(number: int) -> int:
    return number + {added}
"""
_OUTER = """
from scheduler.rollmux.forecast.compiled import compiled
from rules.inner import inner

@compiled
def outer(number: int) -> int:
    return 10 * inner(number)
"""
_PROGRAM = "from rules.outer import outer; print(outer(1), sum(outer.stats.cache_hits.values()))"
_MODULES = (
    "scheduler.rollmux.forecast.execution",
    "scheduler.rollmux.forecast.forecast",
    "scheduler.rollmux.forecast.scenarios",
    "scheduler.rollmux.planner.assignments",
    "scheduler.rollmux.planner.price_floor",
)


def _run(folder: Path, **environment: str) -> list[int]:
    """The rule's answer, and how often it was loaded from its cache."""
    path = f"import sys; sys.path.insert(0, {str(folder)!r}); "
    done = subprocess.run(
        [sys.executable, "-c", path + _PROGRAM],
        env=dict(os.environ) | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(each) for each in done.stdout.split()]


def test_an_edited_callee_in_another_file_is_compiled_into_its_caller_again(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "outer.py").write_text(_OUTER)
    (rules / "inner.py").write_text(_INNER.format(added=1))
    assert _run(tmp_path) == [20, 0]
    assert _run(tmp_path) == [20, 1]
    (rules / "inner.py").write_text(_INNER.format(added=2))
    assert _run(tmp_path) == [30, 0]


@pytest.mark.parametrize("files", ["*.nbi", "*.nbc"], ids=["index", "code"])
def test_cache_files_that_a_crash_cut_are_written_again(tmp_path: Path, files: str) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "outer.py").write_text(_OUTER)
    (rules / "inner.py").write_text(_INNER.format(added=1))
    assert _run(tmp_path) == [20, 0]
    for file in (rules / "__pycache__").glob(files):
        file.write_bytes(b"")
    assert _run(tmp_path) == [20, 0]
    assert _run(tmp_path) == [20, 1]


def test_without_a_place_for_a_cache_a_rule_is_compiled_all_the_same(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "outer.py").write_text(_OUTER)
    (rules / "inner.py").write_text(_INNER.format(added=1))
    (rules / "__pycache__").touch()
    assert [_run(tmp_path, HOME="/proc/none") for _ in range(2)] == [[20, 0], [20, 0]]


def test_a_full_disk_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(IndexDataCacheFile, "save", refused)

    @compiled
    def doubled(number: int) -> int:
        return 2 * number

    assert doubled(4) == 8


@pytest.mark.parametrize("module", _MODULES)
def test_compiled_rules_call_rules_of_their_own_folder_only(module: str) -> None:
    found = import_module(module)
    rules = [one for one in vars(found).values() if isinstance(one, Dispatcher)]
    assert rules
    folder = module.rpartition(".")[0]
    for rule in rules:
        if rule.py_func.__module__ != module:
            continue
        called = [rule.py_func.__globals__.get(name) for name in rule.py_func.__code__.co_names]
        homes = {one.py_func.__module__ for one in called if isinstance(one, Dispatcher)}
        assert all(home.rpartition(".")[0] == folder for home in homes)
