"""slime's and miles' disk deltas as versions of a job: the directory that they write is the store.

    --update-weight-mode delta --update-weight-transport disk      # slime
    --update-weight-transfer-mode disk-delta                       # miles
    --update-weight-disk-dir /srv/weights/job-a

Engines read the store as it is; their `--model` is the trainer's `--hf-checkpoint`, on which the
first delta builds. Only the gateway has to hear of a version. Two ways; neither writes a file:

    python -m examples.slime_hook /srv/weights/job-a GATEWAY                  beside the trainer
    --custom-update-weight-post-write-path examples.slime_hook.publish        within it

The first needs nothing of the trainer, and follows stores of stitch and SkyRL too. With the
second every rank calls the hook (the gateway is ROSEMUX_GATEWAY), and repeating it is harmless.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harvester.contracts.errors import Corrupt
from scheduler import RolloutClient
from weightsync import Receiver

_POLL_S = 1.0


def publish(args: Any, written: str, _engines: Sequence[object] = ()) -> None:
    """`written`: the cleared directory of all versions, before the first one, or a version's."""
    root, directory = Path(args.update_weight_disk_dir), Path(written)
    if directory.resolve() != root.resolve():
        announce(root, int(directory.name.removeprefix("weight_v")), os.environ["ROSEMUX_GATEWAY"])


def announce(store: Path, version: int, gateway: str) -> None:
    """Returns when every dedicated engine serves the version."""
    with RolloutClient(gateway, store.name) as client:
        client.announce(version, store.name)


def follow(store: Path, gateway: str) -> None:
    """Announces each version that is the newest when it looks. Never returns."""
    while not store.is_dir():
        time.sleep(_POLL_S)
    receiver, announced = Receiver(store), None
    while True:
        try:
            version = receiver.newer(announced, wait_s=_POLL_S)
        except Corrupt as error:
            print(f"slime_hook: {error}; trying again", file=sys.stderr)
            time.sleep(_POLL_S)
            continue
        if version is not None:
            announce(store, version, gateway)
            announced = version


if __name__ == "__main__":
    follow(Path(sys.argv[1]), sys.argv[2])
