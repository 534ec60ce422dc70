"""Damaged payloads: plain ones, and forged ones with the damaged file's digest in the index."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import xxhash

from benchmarks.weightsync.faults.fault import FaultClass, Mend, damaging
from benchmarks.weightsync.faults.template import HELD_VERSION, NEWEST, SKIPPING
from benchmarks.weightsync.faults.world import FaultWorld, shards
from weightsync.encoding.codec import Encoding
from weightsync.layout.names import INDEX_FILE, READY_FILE, Kind
from weightsync.layout.shard import shard_header

Bend = Callable[[bytes, Random], bytes]


def torn(raw: bytes, rng: Random) -> bytes:
    """The tail was never written."""
    cut = rng.randrange(len(raw))
    return raw[:cut] + bytes(len(raw) - cut)


def truncated(raw: bytes, rng: Random) -> bytes:
    return raw[: rng.randrange(len(raw))]


def lengthened(raw: bytes, rng: Random) -> bytes:
    return raw + rng.randbytes(1 + rng.randrange(100))


def flipped(raw: bytes, rng: Random) -> bytes:
    bent = bytearray(raw)
    for _ in range(rng.choice([1, 1, 3])):
        bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
    return bytes(bent)


def reordered(raw: bytes, rng: Random) -> bytes:
    size = 1 + rng.randrange(max(1, len(raw) // 4))
    blocks = [raw[i : i + size] for i in range(0, len(raw), size)]
    i, j = rng.sample(range(len(blocks)), 2)
    blocks[i], blocks[j] = blocks[j], blocks[i]
    return b"".join(blocks)


def duplicated(raw: bytes, rng: Random) -> bytes:
    """A block comes twice, over its successor or before it."""
    size = 1 + rng.randrange(max(1, len(raw) // 4))
    at = rng.randrange(max(1, len(raw) - size))
    rest = at + size * rng.choice([1, 2])
    return raw[: at + size] + raw[at : at + size] + raw[rest:]


BENDS: dict[str, Bend] = {
    "torn": torn,
    "truncated": truncated,
    "lengthened": lengthened,
    "bit-flipped": flipped,
    "reordered": reordered,
    "duplicated": duplicated,
}


def forge(index: Path) -> None:
    """Writes the present sizes and digests of the files into their index."""
    fields = json.loads(index.read_bytes())
    for shard in shards(index.parent):
        raw = shard.read_bytes()
        fields["rosemux"]["files"][shard.name] = {
            "bytes": len(raw),
            "xxh3_128": xxhash.xxh3_128_hexdigest(raw),
        }
    index.write_text(json.dumps(fields))


def victims(world: FaultWorld) -> list[Path]:
    """Directories on the way to the newest version; the newest delta comes often."""
    delta = world.version_dir(world.newest)
    others = [
        world.version_dir(NEWEST - 1),
        world.version_dir(HELD_VERSION),
        world.version_dir(4, Kind.ANCHOR),
        world.version_dir(1),
    ]
    if world.newest == NEWEST:
        others.append(world.version_dir(NEWEST, Kind.ANCHOR))
    return [delta] * len(others) + others


def _bent(bend: Bend, *, forged: bool) -> Callable[[FaultWorld], None]:
    def damage(world: FaultWorld) -> None:
        directory = world.rng.choice(victims(world))
        shard = world.rng.choice(shards(directory))
        raw = shard.read_bytes()
        shard.write_bytes(bend(raw, world.rng))
        if forged:
            forge(directory / INDEX_FILE)
            fields = json.loads((directory / INDEX_FILE).read_bytes())
            if fields["metadata"].get("delta_encoding"):
                header = shard_header(np.frombuffer(raw, dtype=np.uint8))
                world.forged_delta |= header.layout.keys()

    return damage


def _bent_foreign(world: FaultWorld) -> None:
    """The newest delta of a store that has no digests of files, only checksums of tensors."""
    world.make_foreign()
    shard = world.shard(world.newest)
    shard.write_bytes(world.rng.choice(list(BENDS.values()))(shard.read_bytes(), world.rng))


def _missing(world: FaultWorld) -> None:
    directory = world.rng.choice(victims(world))
    what = world.rng.choice([world.rng.choice(shards(directory)).name, INDEX_FILE, "all"])
    if what == "all":
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
    else:
        (directory / what).unlink()


def _other_shard(world: FaultWorld) -> None:
    """The payload of another version under this one's index, its digest forged or not."""
    shard = world.shard(world.newest)
    shard.write_bytes(world.shard(world.rng.choice([1, 2, 3, HELD_VERSION])).read_bytes())
    if world.rng.random() < 0.5:
        forge(world.index(world.newest))


def _other_run(world: FaultWorld) -> None:
    """The delta of another run: whole, the right number, another base."""
    _replace_version(world, world.version_dir(world.newest))


def _replace_version(world: FaultWorld, directory: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(world.template.other(world.division) / directory.name, directory)


def _other_base(world: FaultWorld) -> None:
    """The index claims a base version other than the delta's."""
    index = world.index(world.newest)
    fields = json.loads(index.read_bytes())
    fields["metadata"]["base_version"] = f"{world.rng.choice([1, 2, 3, 4]):06d}"
    index.write_text(json.dumps(fields))


def _bomb(world: FaultWorld) -> None:
    """Tensors whose payload is a small frame that unpacks to gigabytes."""
    import zstandard

    announced = world.rng.random() < 0.5
    packer = zstandard.ZstdCompressor(level=3).compressobj(size=(1 << 28) if announced else -1)
    zeros = bytes(1 << 20)
    bomb = b"".join([*(packer.compress(zeros) for _ in range(1 << 8)), packer.flush()])
    _replace_payloads(world, bomb)


def _random_frames(world: FaultWorld) -> None:
    """Payloads that are whole zstd frames of nonsense: positions out of range, too many changes."""
    import zstandard

    raw = np.frombuffer(world.rng.randbytes(4096), dtype=np.uint8)
    _replace_payloads(world, zstandard.ZstdCompressor().compress(raw.tobytes()))


def _replace_payloads(world: FaultWorld, payload: bytes) -> None:
    from weightsync.elements.bits import TensorSpec
    from weightsync.layout.shard import shard_chunks

    shard = world.shard(world.newest)
    header = shard_header(np.frombuffer(shard.read_bytes(), dtype=np.uint8))
    layout = dict.fromkeys(header.layout, TensorSpec("U8", (len(payload),)))
    chunks = shard_chunks(layout, lambda _: payload, header.metadata)
    shard.write_bytes(b"".join(bytes(chunk) for chunk in chunks))
    forge(world.index(world.newest))


def _skip_delta(world: FaultWorld) -> Mend:
    """The skip delta on a joiner's way is bent, forged, of another run or another one's."""
    world.rng.choice([world.hold_directory, world.hold_memory])(fresh=True)
    directory = world.store / SKIPPING.directory
    shard, index = world.rng.choice(shards(directory)), directory / INDEX_FILE
    choice = world.rng.randrange(4)
    if choice == 0:
        shard.write_bytes(world.rng.choice(list(BENDS.values()))(shard.read_bytes(), world.rng))
        if world.rng.random() < 0.5:
            forge(index)
    elif choice == 1:
        _replace_version(world, directory)
    elif choice == 2:
        shutil.rmtree(directory)
        shutil.copytree(world.store / "skip_v000001_v000003", directory)
    else:
        world.rng.choice([shard, index, directory / READY_FILE]).unlink()
    return world.mend()


PAYLOADS: tuple[FaultClass, ...] = (
    *(damaging(f"payload {name}", _bent(bend, forged=False)) for name, bend in BENDS.items()),
    *(
        damaging(f"payload {name}, forged", _bent(bend, forged=True))
        for name, bend in BENDS.items()
    ),
    damaging("payload of a foreign store bent", _bent_foreign, encoding=Encoding.XOR),
    damaging("payload or index missing", _missing),
    damaging("wrong base: another version's payload", _other_shard, newest=NEWEST - 1),
    damaging("wrong base: another run's delta", _other_run),
    damaging("wrong base: the index names another", _other_base),
    FaultClass(
        "skip delta", _skip_delta, encoding=Encoding.ROSEMUX, in_store=True, newest=SKIPPING.version
    ),
    damaging("zstd bomb", _bomb),
    damaging("frames of nonsense", _random_frames),
)
