"""slime's and miles' disk deltas as versions of a job: the directory that they write is the store.

    --update-weight-mode delta --update-weight-transport disk
    --update-weight-disk-dir /srv/weights/job-a
    --custom-update-weight-post-write-path examples.slime_hook.publish

The deltas are read as they are. What their layout lacks is added here: the base of the first delta
(a link to the trainer's `--hf-checkpoint`, safetensors with an index), LATEST, and a call of the
gateway in ROSEMUX_GATEWAY. Every rank calls the hook, and repeating it is harmless.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler import RolloutClient
from weightsync.layout.durable import replace_file

_INDEX = "model.safetensors.index.json"


def publish(args: Any, written: str, _engines: Sequence[object] = ()) -> None:
    """`written`: the cleared directory of all versions, before the first one, or a version's."""
    root, directory = Path(args.update_weight_disk_dir), Path(written)
    if directory.resolve() == root.resolve():
        _add_base(root, Path(args.hf_checkpoint))
        return
    replace_file(root / "LATEST", f"{directory.name}\n".encode())
    version = int(directory.name.removeprefix("weight_v"))
    with RolloutClient(os.environ["ROSEMUX_GATEWAY"], root.name) as client:
        client.announce(version, root.name)


def _add_base(root: Path, checkpoint: Path) -> None:
    base = root / "weight_v000000"
    base.mkdir(exist_ok=True)
    index = json.loads((checkpoint / _INDEX).read_text())
    for name in set(index["weight_map"].values()):
        if not (base / name).is_symlink():
            (base / name).symlink_to(checkpoint / name)
    index["metadata"] = {"version": "000000"}
    replace_file(base / _INDEX, json.dumps(index).encode())
