"""The agent's process: the beat, the server, signals and systemd, from start to drain."""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from harvester.agent.engine_probes import MetricsProbe
from harvester.agent.http import application
from harvester.agent.node import RELOADER, NodeAgent
from harvester.agent.slot_loop import Slot
from harvester.config_file import LoadedConfig, read_slots_file, with_slots
from harvester.contracts.clock import MonotonicClock, monotonic_ns, wall_seconds
from harvester.contracts.errors import ConfigError
from harvester.platform.bearer import TokenFile
from harvester.platform.http_kit import listen, serving, stop_event
from harvester.platform.renewed import state_of
from harvester.platform.systemd import BEATS, notify, watchdog_s

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_RETRY_S = 10.0
_UNSEEN = "not looked at yet"
_CONNECTIONS = 256
"""A few gateways and those who look; descriptors beyond belong to the beat."""


class SlotsWatch:
    """When to read the slots file: on a change, and again while it cannot be used."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.in_force = True
        """Whether the file as it is now could be used."""
        self._seen: tuple[int, int, int] | str | None = _UNSEEN
        self._retry_at_s = 0.0
        self._absent_at_s: float | None = None
        self._fault = ""

    @property
    def absent(self) -> bool:
        """Whether a configured file was not there at the last look."""
        return self.path is not None and self._seen is None

    def age_s(self, *, now: float, wall_s: float) -> float:
        """Seconds since the file that was read last was written, or since it was seen absent."""
        if isinstance(self._seen, tuple):
            return max(0.0, wall_s - self._seen[1] * 1e-9)
        return 0.0 if self._absent_at_s is None else now - self._absent_at_s

    def due(self, *, now: float) -> bool:
        """Whether to read the file now; `taken` or `failed` follows."""
        if self.path is None:
            return False
        state = state_of(self.path)
        if state == self._seen and (self.in_force or now < self._retry_at_s):
            return False
        if state != self._seen:
            self._absent_at_s = now if state is None else None
        # Before it is read: a file that changes meanwhile is read again.
        self._seen, self._retry_at_s = state, now + _RETRY_S
        return True

    def read_again(self) -> None:
        """Makes the file due, whatever was read last."""
        self._seen = _UNSEEN

    def taken(self) -> None:
        """Records that the file was usable."""
        self.in_force, self._fault = True, ""

    def failed(self, fault: str) -> bool:
        """Records that the file was not usable; returns whether the fault is new."""
        new, self.in_force, self._fault = fault != self._fault, False, fault
        return new


class AgentProcess:
    """`reload` reads the configuration again; it raises ConfigError for a bad one."""

    def __init__(
        self, loaded: LoadedConfig, *, reload: Callable[[], LoadedConfig], version: str
    ) -> None:
        self._written = loaded
        """The configuration of the agent's file, without the slots of `slots_file`."""
        self._config = loaded.config
        self._reload = reload
        self._slots_file = SlotsWatch(loaded.config.slots_file)
        self._slots_origin = f"slots file {loaded.config.slots_file}"
        self._found: LoadedConfig | None = None
        """The slots file's slots that were usable last."""
        self._retry_at_s = 0.0
        self._notes: tuple[str, ...] = ()
        """Notes and waiting fields as last logged."""
        self._probes: dict[Slot, list[asyncio.Task[None]]] = {}
        self._version = version
        self._clock = MonotonicClock()

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT. Raises ConfigError if the agent cannot start."""
        _log_notes(self._written)
        tokens, operators, observers = (
            None if path is None else TokenFile(path) for path in self._config.http.token_files
        )
        if tokens is None:
            _log.warning("http has no token_file: any caller may take a lease as any tenant")
        node = NodeAgent(self._config, clock=self._clock, version=self._version)
        app = application(node, tokens=tokens, operators=operators, observers=observers)
        async with serving(app, connections=_CONNECTIONS) as runner:
            try:
                # Before the first renewal may come: a lease of each goes on.
                await self._look_for_slots(node)
                while node.slots.waiting:
                    node.slots.open_more()
                node.beat()
                http = self._config.http
                remedy = "choose another with --port"
                url = await listen(runner, http.host, http.port, remedy=remedy, tls=http.tls)
                _log.info("agent %s listens on %s", node.leases.node, url.partition("//")[2])
                stop = stop_event()
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGHUP, self._reconfigure, node)
                probes = [asyncio.create_task(probe) for probe in node.interlocks.probes()]
                probes.append(asyncio.create_task(self._follow_slots(node)))
                notify("READY=1")
                await self._beats(node, stop)
                notify("STOPPING=1")
                self._probe(())
                for probe in probes:
                    probe.cancel()
            finally:
                node.close()

    async def _beats(self, node: NodeAgent, stop: asyncio.Event) -> None:
        due_s, notified_s = self._clock.now(), 0.0
        report_s = watchdog_s() / BEATS or 1.0
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def beat() -> None:
            # A timer's call: a task that waits for each beat takes twice the time of the loop.
            nonlocal due_s, notified_s
            try:
                if not ended.done():
                    self._probe(node.slots)
                    node.beat()
                    now = self._clock.now()
                    if now - notified_s >= report_s:
                        notify("WATCHDOG=1")
                        notified_s = now
                    # A beat that came late is not made up for.
                    due_s = max(due_s + node.beat_s, now)
                    ended.get_loop().call_later(due_s - now, beat)
            except Exception as error:
                ended.set_exception(error)

        stopped = asyncio.create_task(stop.wait())
        stopped.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
        beat()
        await ended

    def _reconfigure(self, node: NodeAgent) -> None:
        """Reload at SIGHUP. A slots file that cannot be used now keeps nothing else from being
        applied: its last good slots stay."""
        notify(f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns() // 1000}")
        # Set in any case; a configuration in force sets it again.
        node.metrics.gauge("config_last_reload_successful").set(0)
        try:
            written = self._reload()
            try:
                found = read_slots_file(written, self._slots_file.path)
                self._slots_file.taken()
                node.refused.pop(self._slots_origin, None)
            except ConfigError as error:
                self._report_slots_file(node, str(error))
                found = self._found
            whole = with_slots(written, found)
            whole.config.check_here()
            self._notes = ()
            self._apply(node, whole, who=RELOADER)
        except ConfigError as error:
            _log.error("configuration not reloaded, the previous one stays in force: %s", error)
            node.refuse_configuration(str(error))
        else:
            self._written, self._found = written, found
        finally:
            notify("READY=1")

    async def _follow_slots(self, node: NodeAgent) -> None:
        """Follows the slots file and opens slots that are not open yet, each second."""
        while True:
            await self._look_for_slots(node)
            await asyncio.sleep(_LOOK_S)

    async def _look_for_slots(self, node: NodeAgent) -> None:
        now = self._clock.now()
        if self._slots_file.due(now=now):
            # In a thread, as the file may be long or its disk slow; the beats go on.
            written, path, there = self._written, self._slots_file.path, self._found is not None
            try:
                found = await asyncio.to_thread(
                    read_slots_file, written, path, may_be_absent=not there
                )
                if written is self._written:
                    self._apply(node, with_slots(written, found), who=self._slots_origin)
                    self._found = found
                    self._slots_file.taken()
                else:
                    self._slots_file.read_again()  # A reload came meanwhile.
            except ConfigError as error:
                self._report_slots_file(node, str(error))
            except Exception as error:
                _log.exception("cannot apply the slots file: the agent goes on without it")
                self._report_slots_file(node, f"agent fault: {type(error).__name__}")
        elif node.slots.waiting or (node.slots.unopened and now >= self._retry_at_s):
            self._retry_at_s = now + _RETRY_S
            node.slots.open_more()
        complete = self._slots_file.in_force and not node.slots.unopened
        node.metrics.gauge("slots_file_in_force").set(complete)
        # A discovery that never wrote one is silent too: a reboot empties /run.
        silent = self._found is None or self._found.discovered
        age_s = self._slots_file.age_s(now=self._clock.now(), wall_s=wall_seconds())
        node.slots_file_age_s = age_s if silent else 0.0
        node.metrics.gauge("slots_file_age_seconds").set(node.slots_file_age_s)
        absent = str(self._slots_file.path) if self._slots_file.absent and not self._found else ""
        if absent and not node.slots_file_absent:
            _log.warning("no slots file at %s yet: its slots open once it is there", absent)
        node.slots_file_absent = absent

    def _report_slots_file(self, node: NodeAgent, fault: str) -> None:
        if self._slots_file.failed(fault):
            _log.error("the slots file is refused, the slots in force stay: %s", fault)
            node.refuse_configuration(fault, who=self._slots_origin)

    def _apply(self, node: NodeAgent, loaded: LoadedConfig, *, who: str) -> None:
        """Raises ConfigError; the configuration in force stays then."""
        done = node.reconfigure(loaded.config, who=who)
        if done.in_force or who == RELOADER:
            _log.info("configuration reloaded, in force: %s", _joined(done.in_force))
        notes = (*loaded.notes, *done.guest_start_needed, *done.restart_needed)
        if notes == self._notes:
            return
        self._notes = notes
        _log_notes(loaded)
        if done.guest_start_needed:
            _log.info("in force at the guest's next start: %s", _joined(done.guest_start_needed))
        if done.restart_needed:
            _log.error("fields that need a restart of the agent: %s", _joined(done.restart_needed))

    def _probe(self, slots: Iterable[Slot]) -> None:
        """Run the probes of these slots, and no others."""
        for slot in self._probes.keys() - {*slots}:
            for task in self._probes.pop(slot):
                task.cancel()
        for slot in slots:
            if slot not in self._probes:
                runs = [slot.guest_description.run()]
                if slot.config.metrics_url is not None:
                    pages = self._config.pages_of(slot.config)
                    runs.append(MetricsProbe(slot.config.metrics_url, pages=pages).run())
                self._probes[slot] = [asyncio.create_task(run) for run in runs]


def _log_notes(loaded: LoadedConfig) -> None:
    for note in loaded.notes:
        _log.warning("configuration: %s", note)


def _joined(fields: tuple[str, ...]) -> str:
    return ", ".join(fields) or "nothing new"
