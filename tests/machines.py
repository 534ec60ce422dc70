"""Machines for tests: network namespaces on one switch, gone again when the block ends.

Names carry this process's id, so that two runs do not meet.
"""

import ctypes
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2)."""


@dataclass(frozen=True, slots=True)
class Machine:
    namespace: str
    address: str
    switch: str

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets and processes that this thread makes in the block are the machine's."""
        before = own_network()
        try:
            with Path(f"/run/netns/{self.namespace}").open() as there:
                enter_network(there.fileno())
            yield
        finally:
            enter_network(before)
            os.close(before)

    def plug(self, *, connected: bool) -> None:
        """Pulls the machine's cable out of the switch, or puts it back."""
        _ip("-n", self.switch, "link", "set", self.namespace, "up" if connected else "down")

    def slow(self, *, kbit: int) -> None:
        """Limits what the machine sends."""
        shape = f"tbf rate {kbit}kbit burst 2kb latency 2s".split()
        _output("tc", "-n", self.namespace, "qdisc", "add", "dev", "eth", "root", *shape)


@contextmanager
def machines(*names: str) -> Iterator[list[Machine]]:
    """One for each name, of a single letter. Skips the test where none can be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            pytest.skip(f"network namespaces need `{program}` (Debian: iproute2)")
    tag = f"rmx{os.getpid()}"
    switch = f"{tag}-"
    with ExitStack() as stack:
        try:
            _namespace(stack, switch)
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
            made = [
                _machine(stack, Machine(f"{tag}{name}", f"10.232.0.{at}", switch))
                for at, name in enumerate(names, start=1)
            ]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made


def _machine(stack: ExitStack, machine: Machine) -> Machine:
    name = machine.namespace
    _namespace(stack, name)
    cable = ("link", "add", "eth", "netns", name, "type", "veth", "peer", "name", name)
    _ip(*cable, "netns", machine.switch)
    _ip("-n", machine.switch, "link", "set", name, "master", "switch", "up")
    _ip("-n", name, "addr", "add", f"{machine.address}/24", "dev", "eth")
    _ip("-n", name, "link", "set", "eth", "up")
    return machine


def _namespace(stack: ExitStack, name: str) -> None:
    # Registered first: an interrupt in between leaves nothing.
    stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")


def own_network() -> int:
    """Descriptor of this thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def enter_network(descriptor: int) -> None:
    """This thread's sockets and processes are of that namespace; root's alone if it is another."""
    own = own_network()
    same = os.path.samestat(os.fstat(own), os.fstat(descriptor))
    os.close(own)
    # os.setns is Python 3.12's.
    libc = ctypes.CDLL(None, use_errno=True)
    if not same and libc.setns(descriptor, _NETWORK) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*arguments: str) -> None:
    _output("ip", *arguments)


def _output(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


def cut_off(caller: socket.socket) -> None:
    """No packet reaches the caller any more, and it acknowledges none."""
    so_attach_filter, drop_all = 26, struct.pack("HBBI", 0x06, 0, 0, 0)
    program = ctypes.create_string_buffer(drop_all)
    caller.setsockopt(
        socket.SOL_SOCKET, so_attach_filter, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    )
