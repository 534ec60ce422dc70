"""`rosemux phases`: the phase control of one machine, and how it stands."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from scheduler.phases.wire import JobStatus

phases = typer.Typer(add_completion=False, no_args_is_help=True)
_Socket = Annotated[Path, typer.Option(help="The control's Unix socket.")]
_Seconds = Annotated[float, typer.Option(help="See the settings in docs/phases.md.")]


@phases.callback()
def _phases() -> None:
    """Who of several jobs runs which phase on which node: serve it, and look at it."""


@phases.command()
def serve(
    socket: _Socket,
    state: Annotated[
        Path | None, typer.Option(help="SQLite file; without it a restart forgets.")
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Directory for the journal of decisions.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Loopback port for Prometheus; none opens none."),
    ] = None,
    lease_s: _Seconds = 10.0,
    patience_s: _Seconds = 0.25,
    warn_s: _Seconds = 30.0,
    grace_s: _Seconds = 30.0,
) -> None:
    """Run the phase control until SIGTERM or SIGINT."""
    import msgspec

    from harvester.contracts.errors import ConfigError
    from scheduler.phases.service import serve as served
    from scheduler.policy.phases.terms import PermitsConfig

    settings: dict[str, Any] = {
        "lease_s": lease_s,
        "patience_s": patience_s,
        "warn_s": warn_s,
        "grace_s": grace_s,
    }
    try:
        config = msgspec.convert(settings, PermitsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    asyncio.run(served(socket, config, state=state, journal=journal, metrics_port=metrics_port))


@phases.command()
def status(
    socket: _Socket,
    as_json: Annotated[bool, typer.Option("--json", help="As the control says it.")] = False,
) -> None:
    """Show every job: its phase, its stage, what it holds and what it waits for."""
    from rich.console import Console

    from scheduler.phases.socket_control import SocketControl

    jobs = SocketControl(socket).jobs()
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(jobs).decode())
    else:
        Console().print(_table(jobs))


def _table(jobs: "tuple[JobStatus, ...]") -> "Table":
    from rich.table import Table

    table = Table("job", "phase", "stage", "holds", "waits for", "complete", "failures")
    for job in jobs:
        table.add_row(
            job.job,
            "" if job.kind is None else job.kind,
            f"{job.stage}, warned" if job.warned else job.stage,
            " ".join(job.nodes),
            " ".join(job.awaits),
            f"{job.complete_ratio:.0%}" if job.nodes else "",
            str(job.failures or ""),
        )
    return table
