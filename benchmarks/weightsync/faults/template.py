"""Stores that each world starts from as copies: in every encoding, in one file or several."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from unittest.mock import patch

from benchmarks.weightsync.faults.states import State, states, tensors
from harvester.contracts.ids import WeightVersion
from weightsync.encoding.codec import Encoding
from weightsync.follower import Follower
from weightsync.layout.names import Kind, VersionRef
from weightsync.publish import skip_deltas
from weightsync.publish.settings import VersionSettings, WorkSettings
from weightsync.publisher import Publisher
from weightsync.receiver import Receiver

HELD_VERSION = 5
NEWEST = 7
ANCHOR_EVERY = 3
"""Anchors beside versions 4 and 7."""
SKIP_SPANS = (2,)
"""Skip deltas from 1 to 3 and from 4 to 6, as a store of that size has none by default."""
SKIPPING = VersionRef(Kind.SKIP, WeightVersion(6), WeightVersion(4))
_RANKS = 2


class Division(StrEnum):
    """How a version's tensors are divided among files."""

    ONE_FILE = "one file"
    FILES = "several files"
    RANKS = "files of two ranks"
    """Published by two ranks, each with every other tensor."""


SHARD_BYTES = {Division.ONE_FILE: 32 << 20, Division.FILES: 48 << 10, Division.RANKS: 32 << 20}


@dataclass
class Template:
    """Stores of one run and of another, and a directory that holds `HELD_VERSION`."""

    root: Path
    seed: int

    def __post_init__(self) -> None:
        receiver = Receiver(self.store(Encoding.ROSEMUX, Division.ONE_FILE))
        with Follower(receiver, self.held) as follows:
            follows.pull(WeightVersion(HELD_VERSION))
        receiver.close()

    def store(self, encoding: Encoding, division: Division) -> Path:
        return self._published(f"{encoding} in {division}", self.seed, encoding, division)

    @property
    def held(self) -> Path:
        return self.root / "held"

    def other(self, division: Division) -> Path:
        """Another run's store with the same numbers."""
        other = self.seed + 1_000_003
        return self._published(f"other in {division}", other, Encoding.ROSEMUX, division)

    def _published(self, name: str, seed: int, encoding: Encoding, division: Division) -> Path:
        """Made when it is first asked for."""
        store = self.root / name
        if not store.exists():
            _publish(store, seed, encoding, division)
        return store


def _publish(store: Path, seed: int, encoding: Encoding, division: Division) -> None:
    ranks = _RANKS if division is Division.RANKS else 1

    def publish(rank: int) -> None:
        with Publisher(
            store,
            versions=VersionSettings(anchor_every=ANCHOR_EVERY, encoding=encoding),
            work=WorkSettings(shard_bytes=SHARD_BYTES[division]),
            rank=rank,
            ranks=ranks,
        ) as publisher:
            for state in states(seed)[:NEWEST]:
                publisher.publish(tensors(_of_rank(state, rank, ranks)))

    with patch.object(skip_deltas, "_SPANS", SKIP_SPANS), ThreadPoolExecutor(ranks) as pool:
        list(pool.map(publish, range(ranks)))


def _of_rank(state: State, rank: int, ranks: int) -> State:
    return {name: state[name] for name in list(state)[rank::ranks]}
