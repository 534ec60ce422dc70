"""Two nodes and a cable: the page's blocks for a node and a gateway on machines of their own."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from tests.install.node import Node, NodeError
from tests.install.page import block

NODE, GATEWAY = "10.231.0.1", "10.231.0.2"
_HEADING = "Two machines, step by step"
_AUTHORITY, _ON_NODE, _ON_GATEWAY, _ROLLOUT = range(4)
_FOR_NODE = ("node.pem", "node.key", "agent.token", "engine.token")
_FOR_GATEWAY = (
    *("ca.pem", "gateway.pem", "gateway.key"),
    *("agent.token", "engine.token", "research.token"),
)
_CABLE = "cable"


def join(node: Node, gateway: Node) -> None:
    """A cable between two nodes, and the page's steps on both. The node has a guest, and the
    gateway's machine the environment and the users."""
    end, other_end = (str(each.process) for each in (node, gateway))
    cable = ["ip", "link", "add", _CABLE, "netns", end, "type", "veth"]
    subprocess.run([*cable, "peer", "name", _CABLE, "netns", other_end], check=True)
    for each, address in ((node, NODE), (gateway, GATEWAY)):
        each.run(f"ip address add {address}/24 dev {_CABLE}\nip link set {_CABLE} up", quiet=True)
    node.run(_own(_AUTHORITY))
    for name in _FOR_GATEWAY:
        shutil.copy(node.root / "srv/rosemux" / name, gateway.root / "srv/rosemux" / name)
    node.run(_own(_ON_NODE))
    gateway.run(_own(_ON_GATEWAY))


def lend_across(node: Node, gateway: Node) -> str:
    """A turn on the node's guest by the other machine's gateway, before and after the cable was
    out; what happened. Raises NodeError where one of it does not happen in time."""
    tokens = _roll_out(gateway)
    node.run(f"ip link set {_CABLE} down", quiet=True)
    out_s = _until(lambda: not _status(gateway)["leases"], within_s=15.0)
    # The agent ends it by itself: the gateway cannot reach it.
    _until(lambda: "lease_ended" in _audit(node), within_s=15.0)
    node.run(f"ip link set {_CABLE} up", quiet=True)
    tokens += _roll_out(gateway)
    return f"{tokens} tokens across the cable; the lease was gone {out_s:.1f} s after it"


def _own(number: int) -> str:
    return block(_HEADING, number).replace("192.0.2.21", NODE).replace("192.0.2.10", GATEWAY)


def _roll_out(gateway: Node) -> int:
    """Tokens of one turn, all from the guest."""
    (choice,) = json.loads(gateway.run(_own(_ROLLOUT), quiet=True))["choices"]
    engines = {span["engine"] for span in choice["spans"]}
    if len(choice["token_ids"]) != 128 or len(engines) != 1:
        raise NodeError(f"no whole turn of the guest: {choice}")
    return len(choice["token_ids"])


def _status(gateway: Node) -> dict[str, Any]:
    url = f"https://{GATEWAY}:8300/v1/status"
    header = '--header "Authorization: Bearer $(cat research.token)"'
    said = gateway.run(f"curl --silent --fail --cacert ca.pem {header} {url}", quiet=True)
    return dict(json.loads(said))


def _audit(node: Node) -> str:
    return node.run("tail -n 3 /var/lib/rosemux/audit.jsonl", quiet=True)


def _until(holds: Callable[[], bool], *, within_s: float) -> float:
    """Seconds until it held."""
    began_s = time.monotonic()  # noqa: TID251
    while not holds():
        if time.monotonic() - began_s > within_s:  # noqa: TID251
            raise NodeError(f"not within {within_s:g} s")
        time.sleep(0.2)
    return time.monotonic() - began_s  # noqa: TID251
