"""Engines among systemd's units, by the words of systemd 252."""

import subprocess
from pathlib import Path

import pytest

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.discovery.systemd_units import checked_patterns, found_units

START = "ignore_errors=no ; start_time=[Sat 2026-11-28 07:05:29 UTC] ; stop_time=[n/a] ; pid=9"
SHOWN = rf"""ExecStart={{ path=/bin/sleep ; argv[]=/bin/sleep 1000 ; {START} }}
Environment=
Id=plain.service
ActiveState=active

Environment=
Id=absent.service
ActiveState=inactive

ExecStart={{ path=/bin/sh ; argv[]=/bin/sh -c a; b --port=9x serve --port 8001 --log x ; {START} }}
Environment=ROSEMUX_PAGE_DIR=/run/rosemux/slot0 "OTHER=a b" "QUOTE=x\"y" ROSEMUX_SLOT_GPU=GPU-7
Id=vllm@chat.service
ActiveState=active

ExecStart={{ path=/bin/vllm ; argv[]=/bin/vllm serve m --port=8002 ; {START} }}
Environment="UNENDED=x
Id=vllm@slot1.service
ActiveState=activating

Id=vllm@slot2.service
ActiveState=failed
"""


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name which shows the given text."""
    (tmp_path / "shown").write_text(SHOWN)
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\ncat {tmp_path}/shown\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def test_units_that_are_up_have_slots_named_by_their_pages_or_themselves(systemctl: Path) -> None:
    found = found_units(["vllm@*.service", "plain.service"])
    assert [(each.slot, each.port, each.origin) for each in found] == [
        ("plain", "", "unit plain.service"),
        ("slot0", "8001", "unit vllm@chat.service"),
        ("slot1", "8002", "unit vllm@slot1.service"),
    ]
    assert [dict(each.values) for each in found] == [{}, {"gpu": "GPU-7"}, {}]
    asked = (systemctl.parent / "asked").read_text().split()
    assert asked[-3:] == ["--", "vllm@*.service", "plain.service"]


def test_a_unit_that_two_patterns_name_is_one_engine(systemctl: Path) -> None:
    shown = systemctl.parent / "shown"
    shown.write_text(f"{SHOWN}\n{SHOWN}")
    assert len(found_units(["vllm@*.service", "vllm@chat.service"])) == 3


def test_no_unit_is_no_engine(systemctl: Path) -> None:
    (systemctl.parent / "shown").write_text("\n")
    assert found_units(["vllm@*.service"]) == []


def test_a_systemd_that_does_not_answer_is_no_empty_list(systemctl: Path) -> None:
    systemctl.write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    with pytest.raises(Exhausted, match="Failed to connect to bus"):
        found_units(["vllm@*.service"])
    systemctl.unlink()
    with pytest.raises(Exhausted, match="systemctl"):
        found_units(["vllm@*.service"])


def test_a_systemd_that_hangs_is_left_alone(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("systemctl", timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(Exhausted, match="timed out"):
        found_units(["vllm@*.service"])


@pytest.mark.parametrize("pattern", ["", "--property=Id", "a b", "a/b", "a\n"])
def test_an_option_is_no_unit(pattern: str) -> None:
    with pytest.raises(ConfigError, match="--unit"):
        checked_patterns([pattern])
