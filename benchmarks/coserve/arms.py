"""The arms: their loads, the rule of each, and the agent that enforces it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from benchmarks.testbed.hardware import Hardware
from harvester.contracts.page import Law


class Arm(StrEnum):
    STOCK = "stock"
    ALONE = "alone"
    AWAKE = "alone_awake"
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
    shipped: bool = False
    """The agent with its shipped defaults and state of its own: other rules teach it nothing."""
    policy: dict[str, Any] = field(default_factory=dict)
    """Settings over the slot's own policy; none where the agent is the shipped one."""


# The proof compares hours of one rule; here other rules pass by in minutes, and the worst of them
# would end harvesting for all. It goes on taking its time in the arms that are RoseMux's.
NO_VERDICT: dict[str, Any] = {"limit_ratio": 1e6}
# The agent's own brakes belong to RoseMux; other rules are measured without them.
BARE: dict[str, Any] = {
    "misses": {"limit_ratio": 0.999, "minimum_misses": 1e9},
    "proof": {"share_ratio": 0.0, **NO_VERDICT},
}
_OURS: dict[str, Any] = {"proof": NO_VERDICT}
RECLAIM: dict[str, Any] = {**BARE, "proof": {"share_ratio": 0.5, **NO_VERDICT}}
"""The agent closes the grant for its proof, in half of the slices, and for nothing else."""
_BLOCKING = {"blocking_ratio": 1.0}

SETTINGS = {
    Arm.STOCK: Setting(rollouts=False, policy=_OURS),
    Arm.ALONE: Setting(rollouts=False, policy=_OURS),
    Arm.AWAKE: Setting(rollouts=False, policy=_OURS),
    Arm.ROLLOUTS: Setting(production=False, policy={"ungated": True, **_BLOCKING, **BARE}),
    Arm.UNGATED: Setting(policy={"ungated": True, **_BLOCKING, **BARE}),
    Arm.SATURATION: Setting(policy={"law": Law.SATURATION.value, **_BLOCKING, **BARE}),
    Arm.ROSE: Setting(policy={"law": Law.ROSE.value, **_BLOCKING, **BARE}),
    Arm.GATE_ONLY: Setting(policy={**_OURS, **_BLOCKING}),
    Arm.ROSEMUX: Setting(isolated=True, policy=_OURS),
}
UNMIXED = (Arm.STOCK, Arm.ALONE, Arm.AWAKE)
"""Production without rollouts."""
# In the rounds RoseMux has every brake on, and so does the slot of production alone.
IN_ROUNDS = SETTINGS | {
    arm: replace(SETTINGS[arm], shipped=True, policy={}) for arm in (*UNMIXED, Arm.ROSEMUX)
}
WITH_PRODUCTION = tuple(arm for arm in Arm if SETTINGS[arm].production)
BESIDE = tuple(arm for arm in WITH_PRODUCTION if SETTINGS[arm].rollouts)
ESSENTIAL = (Arm.STOCK, Arm.ALONE, Arm.AWAKE, Arm.ROLLOUTS, Arm.ROSEMUX)
"""The arms that the goals need."""


def arms_on(hardware: Hardware, requested: Sequence[Arm]) -> tuple[Arm, ...]:
    """The requested arms that exist on the hardware, in the order of `Arm`.

    On a GPU a third engine has no memory, and no process of the host keeps a GPU awake.
    """
    absent = () if hardware.shares_core else (Arm.STOCK, Arm.AWAKE)
    return tuple(arm for arm in Arm if arm in requested and arm not in absent)


def baseline(arms: Sequence[Arm]) -> Arm:
    """The arm below every ratio: with rollouts the core is awake, so it is in this arm."""
    return Arm.AWAKE if Arm.AWAKE in arms else Arm.ALONE
