"""Logs of all arms as they come in, and their figures so far. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_slot.engines.step_log import GuestLog, ProductionLog
from benchmarks.gpu_slot.sharing.blocking import named_ms, times_alone
from benchmarks.gpu_slot.sharing.step_figures import (
    arm_figures,
    busy_ratio,
    guest_figures,
    over_alone,
)

ALONE = "alone"
_STEPS_MIN = 30
"""Least steps without probes from which the cost of the guest's steps is computed."""


@dataclass(slots=True)
class _Arm:
    production: list[ProductionLog] = field(default_factory=list)
    guest: list[GuestLog] = field(default_factory=list)
    granted: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ArmTable:
    slice_s: float
    _arms: dict[str, _Arm] = field(default_factory=dict)

    def add(self, name: str, production: ProductionLog, guest: GuestLog) -> None:
        arm = self._arms.setdefault(name, _Arm())
        arm.production.append(production)
        arm.guest.append(guest)

    def granted(self, name: str, grant: dict[str, Any]) -> None:
        """Keeps the agent's grant of a slice."""
        self._arms.setdefault(name, _Arm()).granted.append(grant)

    def failed(self, name: str, why: str) -> None:
        """A slice that was not measured; the arm goes on with the next one."""
        self._arms.setdefault(name, _Arm()).failures.append(why)

    def figures(self) -> dict[str, Any]:
        alone = self._arms.get(ALONE, _Arm()).production
        return {name: self._figures(arm, alone) for name, arm in self._arms.items()}

    def _figures(self, arm: _Arm, alone: Sequence[ProductionLog]) -> dict[str, Any]:
        seconds = len(arm.production) * self.slice_s
        found: dict[str, Any] = {"rounds": len(arm.production)}
        if arm.failures:
            found["failures"] = arm.failures
        if arm.granted:
            found["granted"] = arm.granted
        if not arm.production:
            return found
        guest = guest_figures(arm.guest, seconds)
        found |= {
            "production_busy_ratio": busy_ratio(arm.production, seconds),
            "production_ms": arm_figures(arm.production),
            "production_form_ms": named_ms(_forms(arm.production)),
            "guest": guest,
            "guest_says_enough": guest["steps"] - guest["probes"] >= _STEPS_MIN,
        }
        # Rounds in which alone, or this arm, has not been yet, or failed, are left out.
        if not arm.failures and (pairs := min(len(alone), len(arm.production))):
            forms = _forms(alone)
            found["over_alone"] = over_alone(arm.production[:pairs], alone[:pairs], forms)
        return found


def _forms(rounds: Sequence[ProductionLog]) -> dict[tuple[str, int], float]:
    return times_alone(step for log in rounds for step in log.steps)
