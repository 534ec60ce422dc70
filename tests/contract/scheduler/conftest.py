"""The engine that the contract suite talks to: the fake always, a real vLLM under its marker."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_FAKE = Path(__file__).parents[2] / "integration" / "fake_engine.py"


@contextmanager
def _running(*arguments: str) -> Iterator[str]:
    command = [sys.executable, str(_FAKE), "--context", "4096", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture(scope="module")
def fake_engine_url() -> Iterator[str]:
    with _running() as url:
        yield url


@pytest.fixture(scope="module")
def stock_fake_engine_url() -> Iterator[str]:
    """Without coserve's middleware."""
    with _running("--stock") as url:
        yield url


@pytest.fixture(params=["fake", "stock_fake", pytest.param("real", marks=pytest.mark.engine)])
def engine_url(request: pytest.FixtureRequest) -> str:
    """`real_engine_url` comes from the session-wide fixture of the engine tests."""
    if request.param != "real":
        return str(request.getfixturevalue(f"{request.param}_engine_url"))
    try:
        return str(request.getfixturevalue("real_engine_url"))
    except pytest.FixtureLookupError:
        pytest.skip("no fixture 'real_engine_url' starts a real engine here")
