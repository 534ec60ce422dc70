"""The engine that the contract suite talks to: the fake always, a real vLLM under its marker."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_FAKE = Path(__file__).parents[2] / "integration" / "fake_engine.py"


@pytest.fixture(scope="module")
def fake_engine_url() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(_FAKE)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.engine)])
def engine_url(request: pytest.FixtureRequest) -> str:
    """`real_engine_url` comes from the session-wide fixture of the engine tests."""
    if request.param == "fake":
        return str(request.getfixturevalue("fake_engine_url"))
    try:
        return str(request.getfixturevalue("real_engine_url"))
    except pytest.FixtureLookupError:
        pytest.skip("no fixture 'real_engine_url' starts a real engine here")
