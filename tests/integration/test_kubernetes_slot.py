"""A slot of the pods of deploy/kubernetes-harvest: agent and discovery, production, and a guest
that `rosemux guest` starts. Each container has a root of its own with its manifest's mounts, its
manifest's user and no capability; production has a pid namespace too. Stand-ins are Kubernetes' API
and the two engines."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harvester.contracts.page import Grant, Guest, PageOwners, PageReader
from tests.certificates import Authority, token_file
from tests.integration.test_agent_process import wait_for
from tests.kubernetes_api import kubernetes_api
from tests.unit.deploy.test_kubernetes_harvest import (
    CONTAINERS,
    FILES,
    GUEST_POD,
    PATCH,
    PRODUCTION,
    SLOT,
    VARIABLES,
    agents_pod,
    patches,
)

REPOSITORY = Path(__file__).parents[2]
_PREFIXES = REPOSITORY, Path(sys.base_prefix), Path(sys.prefix)
CODE = tuple(dict.fromkeys(map(str, (*(each.resolve() for each in _PREFIXES), *_PREFIXES))))
"""Contents of an image: this checkout and its interpreter."""
# Arguments: the new root, its proc (`own` or the node's), directories of the image, `--`, mounts as
# SOURCE TARGET MODE, `--`, and the command. Every user may pass a tmpfs's new directories.
ROOT = r"""
root=$1 proc=$2; shift 2
mount -t tmpfs -o mode=755 tmpfs "$root"; cd "$root"
for each in /bin /sbin /lib /lib64 /usr /dev /sys; do
    if [ -L $each ]; then cp -P $each .
    elif [ -d $each ]; then mkdir .$each; mount --rbind $each .$each; fi
done
mkdir proc tmp; if [ $proc = own ]; then mount -t proc proc proc; else mount --rbind /proc proc; fi
mkdir etc; cp /etc/ld.so.cache etc/
while [ "$1" != -- ]; do mkdir -p ".$1"; mount --rbind "$1" ".$1"; shift; done; shift
while [ "$1" != -- ]; do
    mkdir -p ".$2"; mount --bind "$1" ".$2"
    if [ $3 = ro ]; then mount -o remount,bind,ro ".$2"; fi
    shift 3
done; shift
exec chroot . "$@"
"""
ENGINE = """
import json, os, time
from pathlib import Path
from coserve.guest.guest_slot import GuestSlot
from coserve.vllm.environment import slot_environment
from harvester.contracts.process import process_ids
environment = slot_environment()
slot = GuestSlot(environment.directory, token_limit=512, owners=environment.owners)
slot.load.isolation, slot.load.processes = environment.isolation, process_ids([os.getpid()])
slot.isolation_watch().start()
while True:
    decision = slot.decide()
    slot.publish()
    print(json.dumps({"open": decision.open}), flush=True)
    time.sleep(0.05)
"""
SERVES = """
import os, time
from pathlib import Path
import msgspec
from coserve.pulse.pulse_state import PulseState
from coserve.vllm.environment import slot_environment
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import PageDirectory, ProductionModel
from harvester.contracts.process import process_ids
environment = slot_environment()
pages = PageDirectory(environment.directory, environment.owners)
page, grants, state = pages.own_pulse(environment.engine, 0), pages.grant_reader(), PulseState()
model = ProductionModel(prefill_base_s=0.1, decode_base_s=0.05)
(root,) = process_ids([os.getpid()])
samples = dict(model=model, model_samples=1000, root=root, middleware=True,
               ttft_s_recent=(0.03,) * 32, itl_s_recent=(0.008,) * 32)
while True:
    now_ns = monotonic_ns()
    page.keep()
    pulse = msgspec.structs.replace(state.pulse(now_ns=now_ns), **samples)
    page.write(pulse, now_ns=now_ns, ttl_ns=500_000_000)
    print(f'"{grants.read().fault}"', flush=True)
    time.sleep(0.05)
"""


class Node:
    """The node's directories, its API server's answer, and its containers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "root").mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []

    def directory(self, volume: dict[str, Any]) -> Path:
        """Where the kubelet would take a volume from. Waits for a directory that must be there."""
        if (path := volume.get("hostPath")) is not None:
            found: Path = self.root / path["path"].lstrip("/")
            if path["type"] == "DirectoryOrCreate":
                found.mkdir(mode=0o755, parents=True, exist_ok=True)
            wait_for(found.is_dir, seconds=60)
            return found
        return Path(self.root, volume["name"])

    def start(
        self,
        pod: dict[str, Any],
        container: dict[str, Any],
        command: Sequence[str],
        *,
        user: int,
        **variables: str,
    ) -> Path:
        """Starts a container, and returns the file of what it says."""
        volumes = {each["name"]: each for each in pod["volumes"]}
        mounts: list[str] = []
        for each in container["volumeMounts"]:
            volume = volumes[each["name"]]
            if volume.get("emptyDir") is None:
                mode = "ro" if each.get("readOnly") else "rw"
                mounts += [str(self.directory(volume)), each["mountPath"], mode]
        own = not pod.get("hostPID")
        spaces = ["--pid", "--fork", "--kill-child"] if own else []
        groups = ",".join(map(str, pod["securityContext"]["supplementalGroups"]))
        run = ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={groups}"]
        run += ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", *command]
        made = ["sh", "-euc", ROOT, "sh", str(self.root / "root"), "own" if own else "node"]
        given = {e["name"]: e["value"] for e in container["env"] if "value" in e} | variables
        path = os.pathsep.join(filter(None, [given.pop("PYTHONPATH", ""), str(REPOSITORY)]))
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **given}
        said = self.root / f"said.{len(self._processes)}"
        with said.open("wb") as out:
            process = subprocess.Popen(
                ["unshare", "--mount", *spaces, *made, *CODE, "--", *mounts, "--", *run],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd="/",
            )
        self._processes.append(process)
        return said

    def stop(self) -> None:
        """The guest first, as its command ends its engine."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for said in sorted(self.root.glob("said.*")):
            print(f"--- {said.name}\n{said.read_text()[-2000:]}")


@pytest.fixture
def api() -> Iterator[str]:
    """Production's pod, as patched."""
    metadata = {"name": "chat-0", **PATCH["spec"]["template"]["metadata"]}
    status = {"phase": "Running", "podIP": "10.0.0.1", "hostIP": "192.0.2.21"}
    with kubernetes_api(
        {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": status}
    ) as url:
        yield url


@pytest.fixture
def node() -> Iterator[Node]:
    if os.geteuid() != 0:
        pytest.skip("containers of several users take root")
    space = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "true"]
    if subprocess.run(space, capture_output=True, check=False).returncode:
        pytest.skip("no mount or pid namespace can be made here")
    root = Path(tempfile.mkdtemp(prefix="rosemux-node-", dir="/dev/shm"))
    root.chmod(0o755)
    node = Node(root)
    yield node
    node.stop()
    shutil.rmtree(root)


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def rosemux(arguments: Sequence[str], *more: str) -> list[str]:
    """A manifest's command; the test's interpreter has the package and not the program."""
    assert arguments[0] == "rosemux"
    return python("-m", "harvester.cli", *arguments[1:], *more)


def last(said: Path) -> Any:
    lines = said.read_text().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith(("{", '"')) else None


def call(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=5) as reply:
        return json.load(reply)


def test_a_grant_reaches_a_guest_in_its_pod_and_is_obeyed(node: Node, api: str) -> None:
    config, fake = node.root / "config", node.root / "policy" / "fake"
    config.mkdir()
    for name, text in FILES.items():
        # A first step that nothing was learned of is longer than a twentieth of a prompt.
        (config / name).write_text(text.replace("epsilon: 0.05", "epsilon: 1"))
    server = fake / "vllm/entrypoints/openai/api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(ENGINE)
    for package in [*server.parents][:3]:
        (package / "__init__.py").touch()
    for folder in ("models/policy", "weights"):
        (node.root / "policy" / folder).mkdir(parents=True)
    model = node.root / "policy/models/policy/config.json"
    model.write_text('{"architectures": ["Qwen2ForCausalLM"]}')

    pod, agents = agents_pod()
    patch = patches()["DaemonSet"]["spec"]["template"]["spec"]
    pod |= {**patch, "volumes": [*pod["volumes"], *patch["volumes"]]}
    (patched,) = patch["containers"]
    agents["agent"]["volumeMounts"] += patched["volumeMounts"]
    (secrets,) = (each["name"] for each in patched["volumeMounts"])
    (node.root / secrets).mkdir()
    token_file(node.root / secrets, "data", "d" * 24)
    Authority(node.root / secrets).file.rename(node.root / secrets / "ca.crt")
    asked = rosemux(agents["discover"]["args"], "--server", api, "--every-s", "1")
    node.start(pod, agents["discover"], asked, user=0, NODE_NAME="node-1")
    harvests = {"ROSEMUX_AGENT_MODE": "harvest", "ROSEMUX_AGENT_HTTP__PORT": "0"}
    agent = node.start(pod, agents["agent"], rosemux(agents["agent"]["args"]), user=0, **harvests)
    (container,) = PATCH["spec"]["template"]["spec"]["containers"]
    assert container == PRODUCTION
    serving = node.start(
        PATCH["spec"]["template"]["spec"], PRODUCTION, python("-c", SERVES), user=0
    )
    user = CONTAINERS["guest"]["securityContext"]["runAsUser"]
    fakes = {"PYTHONPATH": "/srv/fake", "HOME": "/tmp"}
    command = rosemux(CONTAINERS["guest"]["command"])
    guest = node.start(GUEST_POD, CONTAINERS["guest"], command, user=user, **fakes)

    wait_for(lambda: "listens on " in agent.read_text(), seconds=120)
    url = agent.read_text().split("listens on ")[1].split()[0]
    wanted = {"slot": SLOT, "tenant": "t", "job": "j", "duration_s": 60}

    def leased() -> bool:
        reply = call(f"http://{url}/v1/leases", wanted | {"request_id": "r1"})
        return bool(reply["type"] == "granted")

    wait_for(leased, seconds=180)
    wait_for(lambda: (last(guest) or {}).get("open"), seconds=60)
    assert last(serving) == "None", "production believes the agent's grant"

    pages = node.root / "run/rosemux" / SLOT
    assert (pages.stat().st_gid, oct(pages.stat().st_mode & 0o7777)) == (47100, "0o1770")
    names = ("grant", "guest", f"pulse.{VARIABLES['ROSEMUX_ENGINE']}.0")
    assert [(pages / name).stat().st_uid for name in names] == [0, user, 0]
    owners = PageOwners(agent=frozenset({0}), guest=frozenset({user}))
    grants = PageReader(pages / "grant", Grant, owners=owners.agent)
    guests = PageReader(pages / "guest", Guest, owners=owners.guest)
    # As documented: production's processes cannot be seen from the guest's pod.
    wait_for(lambda: (seen := guests.read().record) and "another pid" in seen.isolation_fault)
    granted = wait_for(lambda: grants.read().record)
    assert granted.blocking_ratio == 1.0

    (node.root / "run/rosemux/kill").write_text("drain")
    wait_for(lambda: not last(guest)["open"], seconds=30)
