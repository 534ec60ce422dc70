"""Weights of a policy as versions of a store: published as deltas, followed by engines and copies.

>>> import tempfile, torch
>>> from weightsync import Follower, Publisher, Receiver, TensorTarget
>>> where = tempfile.TemporaryDirectory()
>>> with Publisher(f"{where.name}/job-a") as publisher:
...     first = publisher.publish({"layer.weight": torch.ones(2, 3)})
>>> receiver = Receiver(f"{where.name}/job-a")
>>> with Follower(receiver, f"{where.name}/policy") as follower:
...     follower.pull().state_hash == first.state_hash
True
>>> held = {"layer.weight": torch.zeros(2, 3)}
>>> receiver.sync(None, first.version, TensorTarget(held)).state_hash == first.state_hash
True
>>> held["layer.weight"].tolist()
[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
>>> receiver.close(); where.cleanup()

`ShardSlice` is one rank's part of a tensor, for a publisher of several ranks.
Rarer settings are records that `Publisher` names: `Publisher.Versions(anchor_every=10)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.follower import Follower
    from weightsync.publish.trainer_state import ShardSlice
    from weightsync.publisher import Publisher
    from weightsync.receive.target import TensorTarget
    from weightsync.receiver import Receiver

__all__ = [
    "Follower",
    "Publisher",
    "Receiver",
    "ShardSlice",
    "TensorTarget",
]
_MODULES = {
    "Follower": "follower",
    "Publisher": "publisher",
    "Receiver": "receiver",
    "ShardSlice": "publish.trainer_state",
    "TensorTarget": "receive.target",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: servers, relays and vLLM's front ends need no framework."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harvester.distribution import needing

    with needing("weights", subject=f"weightsync.{name}"):
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
