"""`rosemux hold`, `drain` and `resume`: orders to stop, through an agent or a gateway."""

import getpass
import socket
from collections.abc import Callable
from typing import Annotated

import typer

from harvester.cli.audit_command import printable
from harvester.cli.server_call import (
    CaFile,
    CertFile,
    KeyFile,
    ServerName,
    TokenToSend,
    call,
    credentials_of,
)
from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.wire.stops import (
    NUMBER_MAX,
    REASON_CHARS_MAX,
    ClusterStopReply,
    StopOrder,
    StopReply,
    StopRequest,
)
from harvester.platform.tls import Credentials

_Agent = Annotated[str, typer.Option("--agent", help="The node's agent.")]
_Gateway = Annotated[str, typer.Option("--gateway", help="The gateway, for --cluster.")]
_Slot = Annotated[str, typer.Option(help="One slot instead of the whole node.")]
_Tenant = Annotated[str, typer.Option(help="One tenant only.")]
_Cluster = Annotated[bool, typer.Option("--cluster", help="Every agent of the gateway.")]
_ClusterOrder = Annotated[
    bool, typer.Option("--cluster-order", help="At this agent alone, lift what gateways ordered.")
]
_Reason = Annotated[str, typer.Option(help="Why, for status, log and journal.")]
AGENT, GATEWAY = "http://127.0.0.1:9711", "http://127.0.0.1:8300"


def _placing(order: StopOrder) -> Callable[..., None]:
    """The command that places an order."""

    def place(
        reason: _Reason,
        agent: _Agent = AGENT,
        slot: _Slot = "",
        tenant: _Tenant = "",
        cluster: _Cluster = False,
        gateway: _Gateway = GATEWAY,
        token_file: TokenToSend = None,
        ca_file: CaFile = None,
        cert_file: CertFile = None,
        key_file: KeyFile = None,
        server_name: ServerName = None,
    ) -> None:
        credentials = credentials_of(token_file, ca_file, cert_file, key_file, server_name)
        _order(_request(order, slot, tenant, reason), agent, gateway, cluster, credentials)

    return place


hold, drain = _placing(StopOrder.HOLD), _placing(StopOrder.DRAIN)


def resume(
    agent: _Agent = AGENT,
    slot: _Slot = "",
    tenant: _Tenant = "",
    cluster: _Cluster = False,
    gateway: _Gateway = GATEWAY,
    reason: _Reason = "",
    cluster_order: _ClusterOrder = False,
    token_file: TokenToSend = None,
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    server_name: ServerName = None,
) -> None:
    credentials = credentials_of(token_file, ca_file, cert_file, key_file, server_name)
    request = _request(StopOrder.NONE, slot, tenant, reason, cluster_order=cluster_order)
    _order(request, agent, gateway, cluster, credentials)


def _request(
    order: StopOrder, slot: str, tenant: str, reason: str, *, cluster_order: bool = False
) -> StopRequest:
    # Lifts the order at one agent, whatever number its gateway gave it.
    number = NUMBER_MAX if cluster_order else 0
    request = StopRequest(
        order=order,
        slot=slot,
        tenant=tenant,
        by=f"{_user()}@{socket.gethostname()}"[:REASON_CHARS_MAX],
        reason=reason.strip()[:REASON_CHARS_MAX],
        cluster=cluster_order,
        number=number,
    )
    try:
        request.check()
    except PeerProtocolError as error:
        raise typer.BadParameter(str(error)) from error
    return request


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unnamed"


def _order(
    request: StopRequest, agent: str, gateway: str, cluster: bool, credentials: Credentials
) -> None:
    if cluster:
        _order_cluster(request, gateway, credentials)
        return
    path = "/v1/stops"
    reply = call(agent, path, StopReply, credentials, option="--agent", body=request)
    _print_order(request, reply, "lease in force", everywhere="node")
    if not reply.recorded:
        raise Exhausted("order in force, but a restart of the agent forgets it: see its log")


def _print_order(
    request: StopRequest, reply: StopReply | ClusterStopReply, what: str, *, everywhere: str
) -> None:
    """`what` is a thing that the order reaches, `everywhere` the scope of an order for all."""
    tenant = request.tenant
    if reply.in_force is None:
        typer.echo("resumed" if reply.lifted else "nothing was stopped in this scope by command")
        for stop in reply.left or ():
            scope = stop.slot or (f"tenant {stop.tenant}" if stop.tenant else everywhere)
            typer.echo(printable(f"still in force, {scope}: {stop.text}"))
        if reply.left == ():
            typer.echo("no order is in force any more")
        return
    typer.echo(printable(f"in force: {reply.in_force.text}"))
    if reply.reached:
        typer.echo(printable(f"reaches: {', '.join(reply.reached)}"))
    elif reply.reached is not None:
        typer.echo(printable(f"reaches no {what}{f' of tenant {tenant}' if tenant else ''}"))
    if tenant and reply.tenants is not None and tenant not in reply.tenants:
        known = ", ".join(reply.tenants) or "none"
        waits = "the order waits for one until you resume it"
        typer.echo(printable(f"no tenant {tenant} is known here (known: {known}): {waits}"))


def _order_cluster(request: StopRequest, gateway: str, credentials: Credentials) -> None:
    """Raises Exhausted if an agent is not known to obey."""
    path = "/v1/stops"
    reply = call(gateway, path, ClusterStopReply, credentials, option="--gateway", body=request)
    _print_order(request, reply, "job", everywhere="cluster")
    for name, fault in reply.agents.items():
        typer.echo(printable(f"  {name}: {fault or 'obeys'}"))
    if missing := [name for name, fault in reply.agents.items() if fault]:
        names = ", ".join(missing)
        raise Exhausted(f"no answer of {names}; the gateway repeats the order every second")
    if not reply.recorded:
        raise Exhausted("order in force, but a restart of the gateway forgets it: see its log")
