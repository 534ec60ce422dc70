"""A gateway's status as tables: its engines, jobs, leases and slots, and what waits."""

from collections.abc import Iterator
from functools import partial

from rich.table import Table

from harvester.cli.row_table import add_row, row_table
from harvester.contracts.wire.gateway_status import GatewayStatus

_NAMES = ("engine", "url", "job", "store", "lease", "agent", "slot")
"""Columns of names, which are as long as their owner likes."""
_COUNTS = ("started", "completed", "aborted", "migrated", "retried")
_BAD_ENDS = ("refused", "lost", "failed", "duplicated", "undelivered")
"""Counts of turns that are 0 where nothing is wrong."""
_NUMBERS = (*_COUNTS, "tokens", "of guests", "version", "turns", "ends in", "idle")
_table = partial(row_table, names=_NAMES, numbers=_NUMBERS)


class GatewayReport(GatewayStatus, frozen=True):
    def summary(self) -> Iterator[str]:
        if self.active_job:
            served = "no dedicated engine is up"
            if any(each.up for each in self.engines.values() if each.kind == "dedicated"):
                not_yet = "" if self.settled else "not yet "
                served = f"{not_yet}served by all dedicated engines that are up"
            yield f"Job {self.active_job} is active at version {self.target_version}, {served}"
        else:
            yield "Another tenant's job is active" if self.active_job == "" else "No job is active"
        turns = f"{self.placed_turns} on engines, {self.queued_turns} wait for a place"
        if self.deferred_turns:
            turns += f", {self.deferred_turns} for a version or numerics"
        yield f"Turns: {turns}"

    def tables(self) -> Iterator[Table]:
        """The tables that have rows."""
        engines = _table("engine", "kind", "state", "version", "turns", "url")
        for name, each in self.engines.items():
            state = (each.state or "up") if each.up else "down"
            turns = f"{each.open_turns} of {each.concurrency}"
            add_row(engines, name, each.kind, state, each.version, turns, each.url)
        jobs = _table("job", "state", "version", "store", "may use")
        counts = _table("job", *_COUNTS, "tokens", "of guests")
        for job, facts in self.jobs.items():
            state = "active" if job == self.active_job else "not active"
            uses = {"dedicated": facts.may_use_dedicated, "leases": facts.may_lease}
            may_use = ", ".join(what for what, may in uses.items() if may)
            state += ", paused" if facts.paused else ""
            add_row(jobs, job, state, facts.version, facts.store, may_use)
            ends = (facts.turns.get(what, 0) for what in _COUNTS)
            add_row(counts, job, *ends, sum(facts.tokens.values()), facts.tokens.get("guest", 0))
        leases = _table("lease", "agent", "job", "ends in")
        for lease in self.leases:
            add_row(leases, lease.lease, lease.agent, lease.job, f"{lease.left_s:.0f} s")
        slots = _table("slot", "agent", "state", "idle")
        for slot, offer in self.slots.items():
            idle = "unknown" if offer.idle_ratio is None else f"{offer.idle_ratio:.0%}"
            add_row(slots, slot, offer.agent, offer.state, idle)
        yield from (each for each in (engines, jobs, counts, leases, slots) if each.rows)

    def reasons(self) -> Iterator[str]:
        """Why slots take no turns: a line for each reason, as hundreds may have the same."""
        slots: dict[str, list[str]] = {}
        for slot, offer in self.slots.items():
            slots.setdefault(offer.reason, []).append(slot)
        for reason, names in slots.items():
            if reason:
                yield f"{'Slot' if len(names) == 1 else 'Slots'} {', '.join(names)}: {reason}"

    def faults(self) -> Iterator[str]:
        yield from (f"Engine {name}: {e.fault}" for name, e in self.engines.items() if e.fault)
        for name, job in self.jobs.items():
            if ends := ", ".join(f"{n} {what}" for what in _BAD_ENDS if (n := job.turns.get(what))):
                yield f"Turns of job {name}: {ends}"
        yield from (f"Stopped, {stop.tenant or 'all tenants'}: {stop.text}" for stop in self.stops)
        yield from (f"Agent {name} is not used: {why}" for name, why in self.silent_agents.items())
        if self.unrecorded:
            yield f"Not recorded, see the gateway's log: {', '.join(self.unrecorded)}"
