"""The agent's scrape of one engine, as a process of its own until it is ended: `URL PAGES`.

Reading a page of metrics takes tens of milliseconds, which the client that measures must not wait
for.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from harvester.agent.engine_probes import MetricsProbe


@asynccontextmanager
async def scraped(url: str, pages: Path) -> AsyncIterator[None]:
    """While its context lasts, once a second."""
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, f"{url}/metrics", str(pages)
    )
    try:
        yield
    finally:
        probe.terminate()
        await probe.wait()


if __name__ == "__main__":
    asyncio.run(MetricsProbe(sys.argv[1], pages=Path(sys.argv[2])).run())
