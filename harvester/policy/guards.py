"""The guards above the slack law, each on one slot's own latencies: level, error budget, proof.

The slack law acts before each of the guest's steps; the guards judge production's latencies after.
"""

from collections.abc import Callable

from harvester.contracts.served import NONE_SERVED, Served
from harvester.contracts.wire.leases import GuardReading
from harvester.policy.budget import BURN_WINDOWS, ErrorBudget
from harvester.policy.durable import GuardMemory
from harvester.policy.level import Level, MissWindow
from harvester.policy.production import ProductionView
from harvester.policy.proof import Proof
from harvester.policy.sample import NO_LEASE, LeaseView
from harvester.policy.settings import SlotSettings


class Guards:
    def __init__(self, settings: SlotSettings, memory: GuardMemory) -> None:
        self._settings = settings
        self._memory = memory
        self.step_level = Level(settings.step_level, memory.step_level)
        self._ttft_misses = MissWindow(settings.misses, memory.misses)
        self._itl_misses = MissWindow(settings.misses, memory.itl_misses)
        proven = settings.proof.share_ratio > 0
        self.budget = ErrorBudget(settings.budget, memory.budget, proven=proven)
        self.proof = Proof(
            settings.proof,
            memory.proof,
            ttft_slo_s=settings.ttft_slo_s,
            itl_slo_s=settings.itl_slo_s,
        )

    def account(
        self,
        production: ProductionView,
        *,
        beside_step: Callable[[float], bool],
        lease: LeaseView = NO_LEASE,
        now: float,
    ) -> bool:
        """Fold a beat's latencies into level and budget; True if the budget is overspent.

        `beside_step(s)`: whether the guest stepped within the last `s` seconds before `now`.
        """
        served, breached = NONE_SERVED, False
        if production.ttft.total or production.itl.total or production.itl_late.total:
            served, breached = self._judged(production, beside_step=beside_step, now=now)
        self._memory.unanswered += production.unanswered
        level = self.step_level.observe(breached=breached, now=now)
        for window in (self._ttft_misses, self._itl_misses):
            window.state.breached &= level < 1.0
        return self.budget.observe(
            served,
            now=now,
            slice_s=self.proof.slice_s,
            withheld_share=self.proof.withheld_share,
            leased=lease.lease is not None,
            allotment=lease.allotment,
        )

    def _judged(
        self, production: ProductionView, *, beside_step: Callable[[float], bool], now: float
    ) -> tuple[Served, bool]:
        """A beat's new latencies as counts for the budget, and whether they breach the level's
        limit on misses."""
        settings, memory = self._settings, self._memory
        ttft, itl, late = production.ttft, production.itl, production.itl_late
        late_first = ttft.above(settings.ttft_slo_s)
        ttft_misses = sum(weight for x, weight in late_first.weighed if beside_step(x))
        itl_misses = sum(weight for x, weight in late.weighed if beside_step(x))
        misses = ttft_misses + min(itl_misses, production.decoded)
        served = self._served(production, misses=misses, now=now)
        if served != NONE_SERVED:
            memory.served += served
        own = [(x, weight) for x, weight in ttft.weighed if self.proof.stands_for(now - x)]
        own_samples = sum(weight for _, weight in own)
        level_ttft = self._ttft_misses.observe(
            samples=ttft.total,
            misses=ttft_misses,
            own_samples=own_samples,
            own_misses=sum(weight for x, weight in own if x > settings.ttft_slo_s),
            own_stands_for=served.withheld / own_samples if own_samples else 1.0,
            now=now,
        )
        withheld = served.withheld_beats > 0
        level_itl = self._itl_misses.observe(
            samples=itl.total,
            misses=itl_misses,
            own_samples=itl.total * withheld,
            own_misses=late.total * withheld,
            own_stands_for=served.withheld_beats / production.decoded if withheld else 1.0,
            now=now,
        )
        return served, level_ttft or level_itl

    def prove(
        self, production: ProductionView, *, eligible: bool, leased: bool, now: float
    ) -> None:
        """Fold a beat's latencies into the proof; `eligible`, `leased` as `Proof.observe` has."""
        in_time_s = [x for x in production.itl.seen_s if x <= self._settings.itl_slo_s]
        itl_s = (*in_time_s, *production.itl_late.seen_s)
        ttft_s = production.ttft.seen_s
        self.proof.observe(ttft_s=ttft_s, itl_s=itl_s, eligible=eligible, leased=leased, now=now)
        # After a stop the proof begins a new state.
        self._memory.proof = self.proof.state

    def readings(self) -> tuple[GuardReading, ...]:
        settings, budget, proof = self._settings, self.budget, self.proof
        stops, (charged, allowed) = "", budget.charge
        if budget.stopped and settings.budget.enforced:
            stops = budget.state.guard

        def reading(guard: str, value: float, limit: float, *, binds: bool) -> GuardReading:
            return GuardReading(guard=guard, value=value, limit=limit, binds=binds)

        most = settings.misses.limit_ratio
        ttft, itl = self._ttft_misses, self._itl_misses
        burns = {
            each.guard: (budget.burn_rate(each.long_minutes), each.rate) for each in BURN_WINDOWS
        }
        return (
            reading("level_ttft", ttft.miss_ratio, most, binds=ttft.state.breached),
            reading("level_itl", itl.miss_ratio, most, binds=itl.state.breached),
            reading("error_budget", charged, allowed, binds=stops == "error_budget"),
            *(reading(name, *burn, binds=stops == name) for name, burn in burns.items()),
            reading("proof", proof.evidence, proof.evidence_limit, binds=proof.harmful),
        )

    def _served(self, production: ProductionView, *, misses: float, now: float) -> Served:
        """The beat's first tokens, each by the proof's slice in which its request arrived, and
        decoding requests, by the slice of the longest time between their tokens. `misses`: misses
        beside a guest step."""
        settings, ttft, itl = self._settings, production.ttft, production.itl
        if not ttft.seen_s and not itl.seen_s:
            return Served(requests=ttft.total, misses=misses)
        granted = granted_late = withheld = withheld_late = 0.0
        for latency_s, weight in ttft.weighed:
            stands_for = self.proof.stands_for(now - latency_s)
            late = weight * (latency_s > settings.ttft_slo_s)
            if stands_for:
                withheld += stands_for * weight
                withheld_late += stands_for * late
            elif stands_for is not None:
                granted += weight
                granted_late += late
        stands_for, late_decoded = None, 0.0
        if itl.seen_s:
            worst_s = max(itl.seen_s + production.itl_late.seen_s)
            stands_for = self.proof.stands_for(now - worst_s)
            late_decoded = min(production.itl_late.total, production.decoded)
        beside, alone = float(stands_for == 0.0), stands_for or 0.0
        return Served(
            requests=ttft.total,
            misses=misses,
            granted=granted,
            granted_misses=granted_late,
            granted_beats=beside * production.decoded,
            granted_late_beats=beside * late_decoded,
            withheld=withheld,
            withheld_misses=withheld_late,
            withheld_beats=alone * production.decoded,
            withheld_late_beats=alone * late_decoded,
        )
