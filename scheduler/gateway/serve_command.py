"""`rosemux gateway`: the gateway process from its configuration file to its last open turn."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harvester.platform.file_lock import FileLock
    from harvester.platform.tenants import Tenants
    from scheduler.gateway.gateway import Gateway
    from scheduler.gateway.scheduler import Scheduler
    from scheduler.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)

_YOUNG_OBJECTS = 10_000
"""Objects made and not freed between two collections of the youngest: a pause of about 0.5 ms."""

_NEVER = 1 << 30
_QUIET_S = 30.0
"""Period of collections of a gateway without open turns, in s."""
_OVERDUE_S = 300.0
"""Period with open turns, in s: requests leave no cycles, and a collection delays tokens."""


def gateway(
    config: Annotated[Path, typer.Option(help="YAML or JSON file with the gateway's settings.")],
    check_config: Annotated[bool, typer.Option(help="Check the file and stop.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the rollout gateway with its scheduler.

    `rosemux status --gateway URL` shows it."""
    import uvloop

    from harvester.platform.logs import begin_log
    from harvester.platform.tenants import Tenants
    from scheduler.gateway.settings import load_settings

    settings = load_settings(config)
    settings.check_files()
    tenants = Tenants.load(settings.token_file)
    if check_config:
        typer.echo(f"{config} is good: {len(settings.engines)} engines, {len(settings.jobs)} jobs")
        return
    begin_log(log_level)
    # State and journals hold the ids of leases, with which every reader could end them.
    os.umask(0o077)
    uvloop.run(serve(settings, tenants, reload=partial(load_settings, config)))


def _collect_less() -> None:
    """Excludes a started gateway's objects from garbage collection, and makes collections rarer.

    Turns end by reference counts. At Python's own threshold every few of them cause a collection
    that frees almost nothing: a fifth of the time of a busy gateway, and pauses.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, _NEVER)


async def _collect_when_quiet(open_turns: Callable[[], int]) -> None:
    """Collects all objects where no turn is open, or has been for long: beside 16,000 turns that
    stops the event loop for a second, and Python would do it whenever their number grew by a
    quarter."""
    waited_s = 0.0
    while True:
        await asyncio.sleep(_QUIET_S)
        waited_s += _QUIET_S
        if not open_turns() or waited_s >= _OVERDUE_S:
            gc.collect()
            waited_s = 0.0


async def serve(
    settings: "GatewaySettings",
    tenants: "Tenants",
    *,
    reload: "Callable[[], GatewaySettings] | None" = None,
) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP takes over what `reload` reads. Raises ConfigError if
    the port is taken."""
    import aiohttp

    from harvester.contracts.clock import MonotonicClock
    from harvester.platform.http_kit import listen, run_until, serving, stop_event
    from harvester.platform.systemd import reporting
    from scheduler.gateway.gateway import Gateway
    from scheduler.gateway.gateway_state import SchedulerState
    from scheduler.gateway.scheduler import Scheduler

    clock = MonotonicClock()
    stop = stop_event()
    alone = _lock_of(settings.state_file)
    state = SchedulerState(settings.state_file)
    # Shorter than the 5 s after which an engine closes an idle connection: a request that meets the
    # closing would look like a lost engine.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        scheduler = Scheduler(settings, clock, state, session)
        front = Gateway(scheduler, settings, tenants, clock)
        try:
            async with serving(front.app, shutdown_s=5.0) as runner:
                remedy = "set another 'port', 0 takes a free one"
                url = await listen(
                    runner, settings.host, settings.port, remedy=remedy, tls=settings.tls
                )
                await scheduler.start()
                _collect_less()
                typer.echo(f"listening on {url}")
                ledgers = scheduler.ledgers.values()
                collecting = asyncio.create_task(
                    _collect_when_quiet(lambda: sum(map(len, ledgers)))
                )
                if reload is not None and not os.isatty(0):
                    loop = asyncio.get_running_loop()
                    loop.add_signal_handler(signal.SIGHUP, reconfigure, front, scheduler, reload)
                front.open()
                try:
                    async with reporting():
                        await run_until(stop, scheduler.failed())
                finally:
                    collecting.cancel()
                    front.close()
                    scheduler.runner.close()
        finally:
            await scheduler.close()
            if alone is not None:
                alone.close()


def reconfigure(
    front: "Gateway", scheduler: "Scheduler", reload: "Callable[[], GatewaySettings]"
) -> None:
    """A mistake keeps all settings as they are."""
    from harvester.contracts.errors import ConfigError

    try:
        given = reload()
        given.check_files()
    except ConfigError as error:
        _log.error("settings not reloaded, the previous ones stay in force: %s", error)
        return
    agents, waiting = scheduler.reconfigure(given)
    front.open_bodies.most = scheduler.settings.max_open_bytes
    _log.info("settings reloaded, new agents: %s", ", ".join(agents) or "none")
    if waiting:
        _log.error("fields that need a restart of the gateway: %s", ", ".join(waiting))


def _lock_of(state_file: Path | None) -> "FileLock | None":
    """Two gateways on one file would lead the same engines and leases. Raises ConfigError."""
    from harvester.contracts.errors import ConfigError
    from harvester.platform.file_lock import locked

    if state_file is None:
        return None
    taken = f"state_file {state_file}: another gateway runs with it; give each gateway its own"
    try:
        state_file.parent.mkdir(parents=True, exist_ok=True)
        return locked(state_file.with_name(f"{state_file.name}.lock"), taken=taken)
    except OSError as error:
        raise ConfigError(f"cannot lock state_file {state_file}: {error}") from error
