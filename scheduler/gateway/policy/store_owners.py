"""Tenants' stores: which jobs may publish a store, and so sample its weights.

    pattern        a job with `stores` publishes the stores that match it, and no other
    without one    a job publishes each store that is not another tenant's, which it is
                     if it has the name of that tenant's job, or matches the `stores` of one,
                     or if that tenant's job was the first to publish it

Jobs of one tenant share their stores. A job that is not configured any more owns none. Holds no
file and no socket.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from harvester.contracts.ids import JobId

ANY = "*"
MAX_STORES = 4096
"""Remembered stores of one job. A job without a pattern may publish no more stores in its life;
stores that match a pattern are its tenant's anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRule:
    tenant: str
    pattern: str | None = None

    def names(self, store: str) -> bool:
        """Whether the pattern keeps the store from other tenants. The pattern `*` does not."""
        return self.pattern not in (None, ANY) and fnmatchcase(store, self.pattern or "")


class StoreOwners:
    def __init__(
        self, jobs: Mapping[JobId, StoreRule], published: Iterable[tuple[str, JobId]] = ()
    ) -> None:
        """`published`: stores and their jobs, the oldest first."""
        self._jobs = jobs
        self._published: defaultdict[str, list[JobId]] = defaultdict(list)
        self._counts: Counter[JobId] = Counter()
        for store, job in published:
            self.note(job, store)

    def note(self, job: JobId, store: str) -> None:
        """The job has published the store."""
        if job in self._jobs and self.remembers(job, store) and not self._has(job, store):
            self._published[store].append(job)
            self._counts[job] += 1

    def remembers(self, job: JobId, store: str) -> bool:
        """Whether the store is, or would be, remembered as the job's."""
        return self._has(job, store) or self._counts[job] < MAX_STORES

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
        if not self.remembers(job, store):
            return f"job {job} has published {MAX_STORES} stores; give it a pattern `stores`"
        return ""

    def _owner(self, store: str) -> str | None:
        """The store's tenant; None without one."""
        named = self._jobs.get(JobId(store))
        rules = sorted(self._jobs.items())
        owners = [
            *([named] if named else ()),
            *(rule for _, rule in rules if rule.names(store)),
            *(self._jobs[each] for each in self._published.get(store, ())),
        ]
        return owners[0].tenant if owners else None

    def _has(self, job: JobId, store: str) -> bool:
        return job in self._published.get(store, ())
