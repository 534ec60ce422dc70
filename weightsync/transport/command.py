"""`rosemux weights serve`, `relay` and `ls`: stores over a network, from a shell."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weightsync.transport.access import Access
    from weightsync.transport.listener import Listening
    from weightsync.transport.server import ServingLimits

Host = Annotated[
    str, typer.Option(help="Address to listen on; a token file is required unless it is loopback.")
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")
]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token that readers must send.")]
Cert = Annotated[Path | None, typer.Option(help="TLS certificate chain, PEM.")]
Key = Annotated[Path | None, typer.Option(help="TLS private key, PEM.")]
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
CaFile = Annotated[Path | None, typer.Option(help="Certificates to trust besides the system's.")]


def serve(
    root: Annotated[
        str, typer.Argument(help="Directory that holds the stores, or s3://BUCKET/PATH.")
    ],
    host: Host = "127.0.0.1",
    port: Port = 9731,
    token_file: TokenFile = None,
    cert: Cert = None,
    key: Key = None,
    max_mbit: Rate = None,
    max_transfers: Transfers = 64,
) -> None:
    """Serve every store under ROOT over HTTP, by byte ranges."""
    from weightsync.transport.listener import listen
    from weightsync.transport.location import StoreRoot
    from weightsync.transport.shelf import SourceShelf

    stores = StoreRoot(root)
    listening = _listening(host, port, token_file, cert, key)
    limits = _limits(max_mbit, max_transfers)
    asyncio.run(listen(lambda _: SourceShelf(stores), listening, limits, started=_told))


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
    token_file: TokenFile = None,
    cert: Cert = None,
    key: Key = None,
    max_mbit: Rate = None,
    max_transfers: Transfers = 256,
) -> None:
    """Serve the stores of URL to many, pulling every file once."""
    from weightsync.transport.listener import listen
    from weightsync.transport.location import StoreRoot
    from weightsync.transport.metrics import TransferMetrics
    from weightsync.transport.object_cache import ObjectCache
    from weightsync.transport.relay import RelayShelf

    upstream = StoreRoot(url, _access(upstream_token_file, ca_file, streams=streams))
    listening = _listening(host, port, token_file, cert, key)
    limits = _limits(max_mbit, max_transfers)

    def shelf(metrics: TransferMetrics) -> RelayShelf:
        held = ObjectCache(cache, cache_bytes, metrics=metrics)
        return RelayShelf(upstream, held, streams=streams, metrics=metrics)

    asyncio.run(listen(shelf, listening, limits, started=_told))


def list_stores(
    url: Annotated[
        str,
        typer.Argument(help="A store or a place with stores: directory, http(s)://, s3://..."),
    ],
    token_file: UpstreamToken = None,
    ca_file: CaFile = None,
) -> None:
    """List the stores of a place, or the versions of one store."""
    from weightsync.transport.listing import listed

    for line in listed(url, _access(token_file, ca_file, give_up_s=5.0)):
        typer.echo(line)


def _access(
    token_file: Path | None, ca_file: Path | None, *, streams: int = 4, give_up_s: float = 60.0
) -> "Access":
    from harvester.platform.bearer import read_token
    from weightsync.transport.access import Access
    from weightsync.transport.patience import RetryLimits

    told = Access.from_environment()
    return Access(
        token=told.token if token_file is None else read_token(token_file),
        ca_file=told.ca_file if ca_file is None else ca_file,
        streams=streams,
        retries=RetryLimits(give_up_s=give_up_s),
    )


def _listening(
    host: str, port: int, token_file: Path | None, cert: Path | None, key: Path | None
) -> "Listening":
    from harvester.platform.bearer import read_token
    from weightsync.transport.listener import Listening

    token = None if token_file is None else read_token(token_file)
    return Listening(host=host, port=port, token=token, cert=cert, key=key)


def _limits(max_mbit: float | None, max_transfers: int) -> "ServingLimits":
    from weightsync.transport.server import ServingLimits

    rate = None if max_mbit is None else max_mbit * 1e6 / 8
    return ServingLimits(transfers_max=max_transfers, bytes_per_s=rate)


def _told(url: str) -> None:
    typer.echo(f"listening on {url}")
