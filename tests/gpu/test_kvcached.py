"""Two engines' KV in pages of one GPU: what each has mapped, what a smaller budget gives back."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from coserve.vllm.launch import SEGMENT_VARIABLE
from harvester.agent.shared_memory import SegmentPair
from harvester.contracts.clock import MonotonicClock
from harvester.platform.kv_segment import KvSegment, KvUse
from tests.gpu.child import Child
from tests.gpu.conftest import ON_A_GPU, need_cuda
from tests.gpu.kvcached_child import PER_BLOCK

MODULE = "tests.gpu.kvcached_child"
BLOCKS = {"fake": 256, "cuda": 4096}
"""32 pages of each layer's keys and values in either."""
TAKEN_PAGES, CACHED_PAGES = 6, 8
_SOON_S, _STEADY_S = 10.0, 0.2


def need_kvcached() -> None:
    need_cuda()
    for name, what in (
        ("kvcached", "kvcached is not installed here"),
        ("kvcached._C", "kvcached is here without its compiled half"),
        ("vllm", "vLLM is not installed here"),
    ):
        if find_spec(name) is None:
            pytest.skip(what)


@dataclass
class Engine:
    child: Child
    segment: KvSegment
    blocks_per_page: int
    bundle_bytes: int

    @property
    def page_tokens(self) -> int:
        return self.blocks_per_page * PER_BLOCK

    def use(self) -> KvUse:
        use = self.segment.read()
        assert use is not None
        return use

    def settled(self) -> tuple[KvUse, int]:
        """Its use and the device's free memory, once kvcached maps nothing more ahead."""
        clock = MonotonicClock()
        until_s = clock.now() + _SOON_S
        seen, last = self._seen(), None
        while seen != last and clock.now() < until_s:
            last = seen
            time.sleep(_STEADY_S)
            seen = self._seen()
        return seen

    def _seen(self) -> tuple[KvUse, int]:
        return self.use(), int(self.child.ask("say")["free_bytes"])


@pytest.fixture(params=["fake", pytest.param("cuda", marks=ON_A_GPU)])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """Production and guest."""
    if request.param == "cuda":
        need_kvcached()
    found: list[Engine] = []
    try:
        for role in ("production", "guest"):
            segment = KvSegment(f"rosemux_{role}_{os.getpid()}")
            child = Child(request.param, {SEGMENT_VARIABLE: segment.path.name}, module=MODULE)
            found.append(Engine(child, segment, 0, 0))
            said = child.ask("start", BLOCKS[request.param])
            found[-1].blocks_per_page = said["blocks_per_page"]
            found[-1].bundle_bytes = said["bundle_bytes"]
        yield found[0], found[1]
    finally:
        for engine in found:
            engine.child.end()
            engine.segment.path.unlink(missing_ok=True)


def within_limit(engine: Engine) -> None:
    """kvcached maps and unmaps beside its calls."""
    clock = MonotonicClock()
    until_s = clock.now() + _SOON_S
    while (use := engine.use()).mapped_bytes > use.limit_bytes and clock.now() < until_s:
        pass
    assert use.mapped_bytes <= use.limit_bytes


def test_each_engine_s_segment_says_what_it_has_mapped(engines: tuple[Engine, Engine]) -> None:
    production, guest = engines
    before, free_bytes = guest.settled()
    guest.child.ask("take", TAKEN_PAGES * guest.blocks_per_page)
    after, left_bytes = guest.settled()
    taken, bundle = after.used_bytes - before.used_bytes, guest.bundle_bytes
    assert (TAKEN_PAGES - 1) * bundle <= taken <= (TAKEN_PAGES + 1) * bundle
    mapped = after.mapped_bytes - before.mapped_bytes
    assert abs(free_bytes - left_bytes - mapped) <= bundle, "it is memory of the device"
    shared = SegmentPair((production.segment,), guest.segment, total_bytes=1 << 40)
    reading = shared.read()
    assert reading.used_bytes == production.use().mapped_bytes + guest.use().mapped_bytes
    assert shared.read_guest().mapped_bytes == guest.use().mapped_bytes


def test_half_of_the_budget_takes_cached_prefixes_from_the_device(
    engines: tuple[Engine, Engine],
) -> None:
    production, guest = engines
    production.child.ask("take", TAKEN_PAGES * production.blocks_per_page)
    guest.child.ask("take", TAKEN_PAGES * guest.blocks_per_page)
    guest.child.ask("cache", CACHED_PAGES * guest.blocks_per_page)
    before, free_bytes = guest.settled()
    budget = (TAKEN_PAGES + CACHED_PAGES) // 2 * guest.page_tokens
    assert guest.child.ask("keep", budget)["missing"] == 0
    within_limit(guest)
    after, left_bytes = guest.settled()
    given_back = before.mapped_bytes - after.mapped_bytes
    assert given_back >= (CACHED_PAGES // 2 - 1) * guest.bundle_bytes
    assert abs(left_bytes - free_bytes - given_back) <= guest.bundle_bytes
    said = guest.child.ask("say")
    assert said["tokens_total"] - said["tokens_withheld"] <= budget
    production.child.ask("take", guest.blocks_per_page)


def test_memory_of_requests_is_missing_until_they_end(engines: tuple[Engine, Engine]) -> None:
    _, guest = engines
    guest.child.ask("take", TAKEN_PAGES * guest.blocks_per_page)
    missing = guest.child.ask("keep", guest.page_tokens)["missing"]
    assert missing >= (TAKEN_PAGES - 2) * guest.page_tokens
    assert guest.use().limit_bytes <= 3 * guest.bundle_bytes, "all can see what it may have"
    guest.child.ask("give")
    assert guest.child.ask("keep", guest.page_tokens)["missing"] == 0
    within_limit(guest)
    guest.child.ask("keep", "all")
    guest.child.ask("take", TAKEN_PAGES * guest.blocks_per_page)
