"""Feeds a recorded journal to its policy again and finds the first decision that differs."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, cast

import msgspec

from harvester.contracts.errors import UNDECODABLE, Corrupt, Unsupported
from harvester.contracts.journal import Decided, Opened, config_hash, read_journal

POLICIES: Final = {
    "harvester.policy.slot": "harvester.policy.slot:SlotPolicy",
    "scheduler.policy.capacity": "scheduler.gateway.policy.capacity:CapacityPolicy",
    "scheduler.policy.cluster": "scheduler.rollmux.cluster.runtime:PhaseRuntime",
    "scheduler.policy.phases": "scheduler.rollmux.permits.permits:PermitPolicy",
    "scheduler.policy.versions": "scheduler.gateway.policy.versions:VersionPolicy",
}
"""The policy class of each journal, by the name in the journal's first line."""


class Policy(Protocol):
    SAMPLE: ClassVar[Any]

    def restore(self, snapshot: dict[str, Any]) -> None: ...

    def observe(self, sample: Any, *, now: float) -> tuple[msgspec.Struct, ...]: ...


def build_policy(name: str, config: dict[str, Any]) -> Policy:
    """Raises Unsupported for a policy that this version does not have."""
    target = POLICIES.get(name)
    if target is None:
        raise Unsupported(f"no policy {name!r} here; known: {', '.join(sorted(POLICIES))}")
    module, _, attribute = target.partition(":")
    policy_class = getattr(import_module(module), attribute)
    return cast(Policy, policy_class.from_config(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    line: int
    t_s: float
    recorded: tuple[dict[str, Any], ...]
    replayed: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    decisions: int
    effects: int
    difference: Difference | None
    version: str = ""
    """The writer's, at the last decision; "" if unknown."""


def replay_journal(path: Path) -> Replayed:
    """Stops at the first difference.

    Raises Corrupt where the file is no journal, Unsupported where its policy is not known here.
    """
    policy: Policy | None = None
    version = ""
    decisions = effects = 0
    for number, line in enumerate(read_journal(path), start=1):
        match line:
            case Opened():
                policy, version = _open(line, path, number), line.version
            case Decided():
                if policy is None:
                    raise Corrupt(f"{path.name} line {number}: a decision before 'opened'")
                replayed = _decide(policy, line, path, number)
                decisions += 1
                effects += len(replayed)
                if replayed != line.effects:
                    difference = Difference(
                        line=number, t_s=line.t_s, recorded=line.effects, replayed=replayed
                    )
                    return Replayed(
                        decisions=decisions, effects=effects, difference=difference, version=version
                    )
    return Replayed(decisions=decisions, effects=effects, difference=None, version=version)


def _open(line: Opened, path: Path, number: int) -> Policy:
    if config_hash(line.config) != line.config_hash:
        raise Corrupt(f"{path.name} line {number}: the hash is not that of the configuration")
    try:
        policy = build_policy(line.policy, line.config)
        if line.snapshot is not None:
            policy.restore(line.snapshot)
    except (*UNDECODABLE, KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"{path.name} line {number}: {error}") from error
    return policy


def _decide(policy: Policy, line: Decided, path: Path, number: int) -> tuple[dict[str, Any], ...]:
    try:
        sample = msgspec.convert(line.sample, policy.SAMPLE)
    except UNDECODABLE as error:
        raise Corrupt(f"{path.name} line {number}: sample: {error}") from error
    effects = policy.observe(sample, now=line.t_s)
    # Encodes to JSON like the recorded effects, so that NaN, tuples and enums compare equal.
    plain: list[dict[str, Any]] = msgspec.json.decode(
        msgspec.json.encode(effects, enc_hook=str), type=list[dict[str, Any]]
    )
    return tuple(plain)
