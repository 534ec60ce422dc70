"""TLS and tokens: checked on both sides, and read again when their files change."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from harvester.contracts.errors import ConfigError, Exhausted
from harvester.platform.bearer import TokenFile, read_token
from harvester.platform.blocking_peer import BlockingPeer
from harvester.platform.http_kit import listen, serving
from harvester.platform.peer import Peer
from harvester.platform.renewed import Renewed
from harvester.platform.tls import Credentials, ServerTls, open_to_network, server_tls
from tests.certificates import Authority, token_file

SERVICE = "rosemux-agent.rosemux.svc"
NEW, OLD = "n" * 20, "o" * 20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def server(tls: ServerTls | None, *, connections: int | None = None) -> AsyncIterator[str]:
    """Answers with the Authorization header that it was sent; `/away` leads elsewhere."""

    async def echo(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get("Authorization", "none"))

    async def away(_request: web.Request) -> web.Response:
        raise web.HTTPFound("/")

    app = web.Application()
    app.add_routes([web.get("/", echo), web.get("/away", away)])
    async with serving(app, connections=connections) as runner:
        yield await listen(runner, "127.0.0.1", 0, remedy="", tls=tls)


async def answer(url: str, credentials: Credentials, path: str = "/") -> tuple[int, str]:
    """Over a new connection."""
    async with (
        aiohttp.ClientSession() as session,
        Peer(session, url, credentials).get(path) as reply,
    ):
        return reply.status, await reply.text()


async def test_a_server_is_believed_by_its_authority_alone(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    async with server(authority.server("server")) as url:
        assert await answer(url, authority.trusted()) == (200, "none")
        for distrustful in (Credentials(), other.trusted()):
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await answer(url, distrustful)
    async with server(authority.server("elsewhere", "10.0.0.9")) as url:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="mismatch"):
            await answer(url, authority.trusted())


async def test_a_server_at_an_address_is_known_by_the_name_in_its_certificate(
    authority: Authority,
) -> None:
    """A pod's address changes; its certificate names the Service."""
    known, mistaken = (
        authority.trusted(server_name=name) for name in (SERVICE, "another.rosemux.svc")
    )
    async with server(authority.server("pod", SERVICE)) as url:
        assert "127.0.0.1" in url
        assert await answer(url, known) == (200, "none")
        for refused in (authority.trusted(), mistaken):
            with pytest.raises(aiohttp.ClientConnectorCertificateError, match="mismatch"):
                await answer(url, refused)
        peer = BlockingPeer.at(url, known, name="agent")
        asked = partial(peer.answer, "/", timeout_s=5.0, most_bytes=100)
        assert await asyncio.to_thread(asked) == b"none"
        stranger = BlockingPeer.at(url, mistaken, name="agent")
        refused_call = partial(stranger.answer, "/", timeout_s=5.0, most_bytes=100)
        with pytest.raises(Exhausted, match=r"another\.rosemux\.svc"):
            await asyncio.to_thread(refused_call)


async def test_peers_of_one_session_and_address_have_each_its_own_name(
    authority: Authority,
) -> None:
    """A connection of one peer, kept open, is none of another peer, who knows another server."""
    async with server(authority.server("pod", SERVICE)) as url, aiohttp.ClientSession() as session:
        for name, known in ((SERVICE, True), ("another.rosemux.svc", False)):
            peer = Peer(session, url, authority.trusted(server_name=name))
            if known:
                async with peer.get("/") as reply:
                    assert await reply.text() == "none"
                continue
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await peer.get("/").__aenter__()


@pytest.mark.parametrize("name", ["", ".svc", "a..b", "a b", "a/b", f"{'a' * 64}.svc", "ä.svc"])
def test_a_server_s_name_that_no_certificate_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="server_name"):
        Credentials(server_name=name)


async def test_connections_that_begin_no_tls_make_room(authority: Authority) -> None:
    async with server(authority.server("server"), connections=4) as url, asyncio.timeout(30):
        port = int(url.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        assert await answer(url, authority.trusted()) == (200, "none")
        for reader, writer in silent[:8]:
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        for _, writer in silent:
            writer.close()


async def test_a_client_shows_a_certificate_where_one_is_required(
    authority: Authority, tmp_path: Path
) -> None:
    clients = Authority(tmp_path, "clients")
    ours, foreign = clients.signs("client"), authority.signs("foreign")
    async with server(authority.server("server", client_ca=clients.file)) as url:
        shown = authority.trusted(cert_file=ours.cert_file, key_file=ours.key_file)
        assert (await answer(url, shown))[0] == 200
        for refused in (
            authority.trusted(),
            authority.trusted(cert_file=foreign.cert_file, key_file=foreign.key_file),
        ):
            with pytest.raises(aiohttp.ClientError):
                await answer(url, refused)


async def test_certificates_and_authorities_are_renewed_without_a_restart(tmp_path: Path) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    clients, later = Authority(tmp_path, "clients"), Authority(tmp_path, "later")
    tls = first.server("server", client_ca=clients.file)
    trusted, client = tmp_path / "trusted", clients.signs("client")
    trusted.write_bytes(first.file.read_bytes())
    credentials = Credentials(ca_file=trusted, cert_file=client.cert_file, key_file=client.key_file)
    async with server(tls) as url:
        assert (await answer(url, credentials))[0] == 200
        second.signs("server")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await answer(url, credentials)
        trusted.write_bytes(second.file.read_bytes())
        assert (await answer(url, credentials))[0] == 200
        clients.file.write_bytes(later.file.read_bytes())
        with pytest.raises(aiohttp.ClientError):
            await answer(url, credentials)
        later.signs("client")
        assert (await answer(url, credentials))[0] == 200


async def test_a_half_written_certificate_leaves_the_last_one_in_force(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = authority.server("server")
    async with server(tls) as url:
        tls.cert_file.write_text("-----BEGIN")
        assert (await answer(url, authority.trusted()))[0] == 200
        assert (await answer(url, authority.trusted()))[0] == 200
    assert caplog.text.count("stays in force") == 1


async def test_a_token_is_sent_as_it_stands_in_its_file(tmp_path: Path) -> None:
    path = token_file(tmp_path, "token", OLD)
    credentials = Credentials(token_file=path)
    async with server(None) as url:
        assert await answer(url, credentials) == (200, f"Bearer {OLD}")
        path.write_text(NEW + "\n")
        assert await answer(url, credentials) == (200, f"Bearer {NEW}")
        path.write_text("short")
        assert await answer(url, credentials) == (200, f"Bearer {NEW}")


async def test_a_redirection_is_not_followed(tmp_path: Path) -> None:
    async with server(None) as url:
        assert (await answer(url, Credentials(), "/away"))[0] == 302


@pytest.mark.parametrize(
    ("url", "exposed"),
    [
        ("http://10.0.0.1:8000", True),
        ("http://engine:8000", True),
        ("http://127.0.0.1.example.org", True),
        ("http://", True),
        ("http://[", True),
        ("http://127.0.0.1:8000", False),
        ("http://[::1]:8000", False),
        ("http://localhost", False),
        ("https://10.0.0.1", False),
    ],
)
def test_a_token_never_leaves_this_machine_in_the_clear(
    tmp_path: Path, url: str, exposed: bool
) -> None:
    credentials = Credentials(token_file=tmp_path / "token")
    assert bool(credentials.exposed_at(url)) is exposed
    assert Credentials().exposed_at(url) == ""


def test_a_server_accepts_an_old_and_a_new_token_while_its_clients_change_over(
    tmp_path: Path,
) -> None:
    path = token_file(tmp_path, "tokens", OLD)
    tokens = TokenFile(path)
    path.write_text(f"{NEW}\n{OLD}\n")
    assert tokens.accepts(f"Bearer {OLD}")
    assert tokens.accepts(f"Bearer {NEW}")
    path.write_text(f"{NEW}\n")
    assert not tokens.accepts(f"Bearer {OLD}")
    for wrong in ("", "Bearer ", f"Basic {NEW}", f"Bearer {NEW}x", "Bearer \udcff"):
        assert not tokens.accepts(wrong)


def test_a_client_s_file_has_one_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one line"):
        read_token(token_file(tmp_path, "tokens", OLD, NEW))


@pytest.mark.parametrize(
    ("token", "client_ca", "plain", "fault"),
    [
        (None, None, False, "token_file"),
        ("t", None, False, "plain_http"),
        ("t", None, True, ""),
        (None, None, True, "token_file"),
    ],
)
def test_a_server_off_loopback_has_tls_and_knows_its_clients(
    token: str | None, client_ca: str | None, plain: bool, fault: str
) -> None:
    path = None if token is None else Path(token)
    assert fault in open_to_network("10.0.0.1", path, None, plain)
    assert bool(fault) is bool(open_to_network("10.0.0.1", path, None, plain))
    assert open_to_network("127.0.0.1", path, None, plain) == ""
    tls = ServerTls(cert_file=Path("c"), key_file=Path("k"))
    assert bool(open_to_network("10.0.0.1", path, tls, plain)) is (path is None)
    mutual = tls.model_copy(update={"client_ca_file": Path("a")})
    assert open_to_network("10.0.0.1", None, mutual, False) == ""


def test_files_that_cannot_be_used_stop_the_start(authority: Authority, tmp_path: Path) -> None:
    made, other = authority.signs("server"), authority.signs("other")
    for cert, key, client_ca in (
        (tmp_path / "none", made.key_file, None),
        (made.cert_file, other.key_file, None),
        (made.cert_file, made.key_file, tmp_path / "none"),
        (made.cert_file, made.key_file, made.key_file),
    ):
        tls = server_tls(cert, key, client_ca)
        assert tls is not None
        with pytest.raises(ConfigError):
            tls.context()
    for credentials in (
        Credentials(ca_file=tmp_path / "none"),
        Credentials(ca_file=made.key_file),
        Credentials(cert_file=made.cert_file, key_file=other.key_file),
        Credentials(token_file=tmp_path / "none"),
    ):
        with pytest.raises(ConfigError):
            credentials.check()
    for half in ((made.cert_file, None), (None, made.key_file), (None, None, authority.file)):
        with pytest.raises(ConfigError, match="--cert and --key"):
            server_tls(*half)
    with pytest.raises(ValueError, match="cert_file and key_file"):
        Credentials(cert_file=made.cert_file)


def test_a_key_with_a_password_asks_no_terminal(authority: Authority, tmp_path: Path) -> None:
    made = authority.signs("server")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", str(made.key_file)]
    subprocess.run([*command, "-out", str(locked)], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="password"):
        ServerTls(cert_file=made.cert_file, key_file=locked).context()


def test_a_secret_that_is_replaced_by_moving_a_link_is_read_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    link = tmp_path / "link"
    link.symlink_to("a")
    renewed = Renewed([link], link.read_text)
    assert renewed.current() == "a"
    (tmp_path / "next").symlink_to("b")
    (tmp_path / "next").rename(link)
    assert renewed.current() == "b"
