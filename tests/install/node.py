"""A machine of its own on this one: the distribution's files, systemd as process 1, nothing else.

/usr, /etc and /var are this machine's under overlays; /opt, /usr/local, /root, /home, /srv and /run
are empty. Network, processes, host name and control groups are the node's own. Kernel settings
cannot be changed from inside. Everything that the node wrote goes with it.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

_SETUP = Path(__file__).with_name("node_setup.sh")
_BOOT_S = 60.0
_END_S = 30.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class NodeError(Exception):
    """The node did not start, or a command on it failed."""


class Node:
    def __init__(self, packages: Path) -> None:
        """`packages` is a folder of installed distributions that `show_packages` can show."""
        self._packages = packages
        self._folder = Path(tempfile.mkdtemp(prefix="rosemux-node-"))
        (self._folder / "root").mkdir()
        self._group = _own_group(self._folder.name)
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init = 0

    def __enter__(self) -> Self:
        try:
            self._boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def process(self) -> int:
        """The node's process 1, as this machine numbers it."""
        return self._init

    @property
    def root(self) -> Path:
        """The node's files, as this machine may read and write them."""
        return Path(f"/proc/{self._init}/root")

    def run(
        self,
        script: str,
        *,
        timeout_s: float = 300.0,
        environment: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> str:
        """Output of a script of root's shell on the node. Raises NodeError where a line failed."""
        command = ["nsenter", "--target", str(self._init), "--all", "--root", "--wd"]
        command += ["bash", "-euxo" if not quiet else "-euo", "pipefail", "-c"]
        command += [f"cd /srv/rosemux\n{script}"]
        try:
            done = subprocess.run(
                command,
                env={"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NodeError(f"no end after {timeout_s:g} s: {script}\n{error.output}") from error
        if done.returncode:
            raise NodeError(f"status {done.returncode}: {script}\n{done.stdout}")
        return done.stdout

    def show_packages(self, environment: str) -> str:
        """Shows the packages, pip included, behind what an environment of the node has; ours in
        the form of an editable installation are left out. Returns its folder of packages."""
        site = f"{environment}/lib/python3.11/site-packages"
        kept = f"/mnt/node/{environment.strip('/').replace('/', '-')}"
        layers = f"lowerdir={site}:/mnt/packages,upperdir={kept}/upper,workdir={kept}/work"
        self.run(
            f"mkdir -p {kept}/upper {kept}/work\n"
            f"rm -rf {site}/pip {site}/pip-*\n"
            f"mount -t overlay -o {layers} overlay {site}\n"
            f"rm -rf {site}/__editable__*"
        )
        return site

    def close(self) -> None:
        """Ends every process of the node and removes its files."""
        if self._unshare is not None:
            self._unshare.kill()
            self._unshare.wait()
        # Process 1 is gone when all others are.
        _wait(lambda: not self._init or not Path(f"/proc/{self._init}").exists())
        _wait(lambda: _removed(self._group))
        shutil.rmtree(self._folder)

    def _boot(self) -> None:
        log = self._folder / "boot.log"
        with log.open("wb") as output:
            self._unshare = subprocess.Popen(
                [
                    *("bash", "-euc", 'echo $$ >"$1"; shift; exec "$@"', "node"),
                    str(self._group / "cgroup.procs"),
                    *("unshare", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net"),
                    *("--fork", "--kill-child", "bash", "-eu", str(_SETUP)),
                    *(str(self._folder), str(self._packages)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _BOOT_S  # noqa: TID251
        state = ""
        while time.monotonic() < deadline:  # noqa: TID251
            if self._unshare.poll() is not None:
                raise NodeError(f"the node ended while it started:\n{log.read_text()}")
            children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
            self._init = int((children.read_text().split() or ["0"])[0])
            if self._init and (self.root / "run/systemd/private").exists():
                state = self._state()
                if state in {"running", "degraded"}:
                    return
            time.sleep(0.2)
        raise NodeError(f"systemd is {state or 'silent'}:\n{log.read_text()}")

    def _state(self) -> str:
        done = subprocess.run(
            ["nsenter", "-t", str(self._init), "--all", "--root", "systemctl", "is-system-running"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.stdout.strip()


def _own_group(name: str) -> Path:
    """A control group of version 2 for all of the node, so that its systemd sees no other."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            group = Path(where) / name
            group.mkdir()
            return group
    raise NodeError("no control groups of version 2 here")


def _removed(group: Path) -> bool:
    """Whether the group and those in it are gone; no process may be left in one."""
    try:
        for folder, _, _ in os.walk(group, topdown=False):
            Path(folder).rmdir()
    except OSError:
        return False
    return True


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _END_S  # noqa: TID251
    while not done():
        if time.monotonic() > deadline:  # noqa: TID251
            raise NodeError(f"the node has not ended after {_END_S:g} s")
        time.sleep(0.1)
