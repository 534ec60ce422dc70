"""The scheduler as people and dashboards see it: one JSON object, and the gauges of a scrape."""

from dataclasses import asdict

from harvester.contracts.ids import JobId, WeightVersion
from harvester.contracts.wire.gateway_status import (
    GatewayBudget,
    GatewayEngine,
    GatewayJob,
    GatewayLease,
    GatewaySlot,
    GatewayStatus,
)
from harvester.contracts.wire.leases import SlotOffer, SlotState
from scheduler.gateway.capacity.harvested_slots import HarvestedSlots
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.fleet_member import FleetMember
from scheduler.gateway.job_switches import JobSwitch
from scheduler.gateway.scheduler import Scheduler
from scheduler.model import EngineKind


def status_of(scheduler: Scheduler, *, now: float, tenant: str | None = None) -> GatewayStatus:
    """Engines, jobs, queue, leases and counters; times are seconds from now.

    For a `tenant` its own jobs and their leases, and the engines unless they serve another's job,
    whose name is then "".
    """
    policy, routing = scheduler.fleet.policy, scheduler.dispatcher.policy
    harvest, sees_all = scheduler.harvest, tenant is None
    jobs = [job for job, given in scheduler.jobs.items() if tenant in (None, given.tenant)]
    target = policy.target
    active = target.job if target else None
    if active is not None and active not in jobs:
        active, target = JobId(""), None
    return GatewayStatus(
        active_job=active,
        target_version=target.version if target else None,
        settled=policy.settled,
        queued_turns=sum(map(routing.queued_turns_of, jobs)),
        deferred_turns=sum(map(routing.deferred_turns_of, jobs)),
        placed_turns=sum(map(routing.open_turns_of, jobs)),
        dispatched=dict(scheduler.dispatcher.dispatched) if sees_all else {},
        engines={
            engine: _engine(scheduler, member)
            for engine, member in sorted(scheduler.fleet.members.items())
            if active != ""
        },
        jobs={job: _job(scheduler, job) for job in sorted(jobs)},
        leases=tuple(
            GatewayLease(
                lease=f"{lease.slot}.{lease.epoch}",
                slot=lease.slot,
                agent=lease.agent,
                job=lease.job,
                epoch=lease.epoch,
                left_s=round(lease.expires_s - now, 3),
            )
            for lease in harvest.leases.values()
            if lease.job in jobs
        ),
        slots={
            slot: GatewaySlot(
                agent=agent,
                state=offer.state,
                idle_ratio=offer.idle_ratio,
                reason=why_unused(offer, harvest, scheduler.registry),
            )
            for slot, (agent, offer) in sorted(harvest.offers.slots.items())
            if sees_all
        },
        services={
            each.service: GatewayBudget(
                budget_misses=round(each.budget, 3),
                spent_misses=round(each.spent, 3),
                outstanding_misses=round(each.outstanding, 3),
                known_s=round(each.known_s, 3),
            )
            for each in harvest.budgets.all()
            if sees_all
        },
        stops=tuple(s for s in scheduler.stops.stops if sees_all or s.tenant in ("", tenant)),
        stop_faults=dict(scheduler.stops.faults) if sees_all else {},
        silent_agents=dict(harvest.offers.silent_agents) if sees_all else {},
        unrecorded=tuple(scheduler.unrecorded()) if sees_all else (),
    )


def why_unused(offer: SlotOffer, harvest: HarvestedSlots, registry: EngineRegistry) -> str:
    """Why the slot takes no turns, for people: the gateway's reason or its agent's; "" where its
    guest does."""
    guest = registry.members.get(harvest.offers.guest_id(offer.slot))
    if guest is not None:
        return guest.fault or offer.reason
    if offer.state is not SlotState.OFFERED:
        return offer.reason or f"its agent says {offer.state}"
    if harvest.budgets.exhausted(offer):
        return "the error budget of its service is spent"
    return registry.clash_of(offer.engine) or offer.reason


def _engine(scheduler: Scheduler, member: FleetMember) -> GatewayEngine:
    engine, policy = member.engine, scheduler.fleet.policy
    return GatewayEngine(
        kind=engine.kind,
        url=engine.url,
        up=member.up,
        state=policy.state(engine.engine),
        version=policy.version(engine.engine),
        switch_s=member.switch_s,
        concurrency=engine.concurrency,
        open_turns=len(member.running),
        s_per_token_alone=scheduler.dispatcher.policy.engines.s_per_token_alone(engine.engine),
        epoch=member.lease.epoch if member.lease else None,
        numerics=member.numerics,
        identity=member.client.identity,
        context_tokens=member.context_tokens,
        description=member.description,
        fault=member.fault,
    )


def _job(scheduler: Scheduler, job: JobId) -> GatewayJob:
    published, ledger = scheduler.fleet.policy.published(job), scheduler.ledgers[job]
    tokens = {str(kind): scheduler.metrics.tokens[job, kind] for kind in EngineKind}
    for member in scheduler.fleet.members.values():
        running = (each.tokens for each in member.running if each.turn.job == job)
        tokens[member.engine.kind] += sum(running)
    return GatewayJob(
        version=published.version if published else WeightVersion(0),
        store=published.store if published else "",
        may_lease=scheduler.switches.is_on(job, JobSwitch.HARVESTING),
        paused=scheduler.pauses.is_paused(job),
        may_use_dedicated=scheduler.switches.is_on(job, JobSwitch.DEDICATED),
        on_interrupt=scheduler.jobs[job].on_interrupt,
        tokens=tokens,
        turns=asdict(ledger.counters),
        open_turns=len(ledger),
    )


def render_metrics(scheduler: Scheduler) -> bytes:
    """Bring the gauges up to date and render everything."""
    metrics, policy = scheduler.metrics, scheduler.fleet.policy
    routing = scheduler.dispatcher.policy
    for gauge in (metrics.turns_running, metrics.engine_up, metrics.engine_version):
        gauge.clear()
    metrics.service_budget.clear()
    metrics.unrecorded.set(bool(scheduler.unrecorded()))
    metrics.raise_to(metrics.journal_missing, scheduler.missing_decisions())
    metrics.answers_bytes.set(scheduler.answered.size_bytes)
    harvest = scheduler.harvest
    metrics.lease_slack_s.set(harvest.slack_s)
    for agent in scheduler.settings.agents:
        metrics.agent_up.labels(agent.id).set(agent.id not in harvest.offers.silent_agents)
        metrics.stop_missing.labels(agent.id).set(agent.id in scheduler.stops.faults)
    for each in harvest.budgets.all():
        for part in ("budget", "spent", "outstanding"):
            metrics.service_budget.labels(each.service, part).set(getattr(each, part))
    for engine, member in scheduler.fleet.members.items():
        labels = (engine, member.engine.kind)
        metrics.turns_running.labels(*labels).set(len(member.running))
        metrics.engine_up.labels(*labels).set(policy.state(engine) == "serving")
        metrics.engine_version.labels(*labels).set(policy.version(engine) or 0)
    for job, ledger in scheduler.ledgers.items():
        metrics.turns_queued.labels(job).set(routing.queued_turns_of(job))
        metrics.turns_deferred.labels(job).set(routing.deferred_turns_of(job))
        metrics.paused_s.labels(job).set(scheduler.pauses.age_s(job))
        metrics.version.labels(job).set(policy.newest(job))
        held = sum(lease.job == job for lease in harvest.leases.values())
        metrics.leases_held.labels(job).set(held)
        metrics.stale_tokens.labels(job)
        for outcome in ("lost", "duplicated", "migrated", "undelivered", "repeated"):
            total = getattr(ledger.counters, outcome)
            metrics.raise_to(metrics.trajectories.labels(job, outcome), total)
    return metrics.render()
