"""`rosemux weights`: stores and local copies of them, from a shell.

`pull` keeps a local checkpoint directory at a version of a store; `serve`, `relay` and `ls` are for
stores over a network.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harvester.contracts.errors import ConfigError, Corrupt, Exhausted, PeerProtocolError, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.reading.memory_budget import STAGING_BYTES

if TYPE_CHECKING:
    from threading import Event

    from weightsync.follower import Follower, Pulled
    from weightsync.layout.names import VersionRef
    from weightsync.serve.composed_versions import Files
    from weightsync.serve.metrics import TransferMetrics
    from weightsync.serve.served_stores import ServedStores
    from weightsync.transport.source import StoreSource

Host = Annotated[
    str, typer.Option(help="Address to listen on; a token file is required unless it is loopback.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]
ReadersTokenFile = Annotated[
    Path | None, typer.Option(help="Tokens, one a line: readers have to send one of them.")
]
TenantsFile = Annotated[
    Path | None, typer.Option("--tenants", help="YAML file of tenants: their tokens and stores.")
]
Cert = Annotated[Path | None, typer.Option(help="TLS certificate chain, PEM.")]
Key = Annotated[Path | None, typer.Option(help="TLS private key, PEM.")]
ClientCa = Annotated[
    Path | None,
    typer.Option(help="Readers need a certificate that one of these signed (mutual TLS)."),
]
Rate = Annotated[float | None, typer.Option("--max-mbit", min=0.001, help="Bandwidth cap, Mbit/s.")]
Transfers = Annotated[
    int,
    typer.Option(
        "--max-transfers",
        min=1,
        help="Largest number of concurrent transfers; more are refused until one ends.",
    ),
]
UpstreamToken = Annotated[
    Path | None, typer.Option(help="File with the token that the server requires.")
]
BaseOption = Annotated[
    Path | None,
    typer.Option(
        "--base-checkpoint",
        help="For stores of slime, miles, stitch or SkyRL: the Hugging Face checkpoint, a "
        "directory, that the trainer started from.",
    ),
]
CaFile = Annotated[Path | None, typer.Option(help="Certificates to trust besides the system's.")]


def serve(
    root: Annotated[
        str, typer.Argument(help="Directory that holds the stores, or s3://BUCKET/PATH.")
    ],
    host: Host = "127.0.0.1",
    port: Port = 9731,
    token_file: ReadersTokenFile = None,
    tenants: TenantsFile = None,
    cert: Cert = None,
    key: Key = None,
    client_ca: ClientCa = None,
    max_mbit: Rate = None,
    max_transfers: Transfers = 64,
    base_checkpoint: BaseOption = None,
    composed_bytes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Largest size of the deltas over several versions that are composed for readers "
            "and kept, in memory and TMPDIR; 0 composes none.",
        ),
    ] = 1 << 30,
) -> None:
    """Serve every store under ROOT over HTTP, by byte ranges."""
    from weightsync.serve.composed_versions import ComposedVersions
    from weightsync.serve.served_stores import SourceStores
    from weightsync.transport.location import StoreRoot

    stores = StoreRoot(root, base_checkpoint=base_checkpoint)

    def served(metrics: "TransferMetrics") -> SourceStores:
        composed = ComposedVersions(_composed, kept_bytes=composed_bytes, metrics=metrics)
        can_compose = composed_bytes > 0 and find_spec("numba") is not None
        return SourceStores(stores, composed if can_compose else None)

    _serve(served, host, port, token_file, tenants, cert, key, client_ca, max_mbit, max_transfers)


def _composed(source: "StoreSource", ref: "VersionRef", closed: "Event") -> "Files":
    # Only now, since servers that compose nothing run without codecs.
    from weightsync.publish.composing import composed_files

    return composed_files(source, ref, closed)


def relay(
    url: Annotated[
        str, typer.Argument(help="http(s)://HOST:PORT of a server or a relay, or s3://BUCKET/PATH.")
    ],
    cache: Annotated[Path, typer.Option(help="Directory for the copies, for this relay alone.")],
    cache_bytes: Annotated[
        int, typer.Option(min=1, help="Largest size of the copies in bytes.")
    ] = 64 << 30,
    streams: Annotated[int, typer.Option(min=1, max=64, help="Ranges to pull at once.")] = 4,
    upstream_token_file: UpstreamToken = None,
    ca_file: CaFile = None,
    host: Host = "127.0.0.1",
    port: Port = 9732,
    token_file: ReadersTokenFile = None,
    tenants: TenantsFile = None,
    cert: Cert = None,
    key: Key = None,
    client_ca: ClientCa = None,
    max_mbit: Rate = None,
    max_transfers: Transfers = 256,
) -> None:
    """Serve the stores of URL to many, pulling every file once."""
    from weightsync.serve.object_cache import ObjectCache
    from weightsync.serve.relay import RelayedStores
    from weightsync.transport.access import Access
    from weightsync.transport.location import StoreRoot

    access = Access.from_environment(token_file=upstream_token_file, ca_file=ca_file)
    upstream = StoreRoot(url, replace(access, streams=streams))

    def served(metrics: "TransferMetrics") -> RelayedStores:
        held = ObjectCache(cache, cache_bytes, metrics=metrics)
        return RelayedStores(upstream, held, streams=streams, metrics=metrics)

    _serve(served, host, port, token_file, tenants, cert, key, client_ca, max_mbit, max_transfers)


def list_stores(
    url: Annotated[
        str,
        typer.Argument(help="A store or a place with stores: directory, http(s)://, s3://..."),
    ],
    token_file: UpstreamToken = None,
    ca_file: CaFile = None,
) -> None:
    """List the stores of a place, or the versions of one store."""
    from harvester.platform.backoff import RetryLimits
    from weightsync.serve.published import list_store
    from weightsync.transport.access import Access

    access = Access.from_environment(token_file=token_file, ca_file=ca_file)
    for line in list_store(url, replace(access, retries=RetryLimits(give_up_s=5.0))):
        typer.echo(line)


def _serve(
    served_with: "Callable[[TransferMetrics], ServedStores]",
    host: str,
    port: int,
    token_file: Path | None,
    tenants: Path | None,
    cert: Path | None,
    key: Path | None,
    client_ca: Path | None,
    max_mbit: float | None,
    max_transfers: int,
) -> None:
    from harvester.platform.tenants import Tenants
    from harvester.platform.tls import server_tls
    from weightsync.serve.server import ListenSettings, ServingLimits, listen

    if token_file is not None and tenants is not None:
        raise ConfigError("give --token-file or --tenants: a tenants file has the operator's token")
    known = Tenants.load(tenants) if token_file is None else Tenants.operators(token_file)
    listening = ListenSettings(
        host=host, port=port, tenants=known, tls=server_tls(cert, key, client_ca)
    )
    rate = None if max_mbit is None else max_mbit * 1e6 / 8
    limits = ServingLimits(transfers_max=max_transfers, bytes_per_s=rate)
    asyncio.run(
        listen(
            served_with, listening, limits, started=lambda url: typer.echo(f"listening on {url}")
        )
    )


weights = typer.Typer(add_completion=False, no_args_is_help=True)
weights.command()(serve)
weights.command()(relay)
weights.command(name="ls")(list_stores)

_WAIT_S = 30.0
"""Timeout of a question for the next version: as long as a RoseMux server holds one back."""
_PASSING = (Corrupt, Exhausted, PeerProtocolError, Stale)
"""Faults that a publisher, a disk or a relay may clear without this process."""


@weights.callback()
def _weights() -> None:
    """Pull, serve, relay and list published weights."""


@weights.command()
def pull(
    store: Annotated[str, typer.Argument(help="The weight store.")],
    directory: Annotated[
        str, typer.Argument(help="Checkpoint directory to update; created if absent.")
    ],
    version: Annotated[
        int | None, typer.Option(min=1, help="Version to pull; the newest by default.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the newest version until interrupted.")
    ] = False,
    every: Annotated[
        float,
        typer.Option(
            min=0.01, max=86400, help="Seconds between two checks, where no server reports changes."
        ),
    ] = 1.0,
    threads: Annotated[int, typer.Option(min=1, max=256)] = 2,
    staging_bytes: Annotated[
        int, typer.Option(help="Memory that a version may take; the rest is kept in DIRECTORY.")
    ] = STAGING_BYTES,
    base_checkpoint: BaseOption = None,
) -> None:
    """Bring a local checkpoint directory to a published version, and keep it there.

    The directory can be loaded by any engine. Interrupted at any instant it is repaired by the next
    pull; `rosemux.json` in it says which version it holds, or that an apply is in progress.
    """
    if watch and version is not None:
        raise ConfigError("--watch follows the newest version: leave --version out")
    from weightsync.encoding.codec import warm_up
    from weightsync.follower import Follower
    from weightsync.receiver import Receiver
    from weightsync.transport.directory import local_path

    path = local_path(directory)
    receiver = Receiver(
        store,
        threads=threads,
        staging_bytes=staging_bytes,
        spool_dir=path,
        base_checkpoint=base_checkpoint,
    )
    with closing(receiver), Follower(receiver, path, threads=threads) as follower:
        typer.echo(_state(follower, path))
        warm_up()
        if watch:
            _follow(follower, every_s=every)
        else:
            requested = None if version is None else WeightVersion(version)
            typer.echo(_summary(follower.pull(requested)))


def _follow(follower: "Follower", *, every_s: float) -> None:
    """Pull every new version; passing faults are reported once and retried."""
    complaint, waits = "", False
    while True:
        try:
            if (newer := follower.newer(wait_s=_WAIT_S)) is not None:
                is_next = follower.held is not None and newer > follower.held.version
                typer.echo(_summary(follower.pull(newer if is_next else None)))
            elif follower.held is None and not waits:
                typer.echo("the store holds no version yet, or is not there: waiting")
                waits = True
            complaint = ""
            if follower.announces:
                continue
        except _PASSING as error:
            if str(error) != complaint:
                complaint = str(error)
                typer.echo(f"rosemux: {error}; trying again", err=True)
        time.sleep(every_s)


def _state(follower: "Follower", directory: Path) -> str:
    if follower.held is not None:
        return f"{directory} holds version {follower.held.version}, {follower.held.state_hash}"
    if follower.interrupted:
        return f"{directory} is between two versions: an apply was interrupted; it is repaired now"
    return f"{directory} holds no version yet"


def _summary(pulled: "Pulled") -> str:
    what = "repaired, " if pulled.mended else ""
    how = "from a full checkpoint" if pulled.from_full else "from deltas"
    return (
        f"version {pulled.version}, {pulled.state_hash}: {what}{pulled.tensors_written} tensors "
        f"written {how}, {pulled.bytes_read / 1e6:.1f} MB read, {pulled.seconds:.2f} s"
    )
