"""The demand of each job: its turns, and the places that it has without another lease."""

from dataclasses import dataclass

from harvester.contracts.ids import TenantId
from harvester.contracts.wire.stops import StopOrder
from scheduler.gateway.capacity.cluster_stops import ClusterStops
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.job_switches import JobSwitch, JobSwitches
from scheduler.gateway.policy.capacity import Demand


@dataclass(frozen=True, slots=True)
class JobDemands:
    _registry: EngineRegistry
    _dispatcher: Dispatcher
    _switches: JobSwitches
    _stops: ClusterStops

    def observe(self) -> tuple[Demand, ...]:
        target, routing = self._registry.versions.target, self._dispatcher.policy
        active = target.job if target else None
        places = self._registry.dedicated_places()
        return tuple(
            Demand(
                job=job,
                active=job == active,
                harvesting=self._switches.is_on(job, JobSwitch.HARVESTING)
                and self._stops.order_for(TenantId(given.tenant)) is not StopOrder.DRAIN,
                queued=0 if routing.is_paused(job) else routing.queued_turns_of(job),
                running=routing.open_turns_of(job),
                dedicated_places=places if self._registry.may_use_dedicated(job) else 0,
                dispatched=dict(self._dispatcher.dispatched) if job == active else {},
                s_per_token=routing.engines.speeds() if job == active else {},
            )
            for job, given in self._registry.jobs.items()
        )
