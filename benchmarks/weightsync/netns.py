"""Two network namespaces with one slow link between them, gone again when the block ends.

Needs root, `ip` and `tc`. Names carry this process's id, so that two runs do not meet.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from harvester.contracts.errors import Unsupported

_BURST = "64kb"
_QUEUE = "50ms"
"""Buffer of a router, as time at the link's rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    origin: str
    """Name of the namespace at the far end."""
    edge: str
    origin_address: str
    edge_device: str

    def run(self, namespace: str, command: Sequence[str]) -> list[str]:
        """The command, to be run in a namespace; it keeps its process id."""
        return ["ip", "netns", "exec", namespace, *command]

    def received_bytes(self) -> int:
        """Bytes received over the link at the edge, headers included."""
        shown = _output("ip", "-n", self.edge, "-s", "-j", "link", "show", self.edge_device)
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])


@contextmanager
def slow_link(*, mbit: float) -> Iterator[SlowLink]:
    """Raises Unsupported where this machine cannot make one."""
    if os.geteuid() != 0:
        raise Unsupported("a slow link needs root: run this as root, or in a container that has it")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise Unsupported(f"a slow link needs `{program}` (Debian: iproute2)")
    tag = f"rmx{os.getpid()}"
    link = SlowLink(
        origin=f"{tag}o", edge=f"{tag}e", origin_address="10.231.0.1", edge_device=f"{tag}e"
    )
    with ExitStack() as stack:
        for namespace in (link.origin, link.edge):
            # Registered first: an interrupt in between leaves nothing. The link goes with its ends.
            stack.callback(subprocess.run, ["ip", "netns", "del", namespace], capture_output=True)
            _output("ip", "netns", "add", namespace)
            _output("ip", "-n", namespace, "link", "set", "lo", "up")
        _output(
            *("ip", "link", "add", link.origin, "netns", link.origin, "type", "veth"),
            *("peer", "name", link.edge_device, "netns", link.edge),
        )
        for namespace, address in ((link.origin, link.origin_address), (link.edge, "10.231.0.2")):
            _output("ip", "-n", namespace, "addr", "add", f"{address}/30", "dev", namespace)
            _output("ip", "-n", namespace, "link", "set", namespace, "up")
            _output(
                *("tc", "-n", namespace, "qdisc", "add", "dev", namespace, "root", "tbf"),
                *("rate", f"{mbit:g}mbit", "burst", _BURST, "latency", _QUEUE),
            )
        yield link


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unsupported(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
