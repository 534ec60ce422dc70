"""`rosemux release`: what it writes, and what it refuses."""

from pathlib import Path

import pytest

from harvester.cli import release as module
from harvester.cli.root import main


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    (tmp_path / "state").mkdir()
    file = tmp_path / "agent.yaml"
    file.write_text(f"state_dir: {tmp_path}/state\nslots: [{{name: slot0}}, {{name: slot1}}]\n")
    return file


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["release", *arguments])
    shown = capsys.readouterr()
    return int(left.value.code or 0), shown.out + shown.err


def test_leaves_its_reason_for_the_agent(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--config", str(config), "--slot", "slot1", "--reason", "driver replaced")
    code, shown = said(capsys, *options)
    assert (code, "no agent has taken it yet" in shown) == (0, True), shown
    assert (tmp_path / "state/slot1.release").read_text() == "driver replaced\n"
    assert not (tmp_path / "state/slot0.release").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--reason", "why"), "choose one of slot0, slot1"),
        (("--reason", "why", "--slot", "slot9"), "the file has slot0, slot1"),
        (("--reason", " ", "--slot", "slot0"), "--reason"),
        (("--reason", "x" * 401, "--slot", "slot0"), "--reason"),
    ],
)
def test_refuses_what_names_no_slot_or_no_reason(
    config: Path,
    options: tuple[str, ...],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, shown = said(capsys, "--config", str(config), *options)
    assert (code, complaint in shown) == (2, True), shown
    assert list((tmp_path / "state").iterdir()) == []
