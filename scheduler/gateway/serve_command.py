"""`rosemux gateway`: the gateway process from its configuration file to its last open turn."""

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from aiohttp import web

    from scheduler.gateway.settings import GatewaySettings
    from scheduler.gateway.tenants import Tenants


def gateway(
    config: Annotated[Path, typer.Option(help="YAML or JSON file with the gateway's settings.")],
    check_config: Annotated[bool, typer.Option(help="Check the file and stop.")] = False,
) -> None:
    """Run the rollout gateway with its scheduler."""
    import uvloop

    from scheduler.gateway.settings import load_settings
    from scheduler.gateway.tenants import Tenants

    settings = load_settings(config)
    tenants = Tenants.load(settings.token_file)
    if check_config:
        typer.echo(f"{config} is good: {len(settings.engines)} engines, {len(settings.jobs)} jobs")
        return
    # State and journals hold the ids of leases, with which every reader could end them.
    os.umask(0o077)
    uvloop.run(serve(settings, tenants))


async def serve(settings: "GatewaySettings", tenants: "Tenants") -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError if the port is taken."""
    import aiohttp
    from aiohttp import web

    from harvester.contracts.clock import MonotonicClock
    from harvester.contracts.errors import ConfigError
    from scheduler.gateway.gateway import Gateway
    from scheduler.gateway.scheduler import Scheduler
    from scheduler.gateway.state import SchedulerState

    clock = MonotonicClock()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    state = SchedulerState(settings.state_file)
    # Shorter than the 5 s after which an engine closes an idle connection: a request that meets the
    # closing would look like a lost engine.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        scheduler = Scheduler(settings, clock, state, session)
        front = Gateway(scheduler, settings, tenants, clock)
        runner = web.AppRunner(
            front.app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0
        )
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
                "set another 'port', 0 takes a free one"
            ) from error
        await scheduler.start()
        typer.echo(f"listening on {_address(runner)}")
        failed = asyncio.create_task(scheduler.failed())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        finally:
            failed.cancel()
            stopped.cancel()
            front.close()
            scheduler.runner.close()
            await runner.cleanup()
            await scheduler.close()


def _address(runner: "web.AppRunner") -> str:
    host, port = runner.addresses[0][:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
