"""The file of a run's results while it goes on."""

import json
from pathlib import Path

import pytest

from benchmarks.testbed.partial_result import PartialResult


def test_the_file_has_all_that_was_kept_and_the_newest_of_each_name(tmp_path: Path) -> None:
    partial = PartialResult(tmp_path / "new" / "parts.json", {"hardware": "gpu"})
    partial.keep({"rounds": 1, "slo": 5.0})
    partial.keep({"rounds": 2})
    found = {"hardware": "gpu", "rounds": 2, "slo": 5.0}
    assert json.loads(partial.path.read_text()) == partial.found == found


def test_a_file_that_cannot_be_written_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts.json").mkdir()
    partial = PartialResult(tmp_path / "parts.json")
    partial.keep({"rounds": 1})
    assert partial.found == {"rounds": 1}
    assert "note: cannot write" in capsys.readouterr().err
