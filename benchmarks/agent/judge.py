"""Judges one faults scenario by its evidence; an invariant that does not hold is a counted note.

stale_grants       open while data was stale, missing or unbelievable, or against an order; or a
                   scrape that was no answer became a pulse
above_caps         more tokens, KV or time than configured, or more memory than the unit gives
unleased_grants    open without a lease in force; an epoch that falls or serves two requests
unleased_turns     a turn that reached the guest's engine under a lease that was over
unrecorded         an effect without its line in the journal, a lease without its audit event, a
                   journal that does not replay
production_touched signalled, ended, changed or blocked; or asked by more than two connections
left_behind        processes, shared memory, an agent that did not end when it was asked to
rights_exceeded    a call that had to be refused was not
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from benchmarks.agent.evidence import SCRAPE, Caps, Evidence, GrantSeen, TurnServed, plain
from harvester.contracts.audit import AuditKind
from harvester.contracts.page import GrantMode

INVARIANTS = (
    *("stale_grants", "above_caps", "unleased_grants", "unleased_turns", "unrecorded"),
    *("production_touched", "left_behind", "rights_exceeded"),
)
_NOTES_MAX = 20
_BLOCKED_S = 0.05
_CONNECTIONS_MAX = 2
_AGENT_MB = 256.0
"""`MemoryMax` of the shipped unit."""
_UNDECIDED = "agent starts", "agent stopped", "agent fault: "
"""Reasons of closed grants that are no decision: the first and the last one of an agent, and those
of beats that raised."""
_KILL_S = 5.0
"""A guest is gone so soon after the decision to end it."""


@dataclass(slots=True)
class ScenarioVerdict:
    violations: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def note(self, invariant: str, text: str) -> None:
        self.violations[invariant] += 1
        if len(self.notes) < _NOTES_MAX:
            self.notes.append(f"{invariant}: {text}")


def judged(evidence: Evidence) -> ScenarioVerdict:
    verdict = ScenarioVerdict()
    for check in (_data, _caps, _leases, _records, _leavings):
        check(evidence, verdict)
    return verdict


def _open(evidence: Evidence) -> list[GrantSeen]:
    return [seen for seen in evidence.grants if seen.grant.mode is not GrantMode.CLOSED]


def _data(evidence: Evidence, verdict: ScenarioVerdict) -> None:
    for seen in _open(evidence):
        if not _fresh(evidence, seen.slot, seen.stamp_s):
            verdict.note("stale_grants", f"{_named(evidence, seen)}: no data that was fresh")
        for dark in evidence.dark:
            if dark.slot == seen.slot and dark.since_s <= seen.stamp_s < dark.until_s:
                verdict.note("stale_grants", f"{_named(evidence, seen)}: {dark.cause}")
    for stamp_s in evidence.scraped:
        if not _fresh(evidence, SCRAPE, stamp_s):
            verdict.note("stale_grants", f"{evidence.name}: pulse at {stamp_s:.3f} of no answer")


def _fresh(evidence: Evidence, slot: str, at_s: float) -> bool:
    """Whether data could be believed then."""
    slack_s = evidence.tolerance_s
    return any(
        good.at_s - slack_s <= at_s < good.until_s + slack_s
        for good in evidence.good
        if good.slot == slot
    )


def _caps(evidence: Evidence, verdict: ScenarioVerdict) -> None:
    for seen in _open(evidence):
        caps = _caps_at(evidence, seen.stamp_s)
        beyond = {
            "tokens": seen.grant.step_tokens_cap > caps.step_tokens,
            "KV": not 1 <= seen.grant.kv_budget_tokens <= caps.kv_tokens,
            "time": seen.expires_s - seen.stamp_s > caps.ttl_s + 1e-6,
        }
        for what, is_beyond in beyond.items():
            if is_beyond:
                verdict.note("above_caps", f"{_named(evidence, seen)}: {what}")
    if evidence.agent_peak_mb > _AGENT_MB:
        verdict.note("above_caps", f"{evidence.name}: agent of {evidence.agent_peak_mb:.0f} MB")


def _caps_at(evidence: Evidence, at_s: float) -> Caps:
    """The caps in force; of two that a reload exchanges within the tolerance, the wider."""
    limits = [caps for caps in evidence.caps if caps.since_s <= at_s]
    last = limits[-1]
    near = [caps for caps in limits[-2:] if last.since_s >= at_s - evidence.tolerance_s]
    return max([last, *near], key=lambda caps: (caps.step_tokens, caps.kv_tokens))


def _leases(evidence: Evidence, verdict: ScenarioVerdict) -> None:
    requests: dict[tuple[str, int], set[str]] = defaultdict(set)
    for call in evidence.calls:
        requests[call.slot, call.epoch].add(call.request_id)
    for (slot, epoch), names in requests.items():
        if len(names) > 1:
            verdict.note("unleased_grants", f"{evidence.name}: {slot} epoch {epoch} for two")
    highest: dict[str, int] = {}
    for seen in evidence.grants:
        if seen.grant.epoch < highest.get(seen.slot, 0):
            verdict.note("unleased_grants", f"{_named(evidence, seen)}: its epoch has fallen")
        highest[seen.slot] = max(highest.get(seen.slot, 0), seen.grant.epoch)
    terms = {key: _term(evidence, *key) for key in requests}
    for seen in _open(evidence):
        since_s, until_s = terms.get((seen.slot, seen.grant.epoch), (0.0, 0.0))
        slack_s = evidence.tolerance_s
        if not since_s - slack_s <= seen.stamp_s < until_s + slack_s:
            verdict.note("unleased_grants", f"{_named(evidence, seen)}: no lease in force")
    for turn in evidence.turns:
        since_s, until_s = terms.get((turn.slot, turn.epoch), (0.0, 0.0))
        if not since_s <= turn.at_s < _stood_until(evidence, turn, until_s):
            text = (
                f"{evidence.name}: {turn.slot}.{turn.epoch} at {turn.at_s:.3f}: no lease in force"
            )
            verdict.note("unleased_turns", text)
    for refused in evidence.refused:
        if refused.granted or 200 <= refused.status < 300 or refused.status >= 500:
            verdict.note("rights_exceeded", f"{evidence.name}: {refused.name}: {refused.status}")


def _stood_until(evidence: Evidence, turn: TurnServed, ends_s: float) -> float:
    """When the guest had to refuse turns of this epoch: once a later epoch is on its page, or its
    lease is over. Without its agent the last grant under the lease stands until it expires."""
    slack_s, page = evidence.tolerance_s, [g for g in evidence.grants if g.slot == turn.slot]
    granted = (
        seen.expires_s
        for seen in page
        if seen.grant.epoch == turn.epoch and seen.stamp_s < ends_s + slack_s
    )
    later = (seen.seen_s for seen in page if seen.grant.epoch > turn.epoch)
    # A turn and the later grant may come at the same moment.
    over_s = math.nextafter(min(later, default=math.inf), math.inf)
    return min(max([ends_s, *granted]), over_s) + slack_s


def _term(evidence: Evidence, slot: str, epoch: int) -> tuple[float, float]:
    """From the first call of a lease to its end. A restarted agent goes on with a recorded lease
    for at most one TTL."""
    calls = [call for call in evidence.calls if (call.slot, call.epoch) == (slot, epoch)]
    since_s = min(call.at_s for call in calls)
    ends_s = [call.until_s for call in calls if not call.released]
    ends_s += [at_s + evidence.lease_ttl_s for at_s in evidence.starts if at_s > since_s]
    released_s = [call.until_s for call in calls if call.released]
    return since_s, min([max(ends_s, default=since_s), *released_s])


def _records(evidence: Evidence, verdict: ScenarioVerdict) -> None:
    for fault in evidence.replay_faults:
        verdict.note("unrecorded", f"{evidence.name}: {fault}")
    times = {slot: [line.t_s for line in lines] for slot, lines in evidence.decisions.items()}
    for seen in evidence.grants:
        if seen.grant.mode is GrantMode.CLOSED and not evidence.recording:
            continue
        if seen.grant.mode is GrantMode.CLOSED and seen.grant.reason.startswith(_UNDECIDED):
            continue
        at = bisect_right(times.get(seen.slot, []), seen.stamp_s) - 1
        effects = evidence.decisions[seen.slot][at].effects if at >= 0 else ()
        if not any(effect.get("grant") == plain(seen.grant) for effect in effects):
            verdict.note("unrecorded", f"{_named(evidence, seen)}: not in the journal")
    for death in evidence.deaths:
        ordered = any(
            effect["type"] == "kill_guest" and _names(effect, death.pid)
            for line in evidence.decisions.get(death.slot, ())
            if death.at_s - _KILL_S <= line.t_s <= death.at_s
            for effect in line.effects
        )
        if not ordered:
            verdict.note("unrecorded", f"{evidence.name}: guest {death.pid} ended by no decision")
    if evidence.recording:
        _audited(evidence, verdict)


def _names(effect: dict[str, Any], pid: int) -> bool:
    return any(process["pid"] == pid for process in effect["processes"])


def _audited(evidence: Evidence, verdict: ScenarioVerdict) -> None:
    """Each lease that was given has one event, and one for its end once its epoch is over."""
    events = Counter((event.event, event.slot, event.epoch) for event in evidence.audit)
    last: dict[str, int] = {}
    for seen in evidence.grants:
        last[seen.slot] = max(last.get(seen.slot, 0), seen.grant.epoch)
    for slot, epoch in sorted({(call.slot, call.epoch) for call in evidence.calls}):
        if (given := events[AuditKind.LEASE_GRANTED, slot, epoch]) != 1:
            verdict.note("unrecorded", f"{evidence.name}: {slot}.{epoch}: {given} grants in audit")
        ended = events[AuditKind.LEASE_ENDED, slot, epoch]
        if ended > 1 or (epoch < last.get(slot, 0) and not ended):
            verdict.note("unrecorded", f"{evidence.name}: {slot}.{epoch}: {ended} ends in audit")


def _leavings(evidence: Evidence, verdict: ScenarioVerdict) -> None:
    for fate in evidence.production:
        touched = {
            f"signals {fate.signals}": bool(fate.signals),
            f"ended with {fate.status}": fate.status != 0,
            f"changed {fate.changed}": bool(fate.changed),
            f"blocked for {fate.blocked_s:.3f} s": fate.blocked_s > _BLOCKED_S,
            f"{fate.connections} connections": fate.connections > _CONNECTIONS_MAX,
        }
        for what, is_so in touched.items():
            if is_so:
                verdict.note("production_touched", f"{evidence.name}: {what}")
    for left in evidence.left:
        verdict.note("left_behind", f"{evidence.name}: {left}")
    for status in evidence.agent_statuses:
        if status != 0:
            verdict.note("left_behind", f"{evidence.name}: the agent ended with {status}")


def _named(evidence: Evidence, seen: GrantSeen) -> str:
    grant = seen.grant
    return f"{evidence.name}: {seen.slot} at {seen.stamp_s:.3f}, {grant.mode} {grant.reason}"
