"""`rosemux weights`: stores and local copies of them, from a shell.

`pull` keeps a local checkpoint directory at a version of a store; the other commands are
transport's.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harvester.contracts.errors import (
    ConfigError,
    Corrupt,
    Exhausted,
    PeerProtocolError,
    Stale,
)
from harvester.contracts.ids import WeightVersion
from weightsync.reading.memory_room import STAGING_BYTES
from weightsync.transport.command import list_stores, relay, serve

if TYPE_CHECKING:
    from weightsync.follower import CheckpointFollower, Pulled

weights = typer.Typer(add_completion=False, no_args_is_help=True)
weights.command()(serve)
weights.command()(relay)
weights.command(name="ls")(list_stores)

_WAIT_S = 30.0
"""Timeout of a question for the next version: as long as a RoseMux server holds one back."""
_PASSING = (Corrupt, Exhausted, PeerProtocolError, Stale)
"""Faults that a publisher, a disk or a relay may clear without this process."""


@weights.callback()
def _weights() -> None:
    """Pull, serve, relay and list published weights."""


@weights.command()
def pull(
    store: Annotated[str, typer.Argument(help="The weight store.")],
    directory: Annotated[
        Path, typer.Argument(help="Checkpoint directory to update; created if absent.")
    ],
    version: Annotated[
        int | None, typer.Option(min=1, help="Version to pull; the newest by default.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the newest version until interrupted.")
    ] = False,
    every: Annotated[
        float,
        typer.Option(min=0.01, help="Seconds between two checks, where no server reports changes."),
    ] = 1.0,
    threads: Annotated[int, typer.Option(min=1, max=256)] = 2,
    staging_bytes: Annotated[
        int, typer.Option(help="Memory that a version may take; the rest is kept in DIRECTORY.")
    ] = STAGING_BYTES,
) -> None:
    """Bring a local checkpoint directory to a published version, and keep it there.

    The directory can be loaded by any engine. Interrupted at any instant it is repaired by the next
    pull; `rosemux.json` in it says which version it holds, or that an apply is in progress.
    """
    if watch and version is not None:
        raise ConfigError("--watch follows the newest version: leave --version out")
    from weightsync.encoding.codec import warm_up
    from weightsync.follower import CheckpointFollower
    from weightsync.receiver import Receiver

    receiver = Receiver(store, threads=threads, staging_bytes=staging_bytes, spool_dir=directory)
    try:
        with CheckpointFollower(receiver, directory, threads=threads) as follower:
            typer.echo(_standing(follower, directory))
            warm_up()
            if watch:
                _follow(follower, every_s=every)
            else:
                wanted = None if version is None else WeightVersion(version)
                typer.echo(_told(follower.pull(wanted)))
    finally:
        receiver.close()


def _follow(follower: "CheckpointFollower", *, every_s: float) -> None:
    """Pull every new version; passing faults are reported once and retried."""
    complaint = ""
    while True:
        try:
            if follower.newer(wait_s=_WAIT_S) is not None:
                typer.echo(_told(follower.pull()))
            complaint = ""
            if follower.announces:
                continue
        except _PASSING as error:
            if str(error) != complaint:
                complaint = str(error)
                typer.echo(f"rosemux: {error}; trying again", err=True)
        time.sleep(every_s)


def _standing(follower: "CheckpointFollower", directory: Path) -> str:
    if follower.held is not None:
        return f"{directory} holds version {follower.held.version}, {follower.held.state_hash}"
    if follower.interrupted:
        return f"{directory} is between two versions: an apply was interrupted; it is repaired now"
    return f"{directory} holds no version yet"


def _told(pulled: "Pulled") -> str:
    what = "repaired, " if pulled.mended else ""
    how = "from a full checkpoint" if pulled.from_full else "from deltas"
    return (
        f"version {pulled.version}, {pulled.state_hash}: {what}{pulled.tensors_written} tensors "
        f"written {how}, {pulled.bytes_read / 1e6:.1f} MB read, {pulled.seconds:.2f} s"
    )
