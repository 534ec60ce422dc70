"""The environment variables by which a vLLM process learns of its slot."""

from collections.abc import Callable
from pathlib import Path

import pytest

SetRole = Callable[[str, Path], None]


@pytest.fixture
def set_role(monkeypatch: pytest.MonkeyPatch) -> SetRole:
    def set_it(role: str, pages: Path) -> None:
        monkeypatch.setenv("ROSEMUX_ROLE", role)
        monkeypatch.setenv("ROSEMUX_ENGINE", "prod")
        monkeypatch.setenv("ROSEMUX_PAGE_DIR", str(pages))

    return set_it
