"""The machine and the holder: full disks, jumping clocks, torn records, files that change."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

from safetensors import SafetensorError

from benchmarks.weightsync.faults.fault import FaultClass, Mend, nothing
from benchmarks.weightsync.faults.holders import Claim, directory_contents
from benchmarks.weightsync.faults.states import states
from benchmarks.weightsync.faults.template import ANCHOR_EVERY, HELD_VERSION
from benchmarks.weightsync.faults.world import FaultWorld
from harvester.contracts.errors import Corrupt, Exhausted, Stale
from harvester.contracts.ids import WeightVersion
from weightsync.follower import Follower
from weightsync.layout.apply_journal import RECORD_FILE
from weightsync.layout.durable import write_durably
from weightsync.publish.directory_writer import WritableDirectory
from weightsync.publish.settings import VersionSettings, WorkSettings
from weightsync.publisher import Publisher
from weightsync.receive.checkpoint import reading
from weightsync.receiver import Receiver

_JUMPS_S = (-1e9, -3600.0, -1.0, 0.0, 1e-9, 3600.0, 1e9)


class JumpingClock:
    """Each reading is a jump from the one before."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._now_s = 0.0

    def now(self) -> float:
        self._now_s += self._rng.choice(_JUMPS_S)
        return self._now_s


def _clock_jumps(world: FaultWorld) -> Mend:
    """Publisher and holder read it; nothing may depend on it."""
    world.clock = JumpingClock(world.rng)
    world.hold_any()
    with Publisher(
        world.store, versions=VersionSettings(anchor_every=2), work=WorkSettings(clock=world.clock)
    ) as publisher:
        for _ in range(2):
            world.publish_with(publisher)
            world.attempt()
    return world.republish


def _disk_full_while_publishing(world: FaultWorld) -> Mend:
    """The same publisher goes on when there is room again."""
    world.hold_any()
    room = world.rng.randrange(1, 1 << 20)
    full = True

    def write(path: Path, chunks: Iterable[Any]) -> int:
        nonlocal room
        data = b"".join(bytes(memoryview(chunk).cast("B")) for chunk in chunks)
        if full and len(data) >= room:
            path.write_bytes(data[:room])
            raise OSError(world.rng.choice([errno.ENOSPC, errno.EDQUOT]), "No space left on device")
        room -= len(data) if full else 0
        return write_durably(path, [data])

    publisher = Publisher(
        WritableDirectory(world.store, write=write),
        versions=VersionSettings(anchor_every=ANCHOR_EVERY),
    )
    with suppress(Exhausted):
        world.publish_with(publisher)
        world.publish_with(publisher)

    def mend() -> None:
        nonlocal full
        full = False
        with publisher:
            world.publish_with(publisher)

    return mend


class Tmpfs:
    """A file system of a given size over a directory; needs root."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))

    def grow(self) -> None:
        _mount("-o", "remount,size=64m", str(self.path))

    def end(self) -> None:
        subprocess.run(["umount", "-l", self.path], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def may_mount(directory: Path) -> bool:
    """Whether this user may mount a file system."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    try:
        Tmpfs(directory / "probe", 4096).end()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _small_disk_for_the_store(world: FaultWorld) -> Mend:
    """A real file system that is full at some byte of a publish."""
    used = sum(path.stat().st_size + 4096 for path in world.store.rglob("*"))
    shutil.rmtree(world.store)
    disk = Tmpfs(world.store, used + world.rng.randrange(1 << 20, 3 << 20))
    world.ends.append(disk.end)
    shutil.copytree(world.pristine, world.store, dirs_exist_ok=True)
    world.hold_any()
    publisher = Publisher(world.store, versions=VersionSettings(anchor_every=1))
    with suppress(Exhausted):
        world.publish_with(publisher)
        world.publish_with(publisher)

    def mend() -> None:
        disk.grow()
        with publisher:
            world.publish_with(publisher)

    return mend


def _small_disk_for_the_directory(world: FaultWorld) -> Mend:
    """A real file system that is full when a directory is first pulled, or at its next record."""
    fresh = world.rng.random() < 0.5
    directory = world.root / "held"
    size_bytes = world.rng.randrange(1 << 16, 2 << 20) if fresh else 8 << 20
    disk = Tmpfs(directory, size_bytes)
    world.ends.append(disk.end)
    if not fresh:
        shutil.copytree(world.template.held, directory, dirs_exist_ok=True)
        with suppress(OSError), (directory / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(1 << 12))
    world.hold_directory(fresh=True)
    return disk.grow


def _record(world: FaultWorld) -> Mend:
    """SkyRL's torn state file: ours is torn, bent, missing or of another version."""
    holder = world.hold_directory()
    record = holder.directory / RECORD_FILE
    raw = record.read_bytes()
    choice = world.rng.randrange(5)
    if choice == 0:
        record.write_bytes(raw[: world.rng.randrange(len(raw))])
    elif choice == 1:
        bent = bytearray(raw)
        bent[world.rng.randrange(len(raw))] ^= 1 << world.rng.randrange(8)
        record.write_bytes(bent)
    elif choice == 2:
        record.write_bytes(raw.replace(b'"version":5', b'"version":6'))
    elif choice == 3:
        record.unlink()
        record.mkdir()
    else:
        record.write_bytes(b"[" * 100_000)

    def mend() -> None:
        if record.is_dir():
            record.rmdir()

    return mend


def _rot(world: FaultWorld) -> Mend:
    """Files of the directory change while no process has them open."""
    directory = world.hold_directory().directory
    shard = directory / "model-00001-of-00001.safetensors"
    raw = bytearray(shard.read_bytes())
    choice = world.rng.randrange(4)
    if choice == 0:
        for _ in range(world.rng.choice([1, 100])):
            raw[world.rng.randrange(len(raw))] ^= 1 << world.rng.randrange(8)
        shard.write_bytes(raw)
    elif choice == 1:
        shard.write_bytes(raw[: world.rng.randrange(len(raw))])
    elif choice == 2:
        shard.unlink()
    else:
        index = directory / "model.safetensors.index.json"
        index.write_bytes(index.read_bytes()[: world.rng.randrange(100)])
    # A rotted file claims to be whole until it is opened; then nothing may mend it at once.
    if world.rng.random() < 0.5:
        return nothing
    world.latest_file.unlink()
    return world.restore


def _wrong_base(world: FaultWorld) -> Mend:
    """The holder believes that it is at 5; its bits are those of an older state."""
    old = states(world.template.seed)[world.rng.randrange(HELD_VERSION - 1)]
    if world.rng.random() < 0.5:
        memory = world.hold_memory()
        for name, bits in old.items():
            memory.bits[name][...] = bits
        return nothing
    holder = world.hold_directory()
    record = (holder.directory / RECORD_FILE).read_bytes()
    shutil.rmtree(holder.directory)
    version = WeightVersion(world.rng.randrange(1, HELD_VERSION))
    receiver = Receiver(world.store)
    with Follower(receiver, holder.directory) as follows:
        follows.pull(version)
    receiver.close()
    (holder.directory / RECORD_FILE).write_bytes(record)
    return nothing


def _repaired_under_its_name(world: FaultWorld) -> Mend:
    """SkyRL's cached corrupt payload: it is seen broken several times, then it is whole."""
    world.hold_any()
    shard = world.shard(world.newest)
    raw = bytearray(shard.read_bytes())
    for at in range(len(raw) // 2, len(raw), 7):
        raw[at] ^= 0x55
    shard.write_bytes(raw)
    for _ in range(3):
        world.attempt()
    return world.restore


def _read_while_applied(world: FaultWorld) -> Mend:
    """A reader loads the directory again and again while it goes from version to version."""
    holder = world.hold_directory()

    def pulls() -> None:
        receiver = Receiver(world.store)
        with Follower(receiver, holder.directory) as follows:
            for version in (6, 5, 3, 6, 1, world.newest):
                follows.pull(WeightVersion(version))
        receiver.close()

    puller = Thread(target=pulls)
    puller.start()
    while puller.is_alive():
        # Only a block that ends without an exception vouches for its reads.
        with suppress(Stale, Corrupt, OSError, SafetensorError):
            with reading(holder.directory) as held:
                found = directory_contents(holder.directory)
            world.judge(Claim(held.version, held.state_hash), found)
    puller.join()
    return nothing


MACHINE: tuple[FaultClass, ...] = (
    FaultClass("clock jumps", _clock_jumps),
    FaultClass("disk full while publishing", _disk_full_while_publishing),
    FaultClass("SkyRL: the record of what is held is torn", _record),
    FaultClass("SkyRL: a corrupt payload is seen, then repaired", _repaired_under_its_name),
    FaultClass("files of the directory change", _rot),
    FaultClass("wrong base: the holder has other bits", _wrong_base),
    FaultClass("the directory is read while it changes", _read_while_applied),
)
DISKS: tuple[FaultClass, ...] = (
    FaultClass("a small disk for the store", _small_disk_for_the_store),
    FaultClass("a small disk for the directory", _small_disk_for_the_directory),
)
"""Need `may_mount`."""
