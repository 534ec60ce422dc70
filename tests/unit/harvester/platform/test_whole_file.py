"""Result files: refused before the work, never half written."""

from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError
from harvester.platform.whole_file import is_there, make_writable, write_whole


def test_a_folder_is_made_and_no_file_is_left_behind(tmp_path: Path) -> None:
    make_writable(tmp_path / "new" / "result.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_an_existing_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("older")
    make_writable(path)
    assert path.read_text() == "older"


def test_a_path_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "page.html"
    with pytest.raises(ConfigError, match="cannot write"):
        make_writable(below)
    with pytest.raises(ConfigError, match="cannot write"):
        write_whole(below, "text")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("older and longer")
    write_whole(path, "newer")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["newer"]


def test_a_place_where_this_user_may_not_look_is_not_taken_for_an_absent_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert is_there(tmp_path)
    assert not is_there(tmp_path / "absent")
    assert not is_there(tmp_path / "file" / "below")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert not is_there(tmp_path / "loop")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.stat", refused)
    with pytest.raises(PermissionError):
        is_there(tmp_path)
