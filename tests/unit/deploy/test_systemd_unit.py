"""systemd itself judges the unit. It exits 0 on keys that it does not know, so stderr counts."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.check_expressions import DEPLOY

UNIT = DEPLOY / "systemd" / "rosemux-agent.service"

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and os.environ.get("CI") != "true",
    reason="systemd-analyze is not installed",
)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def verify(text: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The program is not installed where the unit expects it, any executable stands in."""
    unit = directory / UNIT.name
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    return analyze("verify", "--man=no", str(unit))


def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    result = verify(UNIT.read_text(), tmp_path)

    assert (result.returncode, result.stderr) == (0, "")


def test_a_misspelt_key_would_be_noticed(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("ProtectSystem=", "ProtectSystme=")

    assert "ProtectSystme" in verify(text, tmp_path).stderr


def test_exposure_stays_below_two_of_ten() -> None:
    result = analyze("security", "--offline=true", "--threshold=20", str(UNIT))

    assert result.returncode == 0, result.stdout


def test_systemd_understands_the_unit_with_its_drop_in(tmp_path: Path) -> None:
    drop_ins = tmp_path / f"{UNIT.name}.d"
    drop_ins.mkdir()
    shutil.copy(DEPLOY / "systemd" / "remote.conf", drop_ins)

    result = verify(UNIT.read_text(), tmp_path)

    assert (result.returncode, result.stderr) == (0, "")
