"""A gateway's status as tables: its engines, jobs, leases and slots, and what waits."""

from collections.abc import Iterator, Mapping

import msgspec
from rich.table import Table

from harvester.cli.audit_command import printable
from harvester.contracts.wire.stops import Stop


class _Engine(msgspec.Struct, frozen=True):
    kind: str
    url: str
    up: bool
    state: str | None
    version: int | None
    concurrency: int
    open_turns: int
    fault: str


class _Job(msgspec.Struct, frozen=True):
    version: int
    store: str
    harvesting: bool
    paused: bool
    dedicated: bool
    tokens: dict[str, int]
    turns: dict[str, int]


class _Lease(msgspec.Struct, frozen=True):
    lease: str
    agent: str
    job: str
    left_s: float


class _Slot(msgspec.Struct, frozen=True):
    agent: str
    state: str
    idle_ratio: float | None


class GatewayReport(msgspec.Struct, frozen=True):
    """The reply of `/v1/status`, as far as it is shown."""

    active_job: str | None
    target_version: int | None
    settled: bool
    open_turns: int
    queued_turns: int
    held_turns: int
    engines: dict[str, _Engine]
    jobs: dict[str, _Job]
    leases: list[_Lease]
    slots: dict[str, _Slot]
    stops: list[Stop]
    silent_agents: dict[str, str]
    unrecorded: list[str]

    def tables(self) -> Iterator[Table]:
        table = _table("Engines", "engine", "kind", "state", "version", "turns", "url", "fault")
        for name, each in self.engines.items():
            state = (each.state or "up") if each.up else "down"
            turns = f"{each.open_turns} of {each.concurrency}"
            _add(table, name, each.kind, state, each.version, turns, each.url, each.fault)
        yield table
        table = _table("Jobs", "job", "state", "version", "store", "may use", "turns", "tokens")
        for name, job in self.jobs.items():
            state = "active" if name == self.active_job else "not active"
            uses = {"dedicated engines": job.dedicated, "leases": job.harvesting}
            may_use = ", ".join(what for what, may in uses.items() if may)
            state += ", paused" if job.paused else ""
            turns, tokens = _counts(job.turns), _counts(job.tokens)
            _add(table, name, state, job.version, job.store, may_use, turns, tokens)
        yield table
        table = _table("Leases", "lease", "agent", "job", "ends in")
        for lease in self.leases:
            _add(table, lease.lease, lease.agent, lease.job, f"{lease.left_s:.0f} s")
        yield table
        table = _table("Slots", "slot", "agent", "state", "idle")
        for name, slot in self.slots.items():
            idle = "unknown" if slot.idle_ratio is None else f"{slot.idle_ratio:.0%}"
            _add(table, name, slot.agent, slot.state, idle)
        yield table

    def lines(self) -> Iterator[str]:
        if self.active_job:
            served = "no dedicated engine is up"
            if any(each.up for each in self.engines.values() if each.kind == "dedicated"):
                not_yet = "" if self.settled else "not yet "
                served = f"{not_yet}served by all dedicated engines that are up"
            yield f"Job {self.active_job} is active at version {self.target_version}, {served}"
        else:
            yield "Another tenant's job is active" if self.active_job == "" else "No job is active"
        yield (
            f"Turns: {self.open_turns} on engines, {self.queued_turns} wait for a place, "
            f"{self.held_turns} for a version or numerics that no engine has"
        )
        for stop in self.stops:
            yield f"Stopped, {stop.tenant or 'all tenants'}: {stop.text}"
        for agent, fault in self.silent_agents.items():
            yield f"Agent {agent} is not used: {fault}"
        if self.unrecorded:
            yield f"Not recorded, see the gateway's log: {', '.join(self.unrecorded)}"


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left")


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(printable("" if cell is None else str(cell)) for cell in cells))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
