"""The processes of a node's parts, started and restarted as systemd would by the units.

A part's processes carry a mark in their environment, which stands for the control group of a unit:
when the first of them ends, the others are killed, and after the unit's delay it is started again.
Ends with status 2 are not restarted. Every start and end is a record.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from coserve.guest import isolation
from harvester.contracts.clock import Clock
from harvester.contracts.errors import ConfigError
from harvester.contracts.process import family
from harvester.platform.parent import end_with
from tests.soak.node import PartCommand
from tests.soak.parts import GUEST, PRODUCTION
from tests.soak.records import Life, Note, Sink, Struck

MARK = "ROSEMUX_SOAK"
_POLL_S = 0.1
_TERM_S = 90.0
"""`TimeoutStopSec` of the guest's unit, the longest."""
_GONE_S = 60.0
_START_S = 900.0
"""A guest starts with what all others leave of its core."""
_GIVES_UP = 2
"""`RestartPreventExitStatus` of every unit."""


@dataclass(slots=True)
class RunningPart:
    name: str
    command: PartCommand
    process: subprocess.Popen[bytes] | None = None
    since_s: float = 0.0
    ready_s: float | None = None
    given_up: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def process_id(self) -> int:
        """The first process's; 0 without one."""
        return 0 if self.process is None else self.process.pid

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.ready_s is not None


class PartSupervisor:
    """Use as an async context manager; leaving it ends every part."""

    def __init__(
        self,
        commands: Mapping[str, PartCommand],
        *,
        logs: Path,
        mark: str,
        clock: Clock,
        sink: Sink,
        lift_starts: bool = False,
    ) -> None:
        """`lift_starts`: guests are outside of their idle group until they answer."""
        self.parts = {name: RunningPart(name, command) for name, command in commands.items()}
        self._logs, self._mark, self._clock, self._sink = logs, mark, clock, sink
        self._tasks: list[asyncio.Task[None]] = []
        self._closing, self._lift_starts = False, lift_starts
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str) -> None:
        self._tasks.append(asyncio.create_task(self._run(self.parts[name])))

    async def ready(self, name: str) -> None:
        """Raises ConfigError where the part gives up or does not answer."""
        part, until_s = self.parts[name], self._clock.now() + _START_S
        while not part.is_up:
            if part.given_up or self._clock.now() > until_s:
                raise ConfigError(f"{name} does not start: {self.last_words(name)}")
            await asyncio.sleep(_POLL_S)

    def last_words(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text(errors="replace")[-2000:]

    def pids(self, name: str) -> list[int]:
        """All living processes of a part, its first one at the front."""
        part = self.parts[name]
        first = [part.process.pid] if part.process is not None else []
        others = set(marked(f"{self._mark}.{name}")) - set(first)
        return [*first, *sorted(others)]

    def strike(self, name: str, number: signal.Signals, *, only: int | None = None) -> list[int]:
        """Signals all processes of a part, or one; the pids."""
        struck = []
        for pid in self.pids(name) if only is None else [only]:
            self._sink(Struck(part=name, pid=pid, signal=number, at_s=self._clock.now()))
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                struck.append(pid)
        return struck

    async def close(self) -> None:
        """Asks every part to end, guests and gateway before the agent, production last."""
        self._closing = True
        for name in ("gateway", "guest", "agent", "dedicated", PRODUCTION):
            part = self.parts.get(name)
            if part is not None and part.process is not None:
                self.strike(name, signal.SIGCONT)
                await asyncio.to_thread(_end, part.process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in self.parts:
            await self._end_rest(name)

    async def _run(self, part: RunningPart) -> None:
        while not self._closing:
            self._begin(part)
            assert part.process is not None
            answering = asyncio.create_task(self._answers(part))
            try:
                while (status := part.process.poll()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
            finally:
                answering.cancel()
                self._record_end(part)
            part.process, part.ready_s = None, None
            await self._end_rest(part.name)
            if status == _GIVES_UP or (status == 0 and part.command.only_on_failure):
                part.given_up = True
                text = f"{part.name} ended with {status} and is not started again"
                self._sink(Note(at_s=self._clock.now(), text=text))
                return
            await asyncio.sleep(part.command.restart_s)

    def _begin(self, part: RunningPart) -> None:
        command, parent = part.command, os.getpid()

        def prepare() -> None:
            end_with(parent)
            os.sched_setaffinity(0, {command.core})
            if command.nice:
                os.nice(command.nice)

        marked_as = {MARK: f"{self._mark}.{part.name}"}
        with (self._logs / f"{part.name}.log").open("ab") as log:
            part.process = subprocess.Popen(
                command.arguments,
                env={**os.environ, **command.environment, **marked_as},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                # Runs before any thread of the child; it only makes system calls.
                preexec_fn=prepare,  # noqa: PLW1509
            )
        part.since_s, part.attributes = self._clock.now(), {}

    async def _answers(self, part: RunningPart) -> None:
        url = part.command.url + part.command.health
        lifted = self._lift_starts and part.name == GUEST
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while part.ready_s is None:
                if lifted:
                    lift_guest(part.process_id)
                with suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(url) as reply:
                        if reply.status == 200:
                            part.ready_s = self._clock.now()
                await asyncio.sleep(_POLL_S)
        if lifted:
            isolate_guest(part.process_id)
        assert part.process is not None
        part.attributes = attributes_of(part.process.pid)

    def _record_end(self, part: RunningPart) -> None:
        assert part.process is not None
        self._sink(
            Life(
                part=part.name,
                pid=part.process.pid,
                since_s=part.since_s,
                ready_s=part.ready_s,
                until_s=self._clock.now(),
                status=part.process.poll(),
                asked=self._closing,
                changed=self.changed(part),
            )
        )

    def changed(self, part: RunningPart) -> tuple[str, ...]:
        if part.name != PRODUCTION or part.process is None or part.process.poll() is not None:
            return ()
        now = attributes_of(part.process.pid)
        return tuple(name for name, value in part.attributes.items() if now[name] != value)

    async def _end_rest(self, name: str) -> None:
        """Kills what is left of a part, and waits for it as a unit does before its restart: in an
        idle group the end of a process waits for a core too."""
        until_s = self._clock.now() + _GONE_S
        while (left := marked(f"{self._mark}.{name}")) and self._clock.now() < until_s:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_TERM_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def lift_guest(head: int) -> None:
    """Takes the processes of a guest that starts out of its idle group or class."""
    with suppress(OSError, psutil.Error):
        for pid in family(head):
            isolation.lift_from_process(pid)


def isolate_guest(head: int) -> None:
    with suppress(OSError, psutil.Error):
        for pid in family(head):
            isolation.apply_to_process(isolation.choose(), pid, guest=head)


def marked(mark: str) -> list[int]:
    """Living processes whose environment has the mark, or one that goes on behind a dot."""
    sought, found = f"{MARK}={mark}".encode(), []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(word == sought or word.startswith(sought + b".") for word in words):
                found.append(pid)
    return found


def end_strays() -> None:
    """Kills what a soak has left that was itself killed: a guest in an idle group ends late where
    the machine is full."""
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error, ValueError):
            words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            for word in words:
                if word.startswith(f"{MARK}="):
                    soak = int(word.removeprefix(f"{MARK}=").split(".")[0])
                    if not psutil.pid_exists(soak):
                        os.kill(pid, signal.SIGKILL)


def attributes_of(pid: int) -> dict[str, Any]:
    """Kernel attributes by which an attempt on a process would show; None for one that is gone."""
    found: dict[str, Any] = {}
    for name, read in (
        ("nice", lambda: os.getpriority(os.PRIO_PROCESS, pid)),
        ("class", lambda: os.sched_getscheduler(pid)),
        ("cores", lambda: sorted(os.sched_getaffinity(pid))),
        ("control groups", lambda: Path(f"/proc/{pid}/cgroup").read_text()),
        ("OOM score", lambda: Path(f"/proc/{pid}/oom_score_adj").read_text()),
    ):
        try:
            found[name] = read()
        except OSError:
            found[name] = None
    return found
