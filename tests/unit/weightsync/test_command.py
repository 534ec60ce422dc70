"""`rosemux weights pull`: its output and exit codes."""

from pathlib import Path

import pytest
import torch

from harvester.cli import main
from weightsync.publisher import Published, Publisher

State = dict[str, torch.Tensor]
Store = tuple[Path, list[Published]]


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        main(["weights", *map(str, arguments)])
    code = left.value.code
    return code if isinstance(code, int) else 0


def test_pulls_the_newest_version_and_says_which(
    published: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, done = published
    assert exit_code("pull", store, tmp_path / "held") == 0
    said = capsys.readouterr().out
    assert "holds no version yet" in said
    assert f"version 8, {done[7].state_hash}: 5 tensors written from a full checkpoint" in said
    assert exit_code("pull", store, tmp_path / "held") == 0
    said = capsys.readouterr().out
    assert f"holds version 8, {done[7].state_hash}" in said
    assert "0 tensors written" in said


def test_pulls_the_version_that_is_named(
    published: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = published
    assert exit_code("pull", store, tmp_path / "held", "--version", 6) == 0
    assert "version 6," in capsys.readouterr().out


def test_names_the_remedy_and_the_party_at_fault(
    published: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = published
    cases: list[tuple[tuple[object, ...], int, str]] = [
        ((tmp_path / "nowhere", tmp_path / "held"), 2, "publish a version there first"),
        ((store, tmp_path / "held", "--version", 9), 2, "the newest is 8"),
        ((store, tmp_path / "held", "--watch", "--version", 8), 2, "leave --version out"),
        ((store, store / "LATEST"), 2, "cannot write to"),
        ((store, store), 2, "is a weight store: name another directory"),
        (("ftp://127.0.0.1:1/x", tmp_path / "held"), 2, "cannot open ftp://127.0.0.1:1/x"),
        ((store, ""), 2, "an empty location: give a directory"),
    ]
    for arguments, code, message in cases:
        assert exit_code("pull", *arguments) == code
        shown = capsys.readouterr().err
        assert shown.startswith("rosemux: ")
        assert message in shown
    for shard in store.glob("*/*.safetensors"):
        shard.write_bytes(b"garbage")
    assert exit_code("pull", store, tmp_path / "held") == 1


def test_an_interrupt_while_it_watches_is_no_error_of_ours(
    published: Store,
    tmp_path: Path,
    states: tuple[State, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Between two looks: a torn LATEST is reported once, a new version is taken, then Ctrl-C."""
    store, _ = published
    latest = (store / "LATEST").read_bytes()
    looks = 0

    def look(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks <= 2:
            (store / "LATEST").write_bytes(b"weight_")
        elif looks == 3:
            (store / "LATEST").write_bytes(latest)
            with Publisher(store) as publisher:
                publisher.publish(states[8])
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("weightsync.command.time.sleep", look)
    assert exit_code("pull", store, tmp_path / "held", "--watch") == 130
    shown = capsys.readouterr()
    assert "version 8," in shown.out
    assert "version 9," in shown.out
    assert shown.err.count("trying again") == 1


@pytest.mark.parametrize("seconds", ["inf", "1e300", "nan", "0"])
def test_a_pause_that_no_clock_can_measure_is_refused(
    published: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    assert exit_code("pull", published[0], tmp_path, "--watch", "--every", seconds) == 2
    assert "--every" in capsys.readouterr().err


def test_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    assert "pull" in capsys.readouterr().out
