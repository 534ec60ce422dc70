"""Processes that a part has started, ended in steps that grow harsher."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

_PATIENCE_S = 5.0


async def ended(process: asyncio.subprocess.Process, *ways: Callable[[], object]) -> None:
    """Each way in turn while the process lives, at last a kill; each has some seconds to work."""
    for end in (*ways, process.kill):
        if process.returncode is None:
            with suppress(ProcessLookupError):
                end()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await process.wait()
