"""slime's and miles' disk deltas as versions of a job: the directory that they write is the store.

    --update-weight-mode delta --update-weight-transport disk      # slime
    --update-weight-transfer-mode disk-delta                       # miles
    --update-weight-disk-dir /srv/weights/job-a

The deltas are read as they are. Version 0 is a link to the trainer's `--hf-checkpoint` as the first
delta's base, LATEST names the newest version, and the gateway hears of it. Two ways, neither of
which writes into a version:

    python -m examples.slime_hook /srv/weights/job-a HF_CHECKPOINT GATEWAY    beside the trainer
    --custom-update-weight-post-write-path examples.slime_hook.publish        within it

The first needs nothing of the trainer; give each of its runs a directory of its own. Of the second
every rank calls the hook (the gateway is ROSEMUX_GATEWAY), and repeating it is harmless.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from scheduler import RolloutClient
from weightsync.layout.durable import replace_file

_BASE, _INDEX = "weight_v000000", "model.safetensors.index.json"
_POLL_S = 1.0


def publish(args: Any, written: str, _engines: Sequence[object] = ()) -> None:
    """`written`: the cleared directory of all versions, before the first one, or a version's."""
    root, directory = Path(args.update_weight_disk_dir), Path(written)
    if directory.resolve() == root.resolve():
        add_base(root, Path(args.hf_checkpoint))
        return
    announce(directory, os.environ["ROSEMUX_GATEWAY"])


def announce(version: Path, gateway: str) -> None:
    """Returns when every dedicated engine serves the version."""
    root = version.parent
    replace_file(root / "LATEST", f"{version.name}\n".encode())
    with RolloutClient(gateway, root.name) as client:
        client.announce(int(version.name.removeprefix("weight_v")), root.name)


def add_base(root: Path, checkpoint: Path) -> None:
    """Version 0: the checkpoint's files, linked, with an index that names their tensors."""
    base, weight_map = root / _BASE, {}
    base.mkdir(exist_ok=True)
    for shard in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(shard, framework="numpy") as tensors:
            weight_map.update(dict.fromkeys(tensors.keys(), shard.name))
        if not (base / shard.name).is_symlink():
            (base / shard.name).symlink_to(shard.resolve())
    index = {"metadata": {"version": "000000"}, "weight_map": weight_map}
    replace_file(base / _INDEX, json.dumps(index).encode())


def newest(root: Path) -> Path | None:
    """The newest whole version: its index is written when all ranks have written their files."""
    whole = sorted(index.parent for index in root.glob(f"weight_v*/{_INDEX}"))
    return whole[-1] if whole and whole[-1].name != _BASE else None


def follow(root: Path, checkpoint: Path, gateway: str) -> None:
    """Announces each version that is the newest when it looks. Never returns."""
    announced = None
    while True:
        version = newest(root)
        if version is not None and version != announced:
            if not (root / _BASE / _INDEX).exists():
                add_base(root, checkpoint)
            announce(version, gateway)
            announced = version
        time.sleep(_POLL_S)


if __name__ == "__main__":
    follow(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
