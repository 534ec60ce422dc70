"""`deploy/lock/install` on machines whose pip knows torch's CPU build, and on others.

The registries are folders served on loopback. uv knows PyTorch's index by itself and cannot be sent
elsewhere, so a wheel of the same name stands in for it.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.check_expressions import DEPLOY

ASKING = "asking PyTorch's CPU wheel index"
SENTENCE = "name PyTorch's CPU wheel index in"
# Stands for uv: checks its arguments, and installs with pip; what is to come from PyTorch's own
# index, from FAKE_TORCH_INDEX alone.
UV = """#!python
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--python", "--index-strategy", "--torch-backend"):
    parser.add_argument(name)
ours, words = parser.parse_known_args()
if "FAKE_UV_FAILS" in os.environ:
    sys.exit("no way to this index")
assert ours.python.endswith("/bin/python"), sys.argv
assert ours.torch_backend in (None, "cpu"), sys.argv
# Every user sees commands, and an index's address may hold a password.
assert not any("://" in word for word in sys.argv), sys.argv
index = os.environ["FAKE_TORCH_INDEX" if ours.torch_backend else "UV_DEFAULT_INDEX"]
sys.exit(subprocess.call([sys.executable, "-m", *words, "--index-url", index]))
"""
PYTHON = """#!/bin/sh
if [ $# = 3 ] && [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3" && exec cp -a "{made}/." "$3"
fi
exec "{real}" "$@"
"""
# The checkout itself, installed in place without another distribution.
BACKEND = """
import zipfile
ABOUT = {"METADATA": "Metadata-Version: 2.1\\nName: us\\nVersion: 1\\n", "RECORD": "",
         "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
def build_editable(folder, *_):
    with zipfile.ZipFile(f"{folder}/us-1-py3-none-any.whl", "w") as wheel:
        for name, text in ABOUT.items():
            wheel.writestr(f"us-1.dist-info/{name}", text)
    return "us-1-py3-none-any.whl"
build_wheel = build_editable
"""


Install = Callable[..., tuple[int, str]]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """Address of a server of `tmp_path / "index"`, where each folder below is a registry."""
    (tmp_path / "index").mkdir(exist_ok=True)
    handler = partial(_Quiet, directory=str(tmp_path / "index"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def add_wheel(registry: Path, name: str, version: str, *, files: dict[str, str]) -> str:
    """The line of a lock that asks for it."""
    folder = registry / name
    folder.mkdir(parents=True)
    about = f"{name}-{version}.dist-info"
    files = files | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={digest.decode().rstrip('=')},{len(text)}\n"
        for path, text in files.items()
        for digest in [base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())]
    )
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{about}/RECORD": record}).items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{name}=={version} \\\n    --hash=sha256:{sha256}\n    # via\n    #   us\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The script beside a project and a lock of three small distributions; torch is in neither
    registry yet."""
    root = tmp_path / "checkout"
    (root / "deploy/lock").mkdir(parents=True)
    for name in ("install", "uv_install.py"):
        shutil.copy(DEPLOY / "lock" / name, root / "deploy/lock")
    (root / "deploy/lock/excluded.txt").write_text("# none is installed\ntriton\n")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (root / "backend.py").write_text(BACKEND)
    main = tmp_path / "index/main"
    (tmp_path / "index/pytorch").mkdir(parents=True)
    lines = [
        add_wheel(main, "small", "1.0", files={"small.py": ""}),
        add_wheel(main, "uv", "1.0", files={"uv-1.0.data/scripts/uv": UV}),
    ]
    (root / "requirements.lock").write_text("# made by hand\n" + "".join(lines))
    return root


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that makes one environment, which takes seconds, and then copies of it."""
    folder = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", folder / "made"], check=True)
    python = folder / "python"
    python.write_text(PYTHON.format(real=sys.executable, made=folder / "made"))
    python.chmod(0o755)
    return python


@pytest.fixture
def install(checkout: Path, index: str, python: Path, tmp_path: Path) -> Install:
    def install(torch_at: str, *arguments: str) -> tuple[int, str]:
        """`torch_at` is the registry with torch; "" none. Exit status and all output."""
        registry = tmp_path / "index" / (torch_at or "elsewhere")
        files = {"torch.py": ""}
        line = add_wheel(registry, "torch", "1.0+cpu", files=files)
        lock = checkout / "requirements.lock"
        lock.write_text(lock.read_text() + line)
        return run(*arguments)

    def run(*arguments: str) -> tuple[int, str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "UV_"))
        }
        environment |= {
            "PYTHON": str(python),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{index}/main",
            "PIP_NO_CACHE_DIR": "1",
            "FAKE_TORCH_INDEX": f"{index}/pytorch",
        }
        done = subprocess.run(
            [checkout / "deploy/lock/install", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return install


def imports(checkout: Path, *names: str, venv: str = ".venv") -> bool:
    command = [checkout / venv / "bin/python", "-c", f"import {', '.join(names)}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_pip_s_configured_index_comes_first(checkout: Path, install: Install) -> None:
    code, said = install("main")
    assert (code, ASKING in said) == (0, False), said
    assert imports(checkout, "torch", "small")


def test_pip_installs_what_uv_cannot_reach(
    checkout: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_UV_FAILS", "1")
    code, said = install("main")
    assert (code, ASKING in said) == (0, False), said
    assert imports(checkout, "torch", "small")


def test_uv_goes_where_pip_is_configured_to_go(
    tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wheel(tmp_path / "index/main", "first", "1.0", files={"first.py": ""})
    add_wheel(tmp_path / "index/more", "second", "1.0", files={"second.py": ""})
    add_wheel(tmp_path / "index/folder", "third", "1.0", files={"third.py": ""})
    configuration = tmp_path / "pip.conf"
    configuration.write_text(
        f"[global]\nindex-url = http://127.0.0.1:9/nothing\nextra-index-url = {index}/more\n"
        f"[install]\nfind-links = {tmp_path}/index/folder/third\n"
    )
    for name in [*os.environ]:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("PIP_INDEX_URL", f"{index}/main")
    command = [sys.executable, DEPLOY / "lock/uv_install.py", "--target", tmp_path / "here"]
    subprocess.run([*command, "first", "second", "third"], check=True, capture_output=True)
    found = {path.name for path in (tmp_path / "here").iterdir()}
    assert {"first.py", "second.py", "third.py"} <= found


def test_elsewhere_torch_alone_comes_from_pytorch_s_own_index(
    checkout: Path, install: Install
) -> None:
    code, said = install("pytorch")
    assert code == 0, said
    assert said.count(ASKING) == 1
    assert imports(checkout, "torch", "small")


def test_a_build_that_is_not_the_locked_one_is_refused(checkout: Path, install: Install) -> None:
    lock = checkout / "requirements.lock"
    wrong = "0" * 64
    lock.write_text(f"torch==1.0+cpu \\\n    --hash=sha256:{wrong}\n" + lock.read_text())
    add_wheel(checkout.parent / "index/pytorch", "torch", "1.0+cpu", files={"torch.py": ""})
    code, said = install("")
    assert (code, SENTENCE in said) == (1, True), said
    assert not imports(checkout, "torch")
    assert (checkout / ".venv/incomplete").exists()


def test_a_machine_with_neither_gets_the_sentence(
    install: Install,
) -> None:
    code, said = install("")
    assert (code, SENTENCE in said) == (1, True), said


def test_an_environment_elsewhere_has_a_copy_and_the_checkout_has_none(
    checkout: Path, install: Install, tmp_path: Path
) -> None:
    code, said = install("main", "opt/rosemux")
    assert code == 0, said
    assert imports(tmp_path, "torch", "small", venv="opt/rosemux")
    assert not (checkout / ".venv").exists()


def test_a_foreign_environment_is_left_alone(install: Install, tmp_path: Path) -> None:
    (tmp_path / "opt/vllm/bin").mkdir(parents=True)
    theirs = tmp_path / "opt/vllm/bin/python"
    theirs.write_text("")
    code, said = install("main", str(tmp_path / "opt/vllm"))
    assert (code, "was not made by this script" in said) == (1, True), said
    assert [*(tmp_path / "opt/vllm").rglob("*")] == [theirs.parent, theirs]
