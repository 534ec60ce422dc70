"""`python -m tests.soak.trainer_child STORE COPIES JOB_URL WEIGHTS`: a trainer that publishes.

Each line of standard input is the number of a training step: the state changes by it, is published
and announced. Replies are JSON lines: `opened` with the store's newest version and its hash, then
for each step `begun`, `durable` and `announced`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from weightsync import Publisher
from weightsync.layout.names import Kind, VersionRef
from weightsync.publish.settings import WorkSettings
from weightsync.reading.store import Store

_CHANGED_RATIO, _STEP_STD = 0.02, 0.01
_ANNOUNCE_S = 150.0


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


@torch.no_grad()
def train(state: dict[str, torch.Tensor], step: int) -> None:
    """Changes some elements of each tensor, as a step of an optimizer in bf16 does."""
    generator = torch.Generator().manual_seed(step)
    for tensor in state.values():
        chosen = torch.rand(tensor.shape, generator=generator) < _CHANGED_RATIO
        noise = torch.randn(tensor.shape, generator=generator) * _STEP_STD
        tensor.add_((chosen * noise).to(tensor.dtype))


def newest(store: Path) -> tuple[int, str]:
    """Version and hash of the store's newest version; 0 without one."""
    if not store.exists():
        return 0, ""
    reader = Store(store)
    try:
        version = reader.latest()
        if version is None:
            return 0, ""
        refs = [ref for ref in reader.refs() if ref.version == version]
        ref = min(refs, key=lambda each: each.kind is Kind.ANCHOR)
        assert isinstance(ref, VersionRef)
        return int(version), reader.manifest(ref).state_hash
    finally:
        reader.close()


def main(store: Path, copies: Path, job_url: str, weights: Path) -> None:
    version, state_hash = newest(store)
    say("opened", version=version, state_hash=state_hash)
    state = load_file(weights)
    with Publisher(store, work=WorkSettings(copy_dir=copies), announce=job_url) as publisher:
        for line in sys.stdin:
            train(state, int(line))
            say("begun")
            published = publisher.publish(state)
            say("durable", version=published.version, state_hash=published.state_hash)
            state_of_it = publisher.announced(_ANNOUNCE_S)
            say("announced", version=published.version, state=str(state_of_it))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
