"""The arms: their loads, and the rule of each."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from harvester.contracts.page import Law
from harvester.policy.settings import SlotSettings


class Arm(StrEnum):
    ALONE = "alone"
    ALONE_AGAIN = "alone_again"
    ROLLOUTS = "rollouts_alone"
    UNGATED = "ungated"
    SATURATION = "saturation_law"
    ROSE = "rose_law"
    GATE_ONLY = "gate_only"
    ROSEMUX = "rosemux"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    production: bool = True
    rollouts: bool = True
    isolated: bool = False
    """The guest under the machine's isolation backend; without one its steps block production."""
    policy: dict[str, Any] = field(default_factory=dict)
    """Settings over the slot's own policy."""


# The proof compares hours of one rule; here eight rules pass by in minutes, and the worst of them
# would end harvesting for all. It goes on taking its time in the arms that are RoseMux's.
NO_VERDICT: dict[str, Any] = {"limit_ratio": 1e6}
# The agent's own brakes belong to RoseMux; other rules are measured without them.
BARE: dict[str, Any] = {
    "misses": {"limit_ratio": 0.999, "minimum_misses": 1e9},
    "proof": {"share_ratio": 0.0, **NO_VERDICT},
}
_OURS: dict[str, Any] = {"proof": NO_VERDICT}
RECLAIM: dict[str, Any] = {**BARE, "proof": {"share_ratio": 0.5, "slice_s": 0.5, **NO_VERDICT}}
"""The agent closes the grant every other half second, for its proof, and for nothing else."""
_BLOCKING = {"blocking_ratio": 1.0}
# A twentieth of a short prefill is less than any step of a guest, and no step would ever start.
# The promise without isolation is a quarter.
_UNISOLATED = {**_BLOCKING, "epsilon": 0.25}

SETTINGS = {
    Arm.ALONE: Setting(rollouts=False, policy=_OURS),
    Arm.ALONE_AGAIN: Setting(rollouts=False, policy=_OURS),
    Arm.ROLLOUTS: Setting(production=False, policy={"ungated": True, **_BLOCKING, **BARE}),
    Arm.UNGATED: Setting(policy={"ungated": True, **_BLOCKING, **BARE}),
    Arm.SATURATION: Setting(policy={"law": Law.SATURATION.value, **_BLOCKING, **BARE}),
    Arm.ROSE: Setting(policy={"law": Law.ROSE.value, **_BLOCKING, **BARE}),
    Arm.GATE_ONLY: Setting(policy={**_OURS, **_UNISOLATED}),
    Arm.ROSEMUX: Setting(isolated=True, policy=_OURS),
}
ALONE = (Arm.ALONE, Arm.ALONE_AGAIN)
# The shipped settings, also on a slot whose own policy bounds less so that its guest steps at all.
AS_SHIPPED = Setting(isolated=True, policy={**_OURS, "epsilon": SlotSettings().epsilon})
IN_ROUNDS = SETTINGS | {Arm.ROSEMUX: AS_SHIPPED}
WITH_PRODUCTION = tuple(arm for arm in Arm if SETTINGS[arm].production)
BESIDE = tuple(arm for arm in WITH_PRODUCTION if SETTINGS[arm].rollouts)
