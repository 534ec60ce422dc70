import asyncio
from collections.abc import Callable, Mapping

import async_solipsism
import pytest

from benchmarks.testbed.production_request import ProductionRequest
from tests.unit.benchmarks.testbed.made_request import made_request


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Virtual time: a sleep of a minute takes none."""
    return {"virtual": async_solipsism.EventLoop}


@pytest.fixture
def request_of() -> Callable[..., ProductionRequest]:
    return made_request
