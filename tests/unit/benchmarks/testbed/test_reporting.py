"""The end of a benchmark: results are never lost to a path."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.reporting import report
from harvester.contracts.errors import Exhausted


def unmeasured() -> dict[str, Any]:
    raise AssertionError("nothing may be measured before the path is known to be good")


def test_the_result_is_in_the_file_and_on_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "folder" / "result.json"
    assert report("some", lambda: {"ratio": 1.5}, path, engines=False) == {"ratio": 1.5}
    assert json.loads(path.read_text()) == {"ratio": 1.5}
    assert json.loads(capsys.readouterr().out) == {"ratio": 1.5}


def test_without_a_path_the_result_is_on_screen(capsys: pytest.CaptureFixture[str]) -> None:
    report("some", lambda: {"ratio": 1.5}, None, engines=False)
    assert json.loads(capsys.readouterr().out) == {"ratio": 1.5}


@pytest.mark.parametrize("name", ["file/result.json", "folder"])
def test_a_path_that_cannot_be_written_ends_it_before_anything_is_measured(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit, match=rf"benchmarks\.some: cannot write .*{name}"):
        report("some", unmeasured, tmp_path / name, engines=False)


def test_an_earlier_result_stays_where_a_run_fails(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("{}")

    def failing() -> dict[str, Any]:
        raise Exhausted("no room")

    with pytest.raises(SystemExit, match=r"benchmarks\.some: no room"):
        report("some", failing, path, engines=False)
    assert path.read_text() == "{}"


def test_a_run_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        report("some", interrupted, tmp_path / "new" / "result.json", engines=False)
    assert left.value.code == 130
    assert list((tmp_path / "new").iterdir()) == []


def test_a_result_that_the_disk_does_not_take_is_on_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"

    def measured() -> dict[str, Any]:
        path.mkdir()
        return {"ratio": 1.5}

    with pytest.raises(SystemExit, match="cannot write"):
        report("some", measured, path, engines=False)
    assert json.loads(capsys.readouterr().out) == {"ratio": 1.5}
