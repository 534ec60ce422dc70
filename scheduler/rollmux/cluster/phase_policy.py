"""The policy behind a shell of the phase control: permits of jobs placed by hand, or the runtime.

Needs no compiler: a control that does not plan forecasts nothing.
"""

from typing import Any, ClassVar, Protocol

import msgspec

from harvester.contracts.ids import JobId
from scheduler.rollmux.cluster.plan_events import JobSubmitted, NodeBack, NodeLost, PlanEffect
from scheduler.rollmux.permits.events import PermitEffect, PermitEvent
from scheduler.rollmux.permits.job_permit import JobPermit

RuntimeEvent = PermitEvent | JobSubmitted | NodeLost | NodeBack
RuntimeEffect = PermitEffect | PlanEffect


class PhasePolicy(Protocol):
    NAME: ClassVar[str]

    @property
    def config(self) -> msgspec.Struct: ...

    @property
    def counters(self) -> tuple[int, int]:
        """Last epoch and last ticket; neither is ever given again."""
        ...

    @property
    def jobs(self) -> tuple[JobId, ...]: ...

    def knows(self, job: JobId) -> bool: ...

    def permit(self, job: JobId) -> JobPermit | None: ...

    def ahead(self, job: JobId, *, now: float) -> int: ...

    def due_s(self) -> float: ...

    def observe(self, event: Any, *, now: float) -> tuple[RuntimeEffect, ...]: ...

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, snapshot: dict[str, Any]) -> None: ...
