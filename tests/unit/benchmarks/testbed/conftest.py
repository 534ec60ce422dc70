import asyncio
from collections.abc import Callable, Mapping

import async_solipsism


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Virtual time: a sleep of a minute takes none."""
    return {"virtual": async_solipsism.EventLoop}
