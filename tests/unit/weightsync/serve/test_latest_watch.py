"""However many wait for a store's next version, one question is asked."""

import asyncio
from pathlib import Path
from threading import Event

import pytest

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import Exhausted
from weightsync.serve.served_stores import LatestWatch, SourceStores
from weightsync.transport.directory import DirectorySource
from weightsync.transport.location import StoreRoot


class Upstream:
    """LATEST that a test moves; `held` are questions that wait for a change."""

    def __init__(self) -> None:
        self.value: bytes | None = b"1"
        self.changed, self.asked = asyncio.Event(), asyncio.Event()
        self.held = 0
        self.failing = self.cut = False

    async def ask(self, known: bytes | None, wait_s: float) -> bytes | None:
        if self.failing:
            raise Exhausted("upstream is gone")
        if wait_s and known == self.value:
            self.held += 1
            self.asked.set()
            await self.changed.wait()
            if self.cut:
                raise Exhausted("upstream went away")
        return self.value


async def test_one_upstream_request_serves_all_waiters() -> None:
    upstream = Upstream()
    watch = LatestWatch(upstream.ask, MonotonicClock())
    waiting = [asyncio.create_task(watch.after(b"1", 30.0)) for _ in range(20)]
    await upstream.asked.wait()
    upstream.value = b"2"
    upstream.changed.set()
    assert await asyncio.gather(*waiting) == [b"2"] * 20
    assert upstream.held == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_a_late_caller_waits_for_the_answer_under_way(fails: bool) -> None:
    """The version's files may come with it, which would cross the link once more beside it."""
    upstream = Upstream()
    watch = LatestWatch(upstream.ask, MonotonicClock())
    waiting = asyncio.create_task(watch.after(b"1", 30.0))
    await upstream.asked.wait()
    upstream.value = b"2"
    late = asyncio.create_task(watch.after(b"1", 30.0))
    assert await watch.after(b"1", 0.0) == b"2"
    for _ in range(10):
        await asyncio.sleep(0)
    assert not late.done()
    upstream.cut = fails
    upstream.changed.set()
    assert await late == b"2"
    await asyncio.wait({waiting})
    assert (waiting.exception() is not None) == fails


async def test_a_caller_with_an_old_version_does_not_wait() -> None:
    upstream = Upstream()
    watch = LatestWatch(upstream.ask, MonotonicClock())
    assert await watch.after(b"0", 30.0) == b"1"
    assert await watch.after(None, 30.0) == b"1"
    assert upstream.held == 0


async def test_waiting_ends_with_what_was_known() -> None:
    upstream = Upstream()
    watch = LatestWatch(upstream.ask, MonotonicClock())
    assert await watch.after(b"1", 0.01) == b"1"
    upstream.changed.set()


async def test_a_failing_upstream_fails_its_callers() -> None:
    upstream = Upstream()
    upstream.failing = True
    with pytest.raises(Exhausted):
        await LatestWatch(upstream.ask, MonotonicClock()).after(b"1", 5.0)


class HeldSource(DirectorySource):
    """A store whose next LATEST never comes."""

    def __init__(self, root: Path, ended: Event) -> None:
        super().__init__(root)
        self._ended = ended

    def latest(self, known: bytes | None = None, *, wait_s: float = 0.0) -> bytes | None:
        if wait_s:
            self._ended.wait(600)
        return b"weight_v000001"

    def directories(self) -> frozenset[str]:
        return frozenset({"weight_v000001"})


async def test_readers_that_wait_at_many_stores_delay_no_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, root = Event(), StoreRoot(tmp_path)
    monkeypatch.setattr(root, "store", lambda _: HeldSource(tmp_path, ended))
    served = SourceStores(root)
    waiting = [
        asyncio.create_task(served.latest(f"job-{number}", b"weight_v000001", wait_s=600.0))
        for number in range(40)
    ]
    try:
        await asyncio.sleep(0.2)
        async with asyncio.timeout(30):
            assert await served.directories("job-0") == ("weight_v000001",)
    finally:
        ended.set()
        for task in waiting:
            task.cancel()
        await served.close()


class ClosableSource(DirectorySource):
    closed = False

    def close(self) -> None:
        self.closed = True


async def test_requests_for_many_names_end_no_reader_s_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names come from clients: a tenant of `job-a-*` may ask for any number of them."""
    root = StoreRoot(tmp_path)
    monkeypatch.setattr(root, "store", lambda _: ClosableSource(tmp_path))
    served = SourceStores(root)
    first = served.store("job-a").source
    for number in range(2000):
        served.store(f"job-b-{number}")
    assert isinstance(first, ClosableSource)
    assert not first.closed
    last = served.store("job-b-1999").source
    await served.close()
    assert isinstance(last, ClosableSource)
    assert last.closed
