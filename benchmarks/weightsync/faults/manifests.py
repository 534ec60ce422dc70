"""Damaged and hostile indexes, pointers and markers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.weightsync.faults.fault import FaultClass, Mend, damaging
from benchmarks.weightsync.faults.payloads import BENDS
from benchmarks.weightsync.faults.template import HELD_VERSION, NEWEST
from benchmarks.weightsync.faults.world import FaultWorld
from weightsync.layout.names import Kind

DEEP = 200_000
_A_FILE = "a file"
"""Stands for one of the version's files in the path of a field."""
_HOSTILE_NAMES = (
    "../../../etc/passwd",
    "/etc/passwd",
    "..",
    "a/b.safetensors",
    "nul\0.safetensors",
    "x" * 300,
    "",
    "-rf",
    "LATEST\n",
)


def _bent_index(world: FaultWorld) -> None:
    index = _some_index(world)
    bend = BENDS[world.rng.choice(sorted(BENDS))]
    index.write_bytes(bend(index.read_bytes(), world.rng))


def _some_index(world: FaultWorld) -> Path:
    kinds = [(world.newest, Kind.WEIGHT), (world.newest, Kind.WEIGHT), (4, Kind.ANCHOR)]
    return world.index(*world.rng.choice(kinds))


def _other_index(world: FaultWorld) -> None:
    version = world.rng.choice([1, 2, HELD_VERSION])
    world.index(world.newest).write_bytes(world.index(version).read_bytes())


def _not_an_index(world: FaultWorld) -> None:
    world.index(world.newest).write_bytes(
        world.rng.choice(
            [
                b"",
                b"null",
                b"[]",
                b'{"metadata": 7}',
                b"[" * DEEP,
                b'{"metadata":' * DEEP,
                b"\xff\xfe\x00",
                b" " * (33 << 20),
                b'{"metadata": {"version": ' + b"9" * 100_000 + b"}}",
            ]
        )
    )


def _index_field(*values: tuple[tuple[str, ...], Any]) -> Callable[[FaultWorld], None]:
    def damage(world: FaultWorld) -> None:
        path, value = world.rng.choice(values)
        index = world.index(world.newest)
        fields = json.loads(index.read_bytes())
        at = fields
        for name in path[:-1]:
            at = at[world.rng.choice([*at]) if name is _A_FILE else name]
        at[path[-1]] = value(world) if callable(value) else value
        index.write_text(json.dumps(fields))

    return damage


def _duplicate_keys(world: FaultWorld) -> None:
    """Readers differ in which of two equal keys they take."""
    index = world.index(world.newest)
    text = index.read_text()
    other = world.index(HELD_VERSION).read_text()
    metadata = json.dumps(json.loads(other)["metadata"])
    section = json.dumps(json.loads(other)["rosemux"])
    extra = world.rng.choice([f'"metadata": {metadata}', f'"rosemux": {section}'])
    begin, end = text.index("{"), text.rindex("}")
    front = world.rng.random() < 0.5
    text = f"{{{extra},{text[begin + 1 :]}" if front else f"{text[:end]},{extra}}}"
    index.write_text(text)


def _shard_names(world: FaultWorld) -> None:
    name = world.rng.choice(_HOSTILE_NAMES)
    index = world.index(world.newest)
    fields = json.loads(index.read_bytes())
    fields["weight_map"] = dict.fromkeys(fields["weight_map"], name)
    fields["rosemux"]["files"] = {name: next(iter(fields["rosemux"]["files"].values()))}
    index.write_text(json.dumps(fields))


def _latest(world: FaultWorld) -> None:
    newest = f"weight_v{world.newest:06d}\n".encode()
    ahead = world.rng.choice([world.newest + 1, 999_999])
    world.latest_file.write_bytes(
        world.rng.choice(
            [
                b"",
                newest[: world.rng.randrange(len(newest))],
                b"weight_v7\n",
                b"anchor_v000004\n",
                b"../../../etc/passwd\n",
                b"weight_v000006/../weight_v000001\n",
                b"\x00" * 15,
                b"\xff\xfe",
                b"x" * (1 << 20),
                f"weight_v{ahead:06d}\n".encode(),
                b"weight_v000003\n",
                f"weight_v{'9' * 15}\n".encode(),
            ]
        )
    )


def _latest_is_no_file(world: FaultWorld) -> Mend:
    """No publisher replaces a directory: an operator has to remove it."""
    world.hold_any()
    world.latest_file.unlink()
    choice = world.rng.randrange(3)
    if choice == 0:
        world.latest_file.mkdir()
        return world.restore
    if choice == 1:
        world.latest_file.symlink_to("weight_v000099")
    return world.mend()


def _no_file(world: FaultWorld) -> None:
    """A file is replaced by a directory, or by a link to nothing or to something. Objects are no
    links, and one whose reads fail for ever looks like a store that is away."""
    path = world.rng.choice([world.index(world.newest), world.shard(world.newest)])
    path.unlink()
    choice = world.rng.randrange(2 if world.is_object_store else 4)
    if choice == 0:
        path.mkdir()
    elif choice == 1:
        path.symlink_to("nothing")
    elif choice == 2:
        path.symlink_to(path.name)
    else:
        path.symlink_to("/dev/zero")


def _ready(world: FaultWorld) -> None:
    """An unfinished version, as a mirror or another file system shows it."""
    world.ready(world.newest).unlink()
    if world.rng.random() < 0.5:
        world.shard(world.newest).write_bytes(b"")


def _ready_too_early(world: FaultWorld) -> None:
    directory = world.version_dir(world.newest)
    for path in directory.iterdir():
        if path.name != "READY" and world.rng.random() < 0.6:
            path.unlink()


def _strange_entries(world: FaultWorld) -> None:
    """Entries that look like versions: a file, a link out of the store, an empty directory."""
    (world.store / "weight_v000008").write_bytes(b"")
    (world.store / "anchor_v000006").symlink_to("/")
    (world.store / "weight_v000009").mkdir()
    (world.store / ".tmp-weight_v000008").mkdir()
    shutil.copytree(world.version_dir(1), world.store / "weight_v000077")
    world.latest_file.write_text(f"weight_v{world.rng.choice([8, 9, 77]):06d}\n")


def _anchor_is_a_delta(world: FaultWorld) -> None:
    """An anchor's directory holds the delta."""
    anchor = world.version_dir(world.newest, Kind.ANCHOR)
    shutil.rmtree(anchor)
    shutil.copytree(world.version_dir(world.newest), anchor)


_HUGE = (1 << 63, (1 << 63) - 1, 10**30, -1, 1e308)

MANIFESTS: tuple[FaultClass, ...] = (
    damaging("index bent", _bent_index),
    damaging("index of another version", _other_index),
    damaging("no index: empty, deep, huge, not JSON", _not_an_index),
    damaging("index with duplicate keys", _duplicate_keys),
    damaging("index with hostile shard names", _shard_names),
    damaging(
        "index with absurd fields",
        _index_field(
            *((("metadata", "version"), value) for value in ("", "x", "-1", "9" * 5000, 1.5, None)),
            *((("metadata", "base_version"), value) for value in (NEWEST, 99, "-3", "", "0" * 999)),
            (("metadata", "base_version"), lambda world: f"{world.newest:06d}"),
            *((("metadata", "delta_encoding"), value) for value in ("arc_v2", "", "dense", 7)),
            (("metadata", "compression_format"), "lz4"),
            (("metadata", "checksum_format"), "md5" * 1000),
            (("weight_map",), {}),
            (("weight_map",), {"embed.weight": 7}),
        ),
    ),
    damaging(
        "our section with absurd fields",
        _index_field(
            *((("rosemux", "files", _A_FILE, "bytes"), value) for value in _HUGE),
            *((("rosemux", "bytes_dense"), value) for value in _HUGE),
            (("rosemux", "files", _A_FILE, "xxh3_128"), "0" * 32),
            (("rosemux", "files"), {}),
            (("rosemux", "state_hash"), "0" * 32),
            (("rosemux", "state_hash"), "x" * 1_000_000),
            (("rosemux", "format"), 99),
            (("rosemux", "encodings"), {"embed.weight": "overwrite"}),
            (("rosemux", "encodings"), {"embed.weight": "arc"}),
            (("rosemux", "unknown"), 1),
        ),
    ),
    damaging("LATEST torn, foreign, ahead or behind", _latest),
    FaultClass("LATEST is no file", _latest_is_no_file),
    damaging("a file of a version is none", _no_file),
    damaging("READY is missing", _ready),
    damaging("READY is there before the files", _ready_too_early),
    damaging("entries that look like versions", _strange_entries),
    damaging("an anchor that is a delta", _anchor_is_a_delta, newest=NEWEST),
)
