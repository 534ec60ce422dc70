"""A service's reports to systemd."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.contracts.clock import MonotonicClock
from harvester.platform.systemd import BEATS, reporting


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The end at which systemd reads."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield receiver


def reports(manager: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(256).decode())
        except BlockingIOError:
            return found


def test_a_service_reports_ready_then_beats_and_its_stop_last(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    said: list[str] = []
    clock = MonotonicClock()

    async def serve() -> float:
        began_s = clock.now()
        async with reporting(), asyncio.timeout(30):
            while len(said) < 4:
                said.extend(reports(manager))
                await asyncio.sleep(0.01)
        served_s = clock.now() - began_s
        await asyncio.sleep(0.1)
        return served_s

    served_s = asyncio.run(serve())
    ready, *beats, stopping = said + reports(manager)
    assert (ready, stopping) == ("READY=1", "STOPPING=1")
    assert {*beats} == {"WATCHDOG=1"}
    assert 3 <= len(beats) <= 1 + BEATS * served_s / 0.2


def test_a_loop_that_stands_still_beats_no_more(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "40000")

    async def stand_still() -> None:
        async with reporting():
            reports(manager)
            with socket.socket() as other, socket.create_server(("127.0.0.1", 0)) as server:
                other.connect(server.getsockname())
                other.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    other.recv(1)
            assert reports(manager) == []

    asyncio.run(stand_still())


def test_without_a_watchdog_nothing_beats(manager: socket.socket) -> None:
    async def serve() -> None:
        async with reporting():
            await asyncio.sleep(0.05)

    asyncio.run(serve())
    assert reports(manager) == ["READY=1", "STOPPING=1"]
