"""Runs a guest engine that an operator started here, until it ends or is stopped, and cleans up.

The engine has a process group of its own, so that an interrupt at the terminal reaches this process
first: under MPS a signal in the middle of a kernel may crash production's MPS server, so the daemon
ends the guest's GPU work before any signal. It stays in this session, within which the idle class
counts. Processes of the engine that lose their parent become children of this one, whatever group
or session they are in, and are ended with it: an EngineCore keeps its memory when its API server is
killed. If this process is killed, the kernel kills the engine too, except under MPS. The cleanup
removes a segment of shared KV, which would count as memory in use. A requested stop is announced on
a second page, so that it does not count as a lost guest. An engine that fails restarts after waits
that double, as each start costs the host memory, a core, the store's link: systemd 252 restarts at
one pace only.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec
import psutil

from harvester.agent.mps_watch import MpsWatch
from harvester.contracts.clock import Clock, monotonic_ns
from harvester.contracts.doubling import doubled_s
from harvester.contracts.errors import ConfigError, Exhausted, Unsupported
from harvester.contracts.page import Guest, PageDirectory, PageWriter
from harvester.platform.http_kit import stop_event
from harvester.platform.kv_segment import KvSegment
from harvester.platform.parent import adopt_orphans, end_with

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_POLLS, _POLLS_A_KILL = 100, 20
_STOP_S = 30.0
"""vLLM gives its workers five seconds, and a worker may be in a step."""
_LEAVING_TTL_NS = 60_000_000_000
"""Longer than any stop: the page goes when the engine has ended."""
_PLACE_LOOK_S, _PLACE_LOOKS = 1.0, 3
"""Looks in a row that find the engine misplaced before it ends: production that restarts changes
one page after the other."""
MISPLACED = os.EX_TEMPFAIL
"""Exit status of a guest that has to start anew elsewhere, with a configuration read again."""
_FIRST_WAIT_S, _MOST_WAIT_S = 10.0, 600.0
_STEADY_S = 600.0
"""A guest that lived for this long restarts after the first wait again."""


class GuestEngine:
    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        mps: MpsWatch | None = None,
        segment: KvSegment | None = None,
        inherits: Collection[int] = (),
        pages: PageDirectory | None = None,
        misplacement: Callable[[], str] = lambda: "",
        stop_s: float = _STOP_S,
    ) -> None:
        """`environment` is added to this process's; `mps` watches the daemon that the guest runs
        under and is not started here; `inherits` are descriptors that the main process keeps open;
        `pages` is the slot's page directory; `misplacement` gives the reason why the engine must
        not go on where it is."""
        self._arguments = list(arguments)
        self._environment = dict(environment)
        self._mps = mps
        self._segment = segment
        self._inherits = tuple(inherits)
        self._pages = pages
        self._leaving: PageWriter[Guest] | None = None
        self._misplacement = misplacement
        self._misplaced = False
        self._stop_s = stop_s
        self._stop_requested = asyncio.Event()
        self._others: frozenset[psutil.Process] = frozenset()
        """Children of this process that are none of the engine's."""

    def ask_to_stop(self) -> None:
        """Request a stop. A second request sends the signal whatever the MPS daemon replies."""
        self._stop_requested.set()

    @property
    def is_misplaced(self) -> bool:
        """Whether it had to leave its GPU; an engine may exit with `MISPLACED` by itself."""
        return self._misplaced

    async def run(self) -> int:
        """Run the engine and return its exit status, 0 after a requested stop, `MISPLACED` if it
        had to leave its GPU. Raises ConfigError if it cannot start.

        SIGTERM, SIGINT and a terminal that is closed (SIGHUP) ask it to stop. Without a stop it
        returns once no process of the engine lives: a second engine would take memory beside it.
        """
        adopt_orphans()
        self._others = frozenset(psutil.Process().children())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.ask_to_stop)
        try:
            child = await asyncio.create_subprocess_exec(
                *self._arguments,
                env=os.environ | self._environment,
                process_group=0,
                pass_fds=self._inherits,
                preexec_fn=None if self._mps else partial(end_with, os.getpid(), signal.SIGKILL),
            )
        except OSError as error:
            raise ConfigError(f"cannot start {self._arguments[0]}: {error.strerror}") from error
        looking = asyncio.create_task(self._look_at_place())
        stops = await self._until_it_ends(child)
        looking.cancel()
        ended = await self._sweep(stopping=stops > 0)
        if self._leaving is not None:
            if ended:
                self._remove_page()
            self._leaving.close(unlink=ended)
        if self._misplaced:
            return MISPLACED
        status = child.returncode or 0
        return (
            0 if stops or self._stop_requested.is_set() else status if status >= 0 else 128 - status
        )

    async def _until_it_ends(self, child: asyncio.subprocess.Process) -> int:
        """Wait for the engine to end; returns the number of stop requests."""
        requested, stops, patience_s = self._stop_requested, 0, None
        ended = asyncio.create_task(child.wait())
        while not ended.done():
            waiting = asyncio.create_task(requested.wait())
            await asyncio.wait(
                (ended, waiting), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            waiting.cancel()
            if ended.done():
                break
            if requested.is_set():
                requested.clear()
                stops += 1
                self._announce_stop()
                patience_s = self._stop(child, insisted=stops > 1)
            elif patience_s is not None:
                _log.error("the guest did not stop within %.0f s and is killed", self._stop_s)
                patience_s = None
                self._kill()
        return stops

    async def _look_at_place(self) -> None:
        """Ask for a stop once the engine is misplaced."""
        looks = 0
        while not self._misplaced:
            await asyncio.sleep(_PLACE_LOOK_S)
            try:
                why = self._misplacement()
            except Exception:
                _log.exception("the guest's place is not known at this look")
                continue
            looks = looks + 1 if why else 0
            if looks == _PLACE_LOOKS:
                _log.error("the guest ends, to start anew: %s", why)
                self._misplaced = True
                self.ask_to_stop()

    def _announce_stop(self) -> None:
        """Publish the guest's last record with `leaving` set, on another page than the engine's."""
        if self._pages is None or self._leaving is not None:
            return
        left = self._pages.guest_reader().read_left().record
        if left is None:
            return
        try:
            self._leaving = self._pages.leaving_writer()
        except (ConfigError, Exhausted) as error:
            _log.warning("the agent cannot be notified that the guest stops: %s", error)
            return
        record = msgspec.structs.replace(left, leaving=True)
        self._leaving.write(record, now_ns=monotonic_ns(), ttl_ns=_LEAVING_TTL_NS)

    def _remove_page(self) -> None:
        """Remove the page of a killed engine; an engine that ended by itself has removed it."""
        assert self._pages is not None
        with contextlib.suppress(ConfigError, Exhausted):
            self._pages.guest_writer().close(unlink=True)

    def _stop(self, child: asyncio.subprocess.Process, *, insisted: bool) -> float | None:
        """Seconds to wait for the engine that was asked to stop; None if no signal was sent."""
        if insisted or self._may_signal(self._processes()):
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            return self._stop_s
        _log.error(
            "the guest lives on: MPS did not end its work on the GPU, and a signal is unsafe while "
            "a step runs. Close the slot (`hold` in the agent's kill "
            "switch file) and send the request again"
        )
        return None

    async def _sweep(self, *, stopping: bool) -> bool:
        """End the processes that the engine's main process left behind; False for those that live
        on after a stop."""
        poll = 0
        while left := [process.pid for process in self._processes(reap=True)]:
            if poll >= _POLLS and (stopping or self._stop_requested.is_set()):
                return False
            # Under MPS each kill asks the daemon, which may be gone: ask it once in 20 polls only.
            if poll % _POLLS_A_KILL == 0:
                self._kill()
            if poll == _POLLS:
                _log.error(
                    "processes of the guest live on, and no other one starts beside them: %s",
                    ", ".join(map(str, left)),
                )
            await asyncio.sleep(_POLL_S if poll < _POLLS else 10 * _POLL_S)
            poll += 1
        if self._segment is not None:
            try:
                self._segment.remove()
            except Unsupported as error:
                _log.error("the guest's segment is left: %s", error)
        return True

    def _kill(self) -> None:
        processes = self._processes()
        if self._may_signal(processes):
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def _may_signal(self, processes: Collection[psutil.Process]) -> bool:
        return self._mps is None or self._mps.terminate(each.pid for each in processes)

    def _processes(self, *, reap: bool = False) -> list[psutil.Process]:
        """The engine's running (non-zombie) processes. `reap` collects zombies that were adopted:
        a zombie counts as a process of the guest's page."""
        found = []
        for child in set(psutil.Process().children()) - self._others:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child, *child.children(recursive=True)]
        running = []
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
                elif reap:
                    os.waitpid(process.pid, os.WNOHANG)
        return running


def restart_wait(life_s: float, failures: int) -> tuple[float, int]:
    """Seconds until the next start, after a life of `life_s` that ended in failure, and the
    failures in a row with this one; `failures` are those before."""
    failures = 0 if life_s >= _STEADY_S else failures
    return doubled_s(_FIRST_WAIT_S, failures, most_s=_MOST_WAIT_S), failures + 1


async def run_with_restarts(engine: Callable[[], GuestEngine], *, clock: Clock) -> int:
    """Run one engine after the other until one ends without failure or a stop is requested: 0; or
    is misplaced: `MISPLACED`. Raises ConfigError for an engine that cannot be started."""
    failures = 0
    while True:
        began_s = clock.now()
        running = engine()
        status = await running.run()
        if status == 0 or running.is_misplaced:
            return status
        stop = stop_event()
        life_s = clock.now() - began_s
        wait_s, failures = restart_wait(life_s, failures)
        _log.error(
            "the guest ended with status %d after %.0f s; the next one starts in %.0f s",
            status,
            life_s,
            wait_s,
        )
        try:
            await asyncio.wait_for(stop.wait(), wait_s)
        except TimeoutError:
            continue
        return 0
