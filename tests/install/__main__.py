"""`python -m tests.install`: the commands of docs/install.md as they stand there, on a new node.

The agent is installed from the lock and started by its unit, and so is a gateway, which must come
back after SIGKILL. Production starts beside them by the page's command, with the observer alone,
until the agent believes its pulse. With `--guest` the guest starts by its unit too, and rollouts
through the gateway must get tokens. With `--cluster` the gateway then moves to a second node.
Then the page's way back. The guest's part needs a machine that is idle, as an idle guest has no
other core time.

Replaced are only a machine's own settings: two small models, the size of the guest's KV. The node
has no network: wheels of the agent's part come from a folder, and what a guest needs beyond them is
what `make setup` installed in .venv, where pip finds each locked version present.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from coserve.vllm import launch
from coserve.vllm.capabilities import capabilities, installed_vllm_version
from coserve.vllm.launch import EngineSpec
from examples.grpo.model import write_checkpoint
from tests.install import cluster
from tests.install.node import PATH, Node, NodeError
from tests.install.page import block
from tests.integration.engine_slot import CONTEXT_TOKENS, SHAPE

REPOSITORY = Path(__file__).parents[2]
WHEELS = REPOSITORY / "build/agent-wheels"
SITE = Path(sysconfig.get_path("purelib"))
AGENT_BYTES_MAX = 150 << 20
TOKENS = 1000
KV_BYTES = 1 << 30
LEFT = {"/var/lib/rosemux", "/var/lib/rosemux-guest", "/var/lib/rosemux-gateway"}
"""Audit, journals and states: the page says that they stay."""
_began = time.monotonic()  # noqa: TID251


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.install")
    parser.add_argument("--guest", action="store_true", help="a guest too, until it is lent tokens")
    parser.add_argument("--cluster", action="store_true", help="then a gateway on a second node")
    asked = parser.parse_args()
    if asked.cluster and not asked.guest:
        parser.error("--cluster needs --guest")
    if os.geteuid() != 0:
        sys.exit("install: needs root, for the node's namespaces")
    # The node ends with this process, however that ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    fetch_wheels()
    with Node(SITE) as node:
        say("the node has booted")
        copy_checkout(node)
        try:
            install_agent(node)
            start_gateway(node)
            require_tokens(node)
            discover(node)
            start_production(node)
            if asked.guest:
                start_guest(node)
                lend(node)
                if asked.cluster:
                    form_cluster(node)
            else:
                wait_for_pulse(node)
            undo(node)
        except NodeError as error:
            print(error, file=sys.stderr)
            units = "-u rosemux-agent -u 'rosemux-guest@*' -u vllm"
            print(node.run(f"journalctl --no-pager --output cat -n 150 {units}", quiet=True))
            sys.exit(1)
    say("done")


def say(what: str) -> None:
    print(f"install: {time.monotonic() - _began:5.1f} s: {what}", flush=True)  # noqa: TID251


def fetch_wheels() -> None:
    """The agent's part of the lock as files, by its hashes."""
    names = (REPOSITORY / "deploy/lock/agent.txt").read_text().split("\n")[1:-1]
    entries = re.split(r"(?m)^(?=[a-z])", (REPOSITORY / "requirements.lock").read_text())
    part = "".join(each for each in entries if each.partition("==")[0] in names)
    WHEELS.mkdir(parents=True, exist_ok=True)
    kept = WHEELS / "wheels.lock"
    if kept.exists() and kept.read_text() == part:
        return
    shutil.rmtree(WHEELS)
    WHEELS.mkdir()
    asked = WHEELS / "asked.lock"
    asked.write_text(part)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--dest", str(WHEELS), "--requirement", str(asked)]
    subprocess.run(command, check=True)
    asked.rename(kept)
    say(f"{len(names)} wheels are here")


def copy_checkout(node: Node) -> None:
    """Copies the files that git knows or does not ignore: as a clone of this tree would be."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True).stdout
    for name in filter(None, files.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            there = node.root / "srv/rosemux" / name
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, there)
    shutil.copytree(WHEELS, node.root / "srv/wheels")


def install_agent(node: Node) -> None:
    said = node.run(block("Install on a node"), environment=offline())
    used = int(node.run("du -s --bytes /opt/rosemux", quiet=True).split()[0])
    say(f"the agent is installed, in {used / 1e6:.0f} MB, and runs")
    if used > AGENT_BYTES_MAX:
        raise NodeError(f"the agent's environment has {used} bytes, more than {AGENT_BYTES_MAX}")
    if "mode observe" not in said:
        raise NodeError(f"no agent in observation:\n{said}")
    have = node.run("ls /opt/rosemux/lib/python3.11/site-packages", quiet=True).split()
    if unwelcome := {"numpy", "numba", "torch", "vllm"} & {*have}:
        raise NodeError(f"the agent's environment has {unwelcome}")


def start_gateway(node: Node) -> None:
    """A gateway by its unit, which systemd starts again when it is killed."""
    said = block("Start a gateway")
    node.run(said)
    *_, asks = said.strip().splitlines()
    node.run(
        "first=$(systemctl show --value -p MainPID rosemux-gateway)\n"
        "systemctl kill --signal=KILL rosemux-gateway\n"
        "until now=$(systemctl show --value -p MainPID rosemux-gateway)\n"
        "[[ $now != 0 && $now != $first ]]; do sleep 0.2; done\n" + asks
    )
    say("a gateway is installed, runs, and comes back when it is killed")


def require_tokens(node: Node) -> None:
    """The page's tokens: the gateway's renews, the guest's user has none. Then as before again."""
    stop = "rosemux drain --reason test"
    url = "http://127.0.0.1:9711/v1/stops"
    node.run(
        "cp -a /etc/rosemux /srv/settings\n"
        f"{block('Tokens on one machine')}\n"
        "ask='curl --silent --output /dev/null --write-out %{http_code}'\n"
        f"[[ $(runuser -u rosemux-guest -- $ask {url}) == 401 ]]\n"
        "runuser -u rosemux-guest -- test ! -r /etc/rosemux/agent.token\n"
        f"if {stop}; then exit 1; fi\n"
        f"{stop} --token-file /etc/rosemux/operator.token\n"
        "rosemux resume --token-file /etc/rosemux/operator.token\n"
        "gateway='rosemux status --gateway http://127.0.0.1:8300'\n"
        "for _ in {1..50}; do if $gateway | grep slot0; then break; fi; sleep 0.2; done\n"
        "$gateway | grep slot0\n"
        "rm -r /etc/rosemux; mv /srv/settings /etc/rosemux\n"
        "systemctl restart rosemux-agent rosemux-gateway"
    )
    say("with tokens the gateway knows the slots, and the guest's user is refused")


def discover(node: Node) -> None:
    """The slots of two units, of which one ends; the agent follows, and goes on with its own."""
    units = node.root / "etc/systemd/system"
    (units / "vllm@.service").write_text(
        "[Service]\n"
        "Environment=ROSEMUX_PAGE_DIR=/run/rosemux/%i\n"
        "ExecStart=/bin/sh -c 'exec sleep 1d' --port 8123\n"
    )
    # One is that of the agent's own file, as its page's command would make it.
    for port, name in enumerate(("found", "ends", "slot0"), start=8124):
        (units / f"vllm@{name}.service.d").mkdir()
        own = f"[Service]\nEnvironment=ROSEMUX_SLOT_GUEST_PORT={port}\n"
        (units / f"vllm@{name}.service.d/port.conf").write_text(own)
    node.run("systemctl start vllm@found vllm@ends vllm@slot0")
    said = node.run(block("Discover production engines"))
    if said.count("engine_url: http://127.0.0.1:812") != 3:
        raise NodeError(f"three slots are not there:\n{said}")
    node.run(
        "function slots { curl --silent --show-error --fail http://127.0.0.1:9711/v1/slots; }\n"
        "until slots | grep found && slots | grep ends && slots | grep slot0; do sleep 0.5; done\n"
        "systemctl stop vllm@ends\n"
        "sed -i 's/ --write/ --forget-s 0 --write/' /etc/systemd/system/rosemux-discover.service\n"
        "systemctl daemon-reload; systemctl restart rosemux-discover\n"
        "until ! slots | grep ends; do sleep 0.5; done\n"
        "slots | grep found\n"
        "systemctl stop vllm@found vllm@slot0",
        quiet=True,
        timeout_s=60.0,
    )
    say("slots of units that start are found, and of one that ends forgotten")


def offline() -> dict[str, str]:
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/srv/wheels", "PIP_ROOT_USER_ACTION": "ignore"}


def start_production(node: Node) -> None:
    """An engine of a service of its own, started by the page's command."""
    node.run("python3.11 -m venv --without-pip /opt/vllm")
    site = node.show_packages("/opt/vllm")
    # vLLM's CPU build has a distribution name of its own, which the command `vllm` refuses.
    node.run(
        f"rm -r {site}/rosemux*\n"
        "{ printf '#!/opt/vllm/bin/python\\nimport sys\\n\\ndel sys.argv[1]\\n'; "
        "cat tests/integration/vllm_serve.py; } >/opt/vllm/bin/vllm\n"
        "chmod +x /opt/vllm/bin/vllm\n"
        "install -d -o vllm -g vllm /var/lib/vllm"
    )
    node.run(block("Production's command", 1), environment=offline())
    write_checkpoint(node.root / "srv/models/production", SHAPE)
    engine = launch.stock(
        EngineSpec(
            name="production",
            model=Path("/srv/models/production"),
            port=8000,
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=8,
            vllm=capabilities(installed_vllm_version()),
            extra_arguments=("--load-format", "dummy"),
        )
    )
    flags = engine.arguments[engine.arguments.index("--served-model-name") :]
    command = block("Production's command").rstrip()
    (node.root / "srv/production").write_text(f"{command} {' '.join(flags)}\n")
    own = {
        "MODEL": "/srv/models/production",
        "HOME": "/var/lib/vllm",
        "PATH": f"/opt/vllm/bin:{PATH}",
    }
    settings = " ".join(
        f"--setenv={name}={shlex.quote(value)}"
        for name, value in (engine.environment | own).items()
    )
    node.run(f"systemd-run --unit=vllm --uid=vllm --gid=vllm {settings} bash /srv/production")
    say("production starts")


def wait_for_pulse(node: Node) -> None:
    """Until the agent learns production's step times, which it does of a pulse that it believes."""
    node.run(
        'until rosemux audit --json /etc/rosemux/agent.yaml | grep \'"to":"learning"\'\n'
        "do systemctl --quiet is-active vllm; sleep 1; done",
        timeout_s=600.0,
        quiet=True,
    )
    say("the agent believes production's pulse")


def start_guest(node: Node) -> None:
    """vLLM beside the agent, and the guest by its unit."""
    write_checkpoint(node.root / "srv/models/policy", SHAPE)
    node.run(
        "mkdir -p /srv/weights\n"
        f"sed -i 's/kv_cache_bytes: .*/kv_cache_bytes: {KV_BYTES}/' /etc/rosemux/agent.yaml"
    )
    node.show_packages("/opt/rosemux")
    node.run(block("Start a guest"), environment=offline(), timeout_s=600.0)
    say("the guest's environment is installed, the guest starts")


def lend(node: Node) -> None:
    """Waits for both engines, then rolls out on the guest that the gateway has leased."""
    python = "/opt/rosemux/bin/python -m tests.install.lending"
    said = node.run(f"{python} {TOKENS}", environment={"PYTHONPATH": "/srv/rosemux"}, timeout_s=900)
    say(said.strip().splitlines()[-1])


def form_cluster(node: Node) -> None:
    """The gateway moves to a machine of its own, by the page."""
    node.run("systemctl disable --now rosemux-gateway")
    with Node(SITE) as gateway:
        copy_checkout(gateway)
        environment, command, users, *_ = block("Install on a node").splitlines(keepends=True)
        gateway.run(environment + command + users, environment=offline())
        try:
            cluster.join(node, gateway)
            say("a second node has a gateway, the first one listens to it")
            say(cluster.lend_across(node, gateway))
        except NodeError:
            print(gateway.run("journalctl --no-pager -o cat -n 50 -u rosemux-gateway", quiet=True))
            raise


def undo(node: Node) -> None:
    """The page's way back, where production has ended its pulse: here by ending itself."""
    node.run("if systemctl --quiet is-active vllm; then systemctl stop vllm; fi")
    # The page removes the environment; only here is something mounted in it.
    site = "/opt/rosemux/lib/python3.11/site-packages"
    node.run(f"if mountpoint --quiet {site}; then umount --lazy {site}; fi", quiet=True)
    node.run(block("Undo"))
    log = node.run("journalctl -o cat -u rosemux-agent -u 'rosemux-guest@*'", quiet=True)
    # It was killed on purpose, which its unit calls a failure.
    killed = node.run("journalctl -o cat -u rosemux-gateway", quiet=True)
    for wrong in ("Traceback", "Failed with result"):
        if wrong in log + killed.replace("Failed with result 'signal'", "", 1):
            raise NodeError(f"{wrong!r} in the units' log")
    left = node.run(
        "find /etc /opt /usr /usr/local /var -xdev -name '*rosemux*' -prune\n"
        "if [[ -e /run/rosemux ]]; then find /run/rosemux; fi",
        quiet=True,
    )
    if {*left.split()} - LEFT:
        raise NodeError(f"left after the page's undo: {left}")
    say("undone")


if __name__ == "__main__":
    main()
