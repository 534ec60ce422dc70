"""Tenants of jobs at a control with a tenants file: only its own tenant's calls reach a job.

A job belongs to the tenant that declared it first, for as long as the control knows it; its state
file keeps that. Jobs that were declared without tenants are the operator's.
"""

from aiohttp import web

from harvester.contracts.errors import Exhausted
from harvester.contracts.ids import JobId, TenantId
from harvester.platform.tenants import OPERATOR, Tenants
from scheduler.rollmux.cluster.runtime_events import Call, NodeReport, Submit
from scheduler.rollmux.control.phase_service import JOBS_MAX, PhaseService
from scheduler.rollmux.permits.events import Register

_SHARED_JOBS = JOBS_MAX // 2


class JobOwners:
    def __init__(self, service: PhaseService, tenants: Tenants) -> None:
        self.tenants = tenants
        self._service = service
        kept = service.state.owners()
        self._owners = {job: kept.get(job, OPERATOR) for job in service.jobs}
        if tenants.open_to_all and kept:
            # Jobs of the next run with tenants may have the names of today's.
            service.state.keep_owners({})

    def check(self, call: Call, caller: TenantId | None) -> None:
        """Raises HTTPForbidden, and Exhausted where a new job's owner cannot be kept or has more
        than its share of jobs."""
        if self.tenants.open_to_all:
            return
        if isinstance(call, NodeReport):
            if caller is not None:
                raise web.HTTPForbidden(reason=f"nodes are reported with the token of {OPERATOR}")
            return
        declared: TenantId | None = None
        match call:
            case Submit(spec=given):
                job, declared = given.job, given.tenant
            case Register(terms=terms):
                job, declared = terms.job, OPERATOR
            case _:
                job = call.job
        if declared is not None and job not in self._service.jobs:
            self._declare(job, caller or declared, shares=caller is not None)
        elif not self.shows(job, caller):
            raise web.HTTPForbidden(reason=f"job {job} is another tenant's")

    def shows(self, job: JobId, caller: TenantId | None) -> bool:
        """Whether the caller may see the job and call for it; None: the operator."""
        return caller in (None, self._owners.get(job, caller))

    def _declare(self, job: JobId, owner: TenantId, *, shares: bool) -> None:
        known = {each: self._owners[each] for each in self._service.jobs}
        # Tenants share one half, so that the other half is there for those that come later.
        own, tenants = sum(each == owner for each in known.values()), {*known.values(), owner}
        share = _SHARED_JOBS // len(tenants)
        if shares and own >= share and len(known) >= _SHARED_JOBS:
            raise Exhausted(f"{len(known)} jobs, {own} of them by {owner}; its share is {share}")
        self._service.state.keep_owners({**known, job: owner})
        self._owners = {**known, job: owner}
