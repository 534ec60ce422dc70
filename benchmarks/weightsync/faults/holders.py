"""Holders of weights in a world: a checkpoint directory, tensors in memory or a rank's part, and
the weights of an engine.

Their claims are read here; world.py judges them by other means.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load

from benchmarks.weightsync.faults.states import LAYOUT, State, hashes, states
from harvester.contracts.clock import Clock
from harvester.contracts.errors import Corrupt
from harvester.contracts.ids import WeightVersion
from weightsync.elements.bits import TensorSpec, bits_of, tensor_from_bits, zero_tensor
from weightsync.follower import Follower
from weightsync.layout.apply_journal import Held, read_record
from weightsync.receive.held_parts import Names, TensorParallel
from weightsync.receive.target import TensorTarget
from weightsync.receiver import Receiver
from weightsync.transport.location import StoreRoot, source_at
from weightsync.transport.source import StoreSource
from weightsync.vllm.engine_weights import EngineWeights
from weightsync.vllm.prepared_version import RequestedVersion
from weightsync.vllm.stager import StageState

Source = Callable[[], Path | str | StoreSource]
"""Location from which a holder reads the store."""
Share = TensorParallel | Names


@dataclass(frozen=True)
class Claim:
    version: int
    state_hash: str


class Holder(Protocol):
    @property
    def place(self) -> str:
        """Words for where the weights are."""
        ...

    def attempt(self) -> None:
        """Tries to reach the newest version; raises what the product raises."""
        ...

    def claims(self) -> Iterator[Claim]:
        """All claims about the held version."""
        ...

    def contents(self) -> dict[str, bytes]:
        """Bytes per tensor."""
        ...

    def part(self, state: State) -> State:
        """The part of a state that this holder has."""
        ...

    def close(self) -> None: ...


class DirectoryHolder:
    """A checkpoint directory with its follower, opened when it is needed."""

    place = "a directory"

    def __init__(self, source: Source, directory: Path, clock: Clock) -> None:
        self.directory = directory
        self._source = source
        self._clock = clock
        self._receiver: Receiver | None = None
        self._follower: Follower | None = None

    def attempt(self) -> None:
        if self._receiver is None:
            self._receiver = Receiver(self._source(), clock=self._clock)
        if self._follower is None:
            self._follower = Follower(self._receiver, self.directory, clock=self._clock)
        self._follower.pull()

    def claims(self) -> Iterator[Claim]:
        with suppress(Corrupt):
            record = read_record(self.directory)
            if isinstance(record, Held):
                yield Claim(record.version, record.state_hash)
        if self._follower is not None and self._follower.held is not None:
            yield Claim(self._follower.held.version, self._follower.held.state_hash)

    def contents(self) -> dict[str, bytes]:
        return directory_contents(self.directory)

    def part(self, state: State) -> State:
        return state

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()
        if self._receiver is not None:
            self._receiver.close()
        self._follower = self._receiver = None


class MemoryHolder:
    """Tensors in memory, kept as the vLLM backend keeps an engine's or a rank's."""

    def __init__(
        self,
        source: Source,
        seed: int,
        clock: Clock,
        *,
        version: int | None,
        share: Share | None = None,
    ) -> None:
        self.share = share
        self.place = f"memory: {type(share).__name__}" if share else "memory"
        start = self.part(states(seed)[0 if version is None else version - 1])
        self.bits = {name: bits.copy() for name, bits in start.items()}
        self.version = None if version is None else WeightVersion(version)
        self.state_hash = "" if version is None else hashes(seed)[version - 1]
        held = {
            name: tensor_from_bits(bits, _held_spec(name, share))
            for name, bits in self.bits.items()
        }
        self._target = TensorTarget(held)
        self._receiver = Receiver(source(), clock=clock, selection=share)

    def attempt(self) -> None:
        newest = self._receiver.latest()
        if newest is not None and newest != self.version:
            self.take(newest)

    def take(self, version: WeightVersion) -> None:
        held = None if self.share else self._target.layout()
        staged = self._receiver.prepare(self.version, version, held=held)
        self.version = None
        applied = self._receiver.settle(staged, self._target)
        self.version, self.state_hash = applied.version, applied.state_hash

    def part(self, state: State) -> State:
        share = self.share
        if share is None:
            return state
        return {
            name: bits.reshape(LAYOUT[name].shape)[box.index].ravel()
            for name, bits in state.items()
            for box in share.boxes(name, LAYOUT[name])
        }

    def claims(self) -> Iterator[Claim]:
        if self.version is not None:
            yield Claim(self.version, self.state_hash)

    def contents(self) -> dict[str, bytes]:
        return {name: bits.tobytes() for name, bits in self.bits.items()}

    def close(self) -> None:
        self._receiver.close()


class _LoadedModel(torch.nn.Module):
    """An engine's model as far as weights go: takes a checkpoint tensor by tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {name: _parameter(zero_tensor(spec)) for name, spec in LAYOUT.items()}
        for number, parameter in enumerate(self.held.values()):
            self.register_parameter(f"weight_{number}", parameter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.held[name].data.copy_(tensor)


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


class _OneStore(StoreRoot):
    """The stores of an engine that follows one, wherever that is."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def store(self, name: str) -> StoreSource:  # noqa: ARG002 - there is one
        location = self._source()
        return source_at(location) if isinstance(location, Path | str) else location


class EngineHolder:
    """The weights of a running engine as its worker keeps them: traced through the model's loader,
    staged beside the steps if it `stages`, written in place between two of them."""

    place = "an engine"

    def __init__(self, source: Source, clock: Clock, *, stages: bool) -> None:
        self.model = _LoadedModel()
        self._weights = EngineWeights(self.model, None, _OneStore(source), packed_ahead_bytes=0)
        self._newest = Receiver(source(), clock=clock)
        """Reads LATEST, as a gateway tells an engine."""
        self._stages = stages

    def attempt(self) -> None:
        newest = self._newest.latest()
        if newest is not None and newest not in {claim.version for claim in self.claims()}:
            self.take(newest)

    def take(self, version: WeightVersion) -> None:
        request = RequestedVersion(store="store", version=version)
        while self._stages and self._weights.stage(request).state is StageState.RUNNING:
            time.sleep(0.001)
        try:
            self._weights.load(request)
        finally:
            self._weights.release()

    def part(self, state: State) -> State:
        return state

    def claims(self) -> Iterator[Claim]:
        report = self._weights.report()
        if "version" in report:
            yield Claim(report["version"], report["state_hash"])

    def contents(self) -> dict[str, bytes]:
        return {name: bits_of(held.data).tobytes() for name, held in self.model.held.items()}

    def close(self) -> None:
        self._weights.close()
        self._newest.close()


def _held_spec(name: str, share: Share | None) -> TensorSpec:
    spec = LAYOUT[name]
    if share is None:
        return spec
    (box,) = share.boxes(name, spec)
    return TensorSpec(spec.dtype, box.lengths)


def directory_contents(directory: Path) -> dict[str, bytes]:
    """Read by another library."""
    found: dict[str, bytes] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        found |= {name: bits_of(t).tobytes() for name, t in load(shard.read_bytes()).items()}
    return found
