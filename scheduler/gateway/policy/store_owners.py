"""Tenants' stores: which jobs may publish a store, and so sample its weights.

    pattern        a job with `stores` publishes the stores that match it, and no other
    without one    a job publishes each store that is not another tenant's, which it is
                     if it has the name of that tenant's job, or matches the `stores` of one,
                     or if that tenant's job was the first to publish it

Jobs of one tenant share their stores. A job that is not configured any more owns none. Holds no
file and no socket.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from harvester.contracts.ids import JobId

ANY = "*"
MAX_STORES = 4096
"""Stores that one job without a pattern may publish in its life: each of them is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRule:
    tenant: str
    pattern: str | None = None

    def names(self, store: str) -> bool:
        """Whether the pattern keeps the store from other tenants. That of every store does not."""
        return self.pattern not in (None, ANY) and fnmatchcase(store, self.pattern or "")


class StoreOwners:
    def __init__(
        self, jobs: Mapping[JobId, StoreRule], published: Iterable[tuple[str, JobId]] = ()
    ) -> None:
        """`published`: stores and their jobs, the oldest first."""
        self._jobs = jobs
        self._published: defaultdict[str, list[JobId]] = defaultdict(list)
        for store, job in published:
            self.note(job, store)

    def note(self, job: JobId, store: str) -> None:
        """The job has published the store."""
        if job in self._jobs and job not in self._published[store]:
            self._published[store].append(job)

    def refusal(self, job: JobId, store: str) -> str:
        """Why the job may not publish the store; "" if it may. Names no job of another tenant."""
        own = self._jobs[job]
        if own.pattern is not None:
            matches = fnmatchcase(store, own.pattern)
            return "" if matches else f"job {job} may publish {own.pattern}, not {store}"
        if self._owner(store) not in (None, own.tenant):
            return (
                f"{store} is another tenant's; publish under another name, or have the operator "
                f"give job {job} a pattern `stores` that it matches"
            )
        if job not in self._published.get(store, ()) and self._count(job) >= MAX_STORES:
            return f"job {job} has published {MAX_STORES} stores; give it a pattern `stores`"
        return ""

    def _owner(self, store: str) -> str | None:
        """The tenant; None while there is none."""
        named = self._jobs.get(JobId(store))
        rules = sorted(self._jobs.items())
        owners = [
            *([named] if named else ()),
            *(rule for _, rule in rules if rule.names(store)),
            *(self._jobs[each] for each in self._published.get(store, ())),
        ]
        return owners[0].tenant if owners else None

    def _count(self, job: JobId) -> int:
        return sum(job in jobs for jobs in self._published.values())
