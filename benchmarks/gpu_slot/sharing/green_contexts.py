"""Green contexts: production and guest in one process, each on multiprocessors of its own.

Not a backend of RoseMux: it would put the guest into production's process. Measured to know what a
partition of the multiprocessors is worth beside turns and MPS. "Alone" is production on its own
part: what the partition itself costs is seen in `production_form_ms` against the other backends'.
The CPU has none; there both run as threads of one process.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_slot.engines.children import engine
from benchmarks.gpu_slot.engines.orders import EngineSetting
from benchmarks.gpu_slot.results import Put, under
from benchmarks.gpu_slot.sharing.pair import REHEARSED, SHORT, Sharing
from benchmarks.testbed.slot import SLOT
from harvester.contracts.page import PageDirectory

GUEST_RATIOS = (0.25,)


def measured(kind: str, *, tiny: bool, put: Put) -> None:
    for ratio in GUEST_RATIOS:
        with TemporaryDirectory(prefix="rosemux-", dir="/dev/shm") as root:
            pages = PageDirectory.create(Path(root, SLOT))
            asyncio.run(_measure(kind, tiny, ratio, pages, put))


async def _measure(kind: str, tiny: bool, ratio: float, pages: PageDirectory, put: Put) -> None:
    sizes = REHEARSED if tiny else SHORT
    setting = EngineSetting(
        kind=kind,
        tiny=tiny,
        pages=str(pages.path),
        production=sizes.production,
        guest=sizes.guest,
        partition_ratio=ratio,
    )
    keep = under(f"guest_{ratio:g}", put)
    async with engine(setting, {}) as both:
        keep("multiprocessors", both.ready.multiprocessors)
        await Sharing(both, both, pages, sizes, keep).measure({})
