"""The licence that pyproject.toml names is in the tree, and in the wheel."""

import shutil
import subprocess
import sys
from pathlib import Path

from deploy.check_expressions import DEPLOY

ROOT = DEPLOY.parent


def test_the_licence_is_the_whole_text() -> None:
    text = (ROOT / "LICENSE").read_text()

    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
    for part in ("Version 2.0, January 2004", "9. Accepting Warranty", "END OF TERMS"):
        assert part in text


def test_the_wheel_has_it(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('built')"
    (tmp_path / "built").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)

    (about,) = (tmp_path / "built").glob("*.dist-info")
    assert (about / "licenses/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "License-File: LICENSE\n" in (about / "METADATA").read_text()
