"""Kills on the way: a receiver, a server or a relay dies while a version crosses a link."""

import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from benchmarks.weightsync.faults.fault import FaultClass, Mend, nothing
from benchmarks.weightsync.faults.tasks import ChildDeath, ChildTask
from benchmarks.weightsync.faults.world import FaultWorld
from harvester.platform.backoff import RetryLimits
from weightsync.transport.access import Access
from weightsync.transport.http_source import HttpSource

_HASTY = Access(
    streams=3,
    range_bytes=64 << 10,
    stall_s=0.5,
    retries=RetryLimits(give_up_s=0.5, first_wait_s=0.005, wait_max_s=0.05),
)
"""Small ranges and short waits: many of both in a store of a few megabytes."""
_SERVER_CALLS = 60
"""Files that a server opens for a first pull, about; a death after them is tried again earlier."""


def _free_port() -> int:
    with closing(socket.socket()) as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def _server(world: FaultWorld, port: int, death: ChildDeath = ChildDeath()) -> ChildTask:
    return ChildTask(
        role="serve", store=str(world.root), port=port, target=world.new_stop(), death=death
    )


def _relay(
    world: FaultWorld, port: int, upstream: int, death: ChildDeath = ChildDeath()
) -> ChildTask:
    return ChildTask(
        role="relay",
        store=f"http://127.0.0.1:{upstream}",
        cache=str(world.root / "relayed"),
        port=port,
        target=world.new_stop(),
        death=death,
    )


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}/stores/store"


def _read_from(world: FaultWorld, port: int) -> None:
    world.read_by(lambda: HttpSource(_url(port), _HASTY))
    world.hold_any()


def _dying_server(how: str) -> Callable[[FaultWorld], Mend]:
    def strike(world: FaultWorld) -> Mend:
        port = _free_port()
        _read_from(world, port)
        reach = 1.0
        while True:
            world.serve(0, _server(world, port, _death(world, how, reach)))
            world.attempt()
            if world.stop(0).killed:
                break
            world.hold_again()
            reach *= 0.6
        return lambda: world.keep_serving(0, _server(world, port))

    return strike


def _dying_relay(how: str) -> Callable[[FaultWorld], Mend]:
    """A relay that dies; its cache keeps its pulled versions, torn at the point of death."""

    def strike(world: FaultWorld) -> Mend:
        upstream, port = _free_port(), _free_port()
        world.keep_serving(0, _server(world, upstream))
        _read_from(world, port)
        reach = 1.0
        while True:
            world.serve(1, _relay(world, port, upstream, _death(world, how, reach)))
            world.attempt()
            if world.stop(1).killed:
                break
            world.hold_again()
            reach *= 0.6
        return lambda: world.keep_serving(1, _relay(world, port, upstream))

    return strike


def _dying_receiver(world: FaultWorld) -> Mend:
    port = _free_port()
    world.keep_serving(0, _server(world, port))
    fresh = world.rng.random() < 0.5
    world.read_by(lambda: HttpSource(_url(port), _HASTY))
    world.hold_directory(fresh=fresh)

    def task(death: ChildDeath, target: Path = world.root / "held") -> ChildTask:
        return ChildTask(role="pull", store=_url(port), target=str(target), death=death)

    def measured() -> ChildTask:
        target = world.root / "measured"
        if not fresh:
            world.copy_held(target)
        return task(ChildDeath(), target)

    whole = world.zygote.whole(
        f"pull over HTTP {fresh} {world.encoding} {world.division}", measured
    )
    world.zygote.kill(task, how="instant", whole=whole, rng=world.rng)
    return nothing


def _death(world: FaultWorld, how: str, reach: float) -> ChildDeath:
    part = world.rng.random() * reach
    if how == "call":
        return ChildDeath(after_calls=1 + int(part * _SERVER_CALLS))
    return ChildDeath(after_s=0.05 * part)


TRANSFERS: tuple[FaultClass, ...] = (
    FaultClass("kill a server at a call", _dying_server("call")),
    FaultClass("kill a server at an instant", _dying_server("instant")),
    FaultClass("kill a relay at a call", _dying_relay("call")),
    FaultClass("kill a relay at an instant", _dying_relay("instant")),
    FaultClass("kill a receiver while it reads over HTTP", _dying_receiver),
)
