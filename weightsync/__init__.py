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

`ShardSlice` is one rank's part of a tensor, for a publisher of several ranks. Rarer settings of a
publisher are records: `VersionSettings`, `WorkSettings`, `ExchangeSettings`, `AnnounceSettings`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.follower import Follower
    from weightsync.publish.settings import (
        AnnounceSettings,
        ExchangeSettings,
        VersionSettings,
        WorkSettings,
    )
    from weightsync.publish.trainer_state import ShardSlice
    from weightsync.publisher import Publisher
    from weightsync.receive.target import TensorTarget
    from weightsync.receiver import Receiver

__all__ = [
    "AnnounceSettings",
    "ExchangeSettings",
    "Follower",
    "Publisher",
    "Receiver",
    "ShardSlice",
    "TensorTarget",
    "VersionSettings",
    "WorkSettings",
]
_MODULES = {
    "AnnounceSettings": "publish.settings",
    "ExchangeSettings": "publish.settings",
    "Follower": "follower",
    "Publisher": "publisher",
    "Receiver": "receiver",
    "ShardSlice": "publish.trainer_state",
    "TensorTarget": "receive.target",
    "VersionSettings": "publish.settings",
    "WorkSettings": "publish.settings",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: servers, relays and vLLM's front ends need no framework."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harvester.distribution import needing

    with needing("weights", subject=f"weightsync.{name}"):
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
