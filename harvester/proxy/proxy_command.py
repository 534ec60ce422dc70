"""`rosemux engine-proxy`: an engine on loopback, for callers on other machines."""

from pathlib import Path
from typing import Annotated

import typer

File = Path | None


def engine_proxy(
    engine: Annotated[
        str, typer.Option(help="URL of the engine on loopback.")
    ] = "http://127.0.0.1:8000",
    host: Annotated[
        str, typer.Option(help="Address to listen on; off loopback TLS and tokens are required.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8443,
    cert: Annotated[File, typer.Option(help="TLS certificate chain, PEM.")] = None,
    key: Annotated[File, typer.Option(help="TLS private key, PEM.")] = None,
    client_ca: Annotated[
        File, typer.Option(help="Callers must show a certificate that one of these signed.")
    ] = None,
    token_file: Annotated[
        File, typer.Option(help="Tokens, one a line, for every route: the gateway's.")
    ] = None,
    data_token_file: Annotated[
        File, typer.Option(help="Tokens for turns, text and metrics alone.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Largest request.")] = 64 << 20,
    max_requests: Annotated[int, typer.Option(min=1, help="Most requests at once.")] = 1024,
) -> None:
    import uvloop

    from harvester.platform.bearer import TokenFile
    from harvester.platform.tls import server_tls
    from harvester.proxy.engine_proxy import ProxySettings, run_proxy

    settings = ProxySettings(
        engine=engine,
        host=host,
        port=port,
        tls=server_tls(cert, key, client_ca),
        control=None if token_file is None else TokenFile(token_file).accepts,
        data=None if data_token_file is None else TokenFile(data_token_file).accepts,
        max_body_bytes=max_body_bytes,
        max_requests=max_requests,
    )
    uvloop.run(run_proxy(settings, started=lambda url: typer.echo(f"listening on {url}")))
