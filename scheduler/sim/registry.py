"""The policy class of each journal, by the name in the journal's first line."""

from importlib import import_module
from typing import Any, ClassVar, Protocol, cast

import msgspec

from harvester.contracts.errors import Unsupported

POLICIES: dict[str, str] = {
    "harvester.policy.slot": "harvester.policy.slot:SlotPolicy",
    "scheduler.policy.capacity": "scheduler.gateway.policy.capacity:CapacityPolicy",
    "scheduler.policy.cluster": "scheduler.rollmux.cluster.runtime:PhaseRuntime",
    "scheduler.policy.phases": "scheduler.rollmux.permits.permits:PermitPolicy",
    "scheduler.policy.versions": "scheduler.gateway.policy.versions:VersionPolicy",
}


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
