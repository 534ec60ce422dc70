"""`rosemux weights`: light to ask for help, and errors that say what to do."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from harvester.cli import main
from weightsync.publisher import Publisher

HEAVY = ("aiohttp", "fsspec", "numba", "numpy", "prometheus_client", "torch")
FRAMEWORKS = ("numba", "numpy", "torch")


def _exit_code(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["weights", *arguments])
    return left.value.code


def _imported(script: str, names: tuple[str, ...]) -> str:
    script += f"\nimport sys; print([m for m in {names!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.splitlines()[-1]


def test_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("serve", "relay", "ls"))


def test_help_imports_nothing_heavy() -> None:
    script = (
        "from harvester.cli import main\n"
        "try:\n    main(['weights', 'relay', '--help'])\nexcept SystemExit:\n    pass"
    )
    assert _imported(script, HEAVY) == "[]"


def test_servers_and_relays_run_where_no_framework_is_installed() -> None:
    script = "import weightsync.serve.relay, weightsync.serve.server"
    assert _imported(script, FRAMEWORKS) == "[]"


def test_a_store_that_a_server_has_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class NotFound(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_error(404)

    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/stores/nope"
        assert _exit_code("ls", url) == 2
        server.shutdown()
    assert f"no weight store at {url}" in capsys.readouterr().err


def test_off_loopback_a_token_is_required(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code("serve", str(tmp_path), "--host", "0.0.0.0") == 2
    assert "--token-file" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "text"), [(0o644, "long enough token"), (0o600, "short")])
def test_a_token_that_protects_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, text: str
) -> None:
    token = tmp_path / "token"
    token.write_text(text)
    token.chmod(mode)
    assert _exit_code("serve", str(tmp_path), "--token-file", str(token)) == 2
    assert f"token file {token}" in capsys.readouterr().err


def test_half_of_tls_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("serve", str(tmp_path), "--cert", str(tmp_path / "cert.pem")) == 2
    assert "--key" in capsys.readouterr().err


def test_a_root_that_is_none_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("serve", str(tmp_path / "nowhere")) == 2
    assert "no directory" in capsys.readouterr().err


def test_a_store_is_listed_with_what_each_version_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Publisher(tmp_path / "job-a") as publisher:
        for step in range(3):
            publisher.publish({"w": torch.full((50,), 1.0 + step)})
    (tmp_path / "job-a" / "weight_v000002" / "READY").unlink()
    (tmp_path / "job-a" / "weight_v000003" / "model.safetensors.index.json").unlink()
    assert _exit_code("ls", str(tmp_path / "job-a")) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["weight_v000001", "full,"]
    assert "rosemux on 000001" in second
    assert "not marked READY" in second
    assert third.split() == ["weight_v000003", "unfinished", "LATEST"]
    assert _exit_code("ls", str(tmp_path)) == 0
    assert capsys.readouterr().out == "job-a\n"


def test_where_no_store_is_the_list_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code("ls", str(tmp_path)) == 2
    assert "publish a version" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://a b", "http://u:p@127.0.0.1:1", "nofs://bucket/weights"])
def test_a_place_of_stores_that_is_none_ends_a_server_at_its_start(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each request would be answered with "no store", as if its name were wrong."""
    assert _exit_code("relay", url, "--cache", str(tmp_path), "--port", "0") == 2
    assert capsys.readouterr().err.startswith("rosemux: ")
