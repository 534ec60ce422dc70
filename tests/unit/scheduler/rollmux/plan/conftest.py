from pathlib import Path

import pytest


@pytest.fixture
def repository_examples() -> Path:
    return Path(__file__).parents[5] / "examples"
