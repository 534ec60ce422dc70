"""Witnesses beside the products: copies of grants, the guest's tokens, memory, files and disk.

Reads pages by files of its own, /proc and folders; asks no product anything.
"""

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.agent.evidence import GrantSeen, grant_on
from harvester.contracts.clock import Clock, monotonic_ns
from harvester.contracts.page import PAGE_BYTES, PageDirectory, PageName
from harvester.contracts.process import family
from tests.soak.node import SoakNode
from tests.soak.processes import PartSupervisor
from tests.soak.records import DiskSample, GrantSpan, LendingSample, MemorySample, Sink

FILLER = "fill"
_GRANT_S = 0.04
_LENDING_S = 2.0
_MEMORY_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


class GrantSpans:
    """Joins the grants of one page to spans; each is a record once another grant follows."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._span: GrantSpan | None = None

    @property
    def latest(self) -> GrantSpan | None:
        return self._span

    def add(self, seen: GrantSeen) -> None:
        grant, span = seen.grant, self._span
        key = (grant.epoch, grant.mode.value, grant.withheld)
        since_s = seen.stamp_s
        if span is not None and key == (span.epoch, span.mode, span.withheld):
            since_s = span.first_s
        else:
            self.close()
        self._span = GrantSpan(
            epoch=grant.epoch,
            mode=grant.mode.value,
            reason=grant.reason,
            withheld=grant.withheld,
            first_s=since_s,
            last_s=seen.stamp_s,
            expires_s=seen.expires_s,
        )

    def close(self) -> None:
        if self._span is not None:
            self._sink(self._span)
        self._span = None


class GrantWitness:
    """Copies a grant page from a thread of its own, more often than it is written."""

    def __init__(self, page: Path, sink: Sink) -> None:
        self.spans = GrantSpans(sink)
        self._page, self._last = page, b""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.spans.close()

    def _run(self) -> None:
        while not self._stopped.wait(_GRANT_S):
            try:
                page = self._page.read_bytes()[:PAGE_BYTES]
            except OSError:
                continue
            if page != self._last:
                self._last = page
                seen = grant_on(page, "slot", seen_s=monotonic_ns() * 1e-9)
                if seen is not None:
                    self.spans.add(seen)


class Sampler:
    """Samples while its tasks run: `lending` each two seconds, `sizes` each ten."""

    def __init__(self, node: SoakNode, parts: PartSupervisor, clock: Clock, sink: Sink) -> None:
        self._node, self._parts, self._clock, self._sink = node, parts, clock, sink
        self._pages = PageDirectory(node.pages)
        self.grown_s = clock.now()
        """When the guest's tokens were last seen to grow."""

    async def lending(self) -> None:
        before = await asyncio.to_thread(self._cpu_s)
        before_s, last = self._clock.now(), None
        while True:
            await asyncio.sleep(_LENDING_S)
            tokens = self._tokens()
            if tokens and tokens != last:
                self.grown_s = self._clock.now()
            last = tokens
            now, now_s = await asyncio.to_thread(self._cpu_s), self._clock.now()
            took_s = [new - old for new, old in zip(now, before, strict=True)]
            room_s = (now_s - before_s) * (os.cpu_count() or 1)
            foreign = max(0.0, took_s[0] - max(0.0, took_s[1])) / room_s
            before, before_s = now, now_s
            self._sink(LendingSample(at_s=now_s, tokens_total=tokens, foreign_ratio=foreign))

    async def sizes(self) -> None:
        while True:
            await asyncio.sleep(_MEMORY_S)
            await asyncio.to_thread(self._sizes)

    def _tokens(self) -> int | None:
        reader = self._pages.guest_reader()
        try:
            record = reader.read_left().record
        finally:
            reader.close()
        return None if record is None else record.tokens_total

    def _cpu_s(self) -> tuple[float, float]:
        """Processor time of the machine, and of the soak's own living processes."""
        times = psutil.cpu_times()
        all_s = times.user + times.nice + times.system
        own = [os.getpid(), *(pid for name in self._parts.parts for pid in self._known(name))]
        return all_s, sum(map(_cpu_s_of, own))

    def _known(self, name: str) -> tuple[int, ...]:
        """Without a look through all processes, as it is done every other second."""
        process = self._parts.parts[name].process
        with suppress(OSError):
            return () if process is None else family(process.pid)
        return ()

    def _sizes(self) -> None:
        for name, part in self._parts.parts.items():
            pids, now_s = self._known(name), self._clock.now()
            rss = [_rss_bytes(pid) for pid in pids]
            if not pids or not all(rss) or part.ready_s is None:
                continue
            self._sink(
                MemorySample(
                    part=name,
                    pid=self._parts.parts[name].process_id,
                    at_s=now_s,
                    age_s=now_s - part.since_s,
                    rss_bytes=sum(rss),
                    fds=sum(map(_descriptors, pids)),
                )
            )
        folders = {"agent state": self._node.agent_state, "gateway state": self._node.gateway_state}
        for name, folder in folders.items():
            size = sum(_size(path) for path in folder.rglob("*") if path.name != FILLER)
            self._sink(DiskSample(folder=name, at_s=self._clock.now(), bytes=size))


def grant_page(node: SoakNode) -> Path:
    return node.pages / PageName.GRANT


def _cpu_s_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - thousands, each second
    except OSError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
