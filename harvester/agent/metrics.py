"""The agent's Prometheus exports. `deploy/metrics.py` imports them; the dashboard keeps to it."""

import re
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from harvester.contracts.wire.stops import Stop
from harvester.platform import certificate_expiry

M = TypeVar("M", Counter, Gauge)


def _declared(table: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """Labels and help of each metric, by its name: `name{labels}: help`, further lines indented."""
    entries = re.findall(r"^(\w+)\{(.*)\}: (.*(?:\n .*)*)", table, re.MULTILINE)
    return {name: (tuple(labels.split()), " ".join(text.split())) for name, labels, text in entries}


# Names lack the prefix `harvester_`; names of counters also lack `_total`.
GAUGES = _declared("""\
build_info{version}: Always 1; the version is a label.
mode{slot mode}: 1 for the mode in force (off, observe, harvest), 0 for others.
slot_state{slot state}: 1 for the slot's state (off, learning, closed, cooldown, open), 0 for
    others.
quarantined{slot}: 1 while the slot waits for an operator.
unrecorded{slot}: 1 while the journal or a state file cannot be written: the slot is withdrawn.
slo_headroom_ratio{slot slo}: 1 - recent latency / SLO (slo: ttft, itl); below 0 is a breach. NaN
    once it is 300 s old.
headroom_age_seconds{slot slo}: Age of the newest latency behind the headroom; NaN before the first
    one.
grant_step_tokens{slot}: Token cap per guest step; 0 while closed.
lent_step_tokens{slot}: Tokens of a guest step beside idle production; 0 is nothing.
lent_share_ratio{slot}: Share of production's idle time that such steps may take.
idle_ratio{slot}: Share of recent time without a production step; NaN is unknown.
idle_forecast_ratio{slot horizon percentile}: Share of the next seconds (horizon: 10, 30, 120)
    expected without a production step, by percentile (10, 50, 90); NaN is unknown.
leases_active{slot tenant}: Leases in force.
lease_info{slot tenant rl_job}: 1 with tenant and job of the lease in force (other, where the tenant
    is not configured), 0 with empty labels without a lease.
guest_step_over_ratio{slot}: Share of the guest's late steps that took longer than predicted; 0.1 is
    expected.
guest_step_percentile_ratio{slot kind percentile}: The guest's late steps over what was predicted
    for them alone, while production was idle (alone; 1 is expected at 0.9) and where it overlapped
    them (beside).
production_step_over_ratio{slot kind}: Share of late prefills or decodes that took longer than
    predicted; 0.1 is expected.
production_step_percentile_ratio{slot kind percentile}: Production's late prefills or decodes over
    what was predicted; 1 is expected at 0.9.
blocking_ratio{slot kind}: Share of a running guest step that delays production: configured,
    in_force (1 under MPS while both are not seen on one server), and observed (P99 of the tokens
    beside a stepping guest, in steps of 0.05).
guest_kv_tokens{slot state}: The guest's KV: held by requests, retained for trajectories that are
    away at their tools, free, or withheld (returned to production).
guest_memory_bytes{slot part}: Accelerator memory reported by the guest at its start, by part:
    weights, graphs, activations, context, kv. All but kv stay while it is closed.
guest_weights_away{slot}: 1 while the guest's weights sleep in host memory.
guest_asleep_bytes_max{slot}: Accelerator memory that the guest may hold while its weights sleep:
    graphs, activations and context, as counted awake. NaN where weights never sleep, or where that
    is not known.
guest_isolation{slot backend}: 1 for what the guest says that bounds its steps: idle, time-slicing,
    mps, none.
guest_isolation_holds{slot}: 0 where the guest's threads do not rank below production's; NaN without
    a promise.
mps_state{slot state}: 1 for what the MPS daemon says: guest and production together on one server,
    apart, a fault of a server, or silent. All 0 without consent.
shared_memory_bytes{slot part}: Memory of the control group, or of the KV by pages, that guest and
    production share: used, limit, guest and guest_limit (KV alone); NaN is unknown or not shared.
signal_age_seconds{slot source}: Age of the newest whole reading of a pulse or of the guest's page;
    infinite: never seen.
kill_switch_engaged{level}: 1 while hold or drain is set at that level (node).
slot_stopped{slot order}: 1 for the order to stop (hold, drain) that binds the slot.
interlock_known{interlock}: 0 while the source of an interlock (alerts, accelerators) gives no
    usable answer: slots are held.
stop_info{slot tenant order source by reason at}: 1 for each order to stop in force, with its
    author, reason and time; "" is every slot or tenant.
slo_objective_ratio{slot}: Share of requests that must meet the SLO.
error_budget_spent_ratio{slot}: Harvesting's misses in 28 days / the slot's allowance, or its
    allotment under a lease.
guard_value{slot guard}: What a guard measures: share of the last minute in which the guest had work
    and the law alone held its steps (slack_law), share of misses beyond production's own
    (level_ttft, level_itl), misses charged (error_budget), burn rate (burn_1h, burn_6h), evidence
    of harm (proof).
guard_limit{slot guard}: Value above which the guard reduces or stops harvesting.
guard_binds{slot guard}: 1 while it reduces or stops harvesting.
impact_ratio{slot slo bound}: Latency with grants over without, minus 1 (bound: low, mean, high);
    NaN is unknown.
impact_limit_ratio{slot}: Rise of latency that counts as harm: RoseMuxHarvestImpact fires once the
    low bound of impact_ratio is above it.
config_last_reload_successful{}: 0 after a reload that was refused, or that a restart must complete.
slots_file_in_force{}: 0 while the slots file cannot be used, or a slot cannot be opened: what
    was in force before stays.
slots_file_age_seconds{}: Time since `rosemux discover` last looked and wrote the slots file, as it
    does once a minute, or since the configured file is absent; 0 for a file of another tool.
config_restart_needed{}: Fields of the configuration file that are in force only after a restart.
unsafe_experiments{}: 1 where settings may go beyond the ranges that protect production.
""") | {certificate_expiry.NAME: (certificate_expiry.LABELS, certificate_expiry.HELP)}
COUNTERS = _declared("""\
audit_missing_events{}: Audit events that could not be written; nothing stops for them.
beats_failed{slot}: Beats of the slot that raised, by a fault of the agent: each closed its grant.
journal_missing_lines{slot}: Decisions that could not be written into the journal.
admission_decisions{slot decision reason}: Grants written, by whether they are open or closed and
    why.
guest_tokens{slot}: Tokens that the guest's steps processed.
leases_ended{slot reason}: Leases ended, by reason.
evictions{slot reason}: Guest requests aborted for production.
kv_reclaims{slot outcome}: Memory that was due: returned in time, or missed (not by its deadline).
guest_actions{slot action outcome}: What the agent does to a guest's processes (lift, settle, kill):
    requested by the policy, done, or failed.
guest_prefix_tokens{slot outcome}: Prefix tokens kept for a trajectory away at its tools: used by
    it, or dropped before.
requests{slot}: Production requests counted by the error budget.
unanswered_requests{slot}: Production requests that ended without a first token before their SLO: no
    evidence.
slo_misses{slot}: Production requests over their SLO whose time overlapped a guest step.
""")
HISTOGRAMS = _declared("""\
reclaim_duration_seconds{slot}: From the decision to close until the guest's last launched step
    ended.
guest_steps_met{slot}: The guest's steps that were under way between a production request's arrival
    and its first token; at most 1 at the P99.
""")
_RECLAIM_EDGES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_EDGES = {"reclaim_duration_seconds": _RECLAIM_EDGES_S, "guest_steps_met": (0.0, 1.0, 2.0, 3.0)}


class AgentMetrics:
    """`gauge(name, *labels)` and `counter(name, *labels)` are the series of the tables above.

    Both are kept: prometheus_client's own look-up by labels costs as much as the rest of a beat.
    """

    def __init__(self, *, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._gauges = {
            name: Gauge(f"harvester_{name}", text, labels, registry=self.registry)
            for name, (labels, text) in GAUGES.items()
        }
        counters = {
            name: Counter(f"harvester_{name}", text, labels, registry=self.registry)
            for name, (labels, text) in COUNTERS.items()
        }
        histograms = {
            name: Histogram(
                f"harvester_{name}", text, labels, registry=self.registry, buckets=_EDGES[name]
            )
            for name, (labels, text) in HISTOGRAMS.items()
        }
        every = {**self._gauges, **counters, **histograms}
        declared = (GAUGES | COUNTERS | HISTOGRAMS).items()
        self._of_slots = [every[name] for name, (labels, _) in declared if "slot" in labels]
        self.lease_info = self._gauges["lease_info"]
        self.reclaim_duration = histograms["reclaim_duration_seconds"]
        self.steps_met = histograms["guest_steps_met"]
        self.gauge = cache(partial(_series, self._gauges))
        self.counter = cache(partial(_series, counters))
        self.gauge("build_info", version).set(1)
        self.gauge("config_last_reload_successful").set(1)
        self.gauge("slots_file_in_force").set(1)

    def stops(self, stops: Iterable[Stop]) -> None:
        """Replace the rows of `stop_info`, whose labels are texts of operators."""
        info = self._gauges["stop_info"]
        info.clear()
        for stop in stops:
            texts = (stop.slot, stop.tenant, stop.order, stop.source, stop.by, stop.reason, stop.at)
            info.labels(*texts).set(1)

    def certificates(self) -> None:
        certificate_expiry.show_expiries(self._gauges[certificate_expiry.NAME])

    def forget(self, name: str, *labels: str) -> None:
        """Remove a gauge's series."""
        self._gauges[name].remove(*labels)
        self.gauge.cache_clear()

    def forget_slot(self, slot: str) -> None:
        """Remove every series of a slot."""
        for metric in self._of_slots:
            metric.remove_by_labels({"slot": slot})
        self.gauge.cache_clear()
        self.counter.cache_clear()


def _series(metrics: Mapping[str, M], name: str, *labels: str) -> M:
    return metrics[name].labels(*labels) if labels else metrics[name]
