"""`rosemux phases`: the phase control of one machine, and its status."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

phases = typer.Typer(add_completion=False, no_args_is_help=True)
_Socket = Annotated[Path, typer.Option(help="The control's Unix socket.")]
_TokenFile = Annotated[Path | None, typer.Option(help="Token to send to a control with tenants.")]
_Seconds = Annotated[float, typer.Option(help="Setting of this name in docs/phases.md.")]


@phases.callback()
def _phases() -> None:
    """Run the phase control of jobs that share nodes, and show its state."""


@phases.command()
def serve(
    socket: _Socket,
    state: Annotated[
        Path | None,
        typer.Option(help="SQLite file of the state; without it a restart loses the state."),
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option(help="YAML file of nodes; with it the control places the jobs.")
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Directory for the journal of decisions.")
    ] = None,
    journal_mib: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="Largest size of the journal in MiB.")
    ] = 64,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Loopback port of the metrics; none by default."),
    ] = None,
    tenants: Annotated[
        Path | None, typer.Option(help="YAML file of tenants: each call then needs a token of it.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Group whose users may open the socket too; needs --tenants.")
    ] = None,
    lease_s: _Seconds = 10.0,
    patience_s: _Seconds = 0.25,
    warn_s: _Seconds = 30.0,
    grace_s: _Seconds = 30.0,
) -> None:
    """Run the phase control until SIGTERM or SIGINT."""
    import msgspec

    from harvester.contracts.errors import ConfigError
    from scheduler.rollmux.control.control_settings import ControlSettings
    from scheduler.rollmux.control.nodes_file import read_nodes
    from scheduler.rollmux.control.socket_server import serve as served
    from scheduler.rollmux.permits.terms import PermitsConfig

    permits = PermitsConfig(lease_s=lease_s, patience_s=patience_s, warn_s=warn_s, grace_s=grace_s)
    try:
        permits = msgspec.convert(msgspec.to_builtins(permits), PermitsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    settings = ControlSettings(
        permits=permits,
        cluster=None if nodes is None else read_nodes(nodes),
        state=state,
        journal=journal,
        journal_bytes=journal_mib << 20,
        metrics_port=metrics_port,
    )
    asyncio.run(served(socket, settings, tenants=tenants, group=group))


@phases.command()
def submit(
    jobs: Annotated[Path, typer.Argument(help="YAML file of jobs, as for rosemux plan.")],
    socket: _Socket,
    token_file: _TokenFile = None,
) -> None:
    """Ask a planning control for placements; a known job's present placement is printed."""
    from scheduler.rollmux.cluster.runtime_events import Submit
    from scheduler.rollmux.control.nodes_file import read_specs
    from scheduler.rollmux.control.socket_transport import SocketTransport
    from scheduler.rollmux.control.wire import CallRefused, reply_text

    transport, refused = SocketTransport(socket, token_file=token_file), False
    for given in read_specs(jobs):
        reply = transport.call(Submit(spec=given))
        refused |= isinstance(reply, CallRefused)
        typer.echo(f"{given.job}: {reply_text(reply)}")
    if refused:
        raise typer.Exit(1)


@phases.command()
def forget(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    socket: _Socket,
    token_file: _TokenFile = None,
) -> None:
    """Give up a job's placement for good; its phase, if one runs, loses its permit."""
    from harvester.contracts.errors import ConfigError
    from harvester.contracts.ids import JobId
    from scheduler.rollmux.control.socket_transport import SocketTransport
    from scheduler.rollmux.permits.events import Forget

    transport = SocketTransport(socket, token_file=token_file)
    # The call is accepted for any name: a job's process repeats it without an answer.
    known = any(each.job == job for each in transport.jobs())
    transport.call(Forget(job=JobId(job)))
    if not known:
        raise ConfigError(f"no job {job} at {socket}")


@phases.command()
def node(
    name: Annotated[str, typer.Argument(help="The node's name in the file of nodes.")],
    socket: _Socket,
    failed: Annotated[
        bool, typer.Option("--failed/--back", help="Whether it has failed or is available again.")
    ],
    token_file: _TokenFile = None,
) -> None:
    """Report a failed or repaired node to a planning control."""
    from harvester.contracts.errors import ConfigError
    from harvester.contracts.ids import NodeId
    from scheduler.rollmux.cluster.runtime_events import NodeReport
    from scheduler.rollmux.control.socket_transport import SocketTransport
    from scheduler.rollmux.control.wire import CallRefused

    transport = SocketTransport(socket, token_file=token_file)
    reply = transport.call(NodeReport(node=NodeId(name), failed=failed))
    if isinstance(reply, CallRefused):
        raise ConfigError(reply.reason)


@phases.command()
def status(
    socket: _Socket,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reply as JSON.")] = False,
    token_file: _TokenFile = None,
) -> None:
    """Show every job: its phase, its stage, the nodes it holds and those it waits for."""
    from rich.console import Console

    from scheduler.rollmux.control.socket_transport import SocketTransport

    jobs = SocketTransport(socket, token_file=token_file).jobs()
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(jobs).decode())
    else:
        from scheduler.rollmux.control.printed import printed

        Console().print(printed(jobs))


@phases.command()
def explain(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    journal: Annotated[
        Path | None, typer.Option(help="Directory of the control's journal.")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(help="The control's Unix socket, instead of --journal.")
    ] = None,
    last: Annotated[str, typer.Option(help="Only events of the last 90s, 30m, 24h or 7d.")] = "",
    since: Annotated[
        str, typer.Option(help="Only events from this time on, as 2026-01-31T12:00 (UTC).")
    ] = "",
    permits: Annotated[
        bool, typer.Option("--permits", help="List every permit instead of a summary.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    token_file: _TokenFile = None,
) -> None:
    """Print a job's history: its placements, its moves with their reasons, and the jobs it waited
    for."""
    from harvester.contracts.errors import ConfigError
    from scheduler.rollmux.control.socket_transport import SocketTransport
    from scheduler.rollmux.explain.explanation import explanation, moment

    if (journal is None) == (socket is None):
        raise ConfigError("explain needs --journal DIRECTORY or --socket FILE")
    if socket is not None:
        journal = SocketTransport(socket, token_file=token_file).journal()
    assert journal is not None
    found = explanation(journal, job, since=moment(last=last, since=since), permits=permits)
    if as_json:
        typer.echo(found.encoded())
    else:
        for line in found.lines():
            typer.echo(line)
