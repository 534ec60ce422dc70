"""The judge of `benchmarks.agent` convicts a record that was tampered with in one place of that."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from benchmarks.agent.evidence import (
    SCRAPE,
    Caps,
    Dark,
    Death,
    Evidence,
    GoodData,
    GrantSeen,
    LeaseCall,
    ProductionFate,
    RefusedCall,
    TurnServed,
    plain,
)
from benchmarks.agent.judge import judged
from harvester.contracts.audit import AuditEvent
from harvester.contracts.journal import Decided
from harvester.contracts.page import Grant, GrantMode

SLOT = "slot0"
_OPEN = Grant(epoch=3, mode=GrantMode.OPEN, reason="open", step_tokens_cap=512, kv_budget_tokens=9)
_CLOSED = msgspec.structs.replace(_OPEN, mode=GrantMode.CLOSED, reason="no lease", epoch=4)


def _seen(at_s: float, grant: Grant = _OPEN, *, ttl_s: float = 0.5) -> GrantSeen:
    return GrantSeen(slot=SLOT, stamp_s=at_s, expires_s=at_s + ttl_s, seen_s=at_s, grant=grant)


def _line(at_s: float, *effects: dict[str, Any]) -> Decided:
    return Decided(t_s=at_s, config_hash="", sample={}, effects=effects)


def _write(grant: Grant) -> dict[str, Any]:
    return {"type": "write_grant", "grant": plain(grant), "ttl_s": 0.5, "reason": grant.reason}


def _event(kind: str, epoch: int = 3) -> AuditEvent:
    return AuditEvent(schema=1, time="", t_s=0, node="n", event=kind, slot=SLOT, epoch=epoch)


def _call(**changes: Any) -> LeaseCall:
    call = {"slot": SLOT, "request_id": "r1", "epoch": 3, "at_s": 9.0, "until_s": 19.0}
    return LeaseCall(**{**call, **changes})


def _clean() -> Evidence:
    kill = {"type": "kill_guest", "processes": [{"pid": 7, "start_ticks": 1}], "reason": "owes"}
    return Evidence(
        name="clean",
        grants=[_seen(10.0), _seen(10.1), _seen(12.0, _CLOSED)],
        good=[
            GoodData(slot=SLOT, at_s=9.9, until_s=10.2),
            GoodData(slot=SCRAPE, at_s=9.0, until_s=10.0),
        ],
        dark=[Dark(slot=SLOT, cause="stopped", since_s=10.2, until_s=12.0)],
        caps=[Caps(since_s=0.0, step_tokens=512, kv_tokens=9, ttl_s=0.5)],
        starts=[8.0],
        calls=[_call()],
        turns=[TurnServed(slot=SLOT, epoch=3, at_s=10.1)],
        refused=[RefusedCall(name="no JSON", status=400)],
        scraped=[9.5],
        decisions={
            SLOT: [
                _line(9.99, _write(_OPEN)),
                _line(10.09, _write(_OPEN), kill),
                _line(11.99, _write(_CLOSED)),
            ]
        },
        audit=[_event("lease_granted"), _event("lease_ended")],
        production=[ProductionFate()],
        deaths=[Death(slot=SLOT, pid=7, at_s=10.5)],
        agent_statuses=[0],
        agent_peak_mb=60.0,
    )


def _set(name: str, *values: Any) -> Callable[[Evidence], None]:
    return lambda evidence: setattr(evidence, name, list(values))


def _add(name: str, value: Any) -> Callable[[Evidence], None]:
    return lambda evidence: getattr(evidence, name).append(value)


def _fate(**changes: Any) -> Callable[[Evidence], None]:
    return _set("production", ProductionFate(**changes))


def _granted(**changes: Any) -> Callable[[Evidence], None]:
    """An open grant and its line, otherwise than configured."""
    grant = msgspec.structs.replace(_OPEN, **changes)

    def tamper(evidence: Evidence) -> None:
        evidence.grants[1] = _seen(10.1, grant)
        evidence.decisions[SLOT][1] = _line(10.09, _write(grant), {**_KILL})

    return tamper


_KILL = {"type": "kill_guest", "processes": [{"pid": 7, "start_ticks": 1}], "reason": "owes"}

TAMPERED: dict[str, tuple[str, Callable[[Evidence], None]]] = {
    "data that had expired": (
        "stale_grants",
        _set("good", GoodData(slot=SLOT, at_s=9.9, until_s=10.05), _clean().good[1]),
    ),
    "data of another slot": (
        "stale_grants",
        _set("good", GoodData(slot="slot1", at_s=9.9, until_s=10.2), _clean().good[1]),
    ),
    "open in the dark": (
        "stale_grants",
        _add("dark", Dark(slot=SLOT, cause="kill file", since_s=10.05, until_s=11.0)),
    ),
    "a pulse of no answer": ("stale_grants", _add("scraped", 10.0)),
    "too many tokens": ("above_caps", _granted(step_tokens_cap=513)),
    "too much KV": ("above_caps", _granted(kv_budget_tokens=10)),
    "KV without a bound": ("above_caps", _granted(kv_budget_tokens=0)),
    "too long": ("above_caps", lambda e: e.grants.__setitem__(1, _seen(10.1, ttl_s=0.51))),
    "caps that were lowered": (
        "above_caps",
        _add("caps", Caps(since_s=10.05, step_tokens=17, kv_tokens=9, ttl_s=0.5)),
    ),
    "a fat agent": ("above_caps", lambda e: setattr(e, "agent_peak_mb", 257.0)),
    "a lease that had run out": ("unleased_grants", _set("calls", _call(until_s=10.05))),
    "a lease that was given back": (
        "unleased_grants",
        _add("calls", _call(at_s=10.05, until_s=10.05, released=True)),
    ),
    "one epoch for two": ("unleased_grants", _add("calls", _call(request_id="r2"))),
    "a turn of an earlier epoch": (
        "unleased_turns",
        _add("turns", TurnServed(slot=SLOT, epoch=2, at_s=10.1)),
    ),
    "a turn before its lease": (
        "unleased_turns",
        _add("turns", TurnServed(slot=SLOT, epoch=3, at_s=8.9)),
    ),
    "a turn behind the lease's end": (
        "unleased_turns",
        lambda e: (e.grants.pop(), e.turns.append(TurnServed(slot=SLOT, epoch=3, at_s=19.1))),
    ),
    "a turn of an epoch that a later grant has ended": (
        "unleased_turns",
        _add("turns", TurnServed(slot=SLOT, epoch=3, at_s=12.05)),
    ),
    "an epoch that falls": ("unleased_grants", lambda e: e.grants.reverse()),
    "a grant without its line": ("unrecorded", lambda e: e.decisions[SLOT].__delitem__(2)),
    "a line of another grant": (
        "unrecorded",
        lambda e: e.decisions[SLOT].__setitem__(2, _line(11.99, _write(_OPEN))),
    ),
    "no journal": ("unrecorded", lambda e: e.decisions[SLOT].clear()),
    "a journal that does not replay": ("unrecorded", _add("replay_faults", "line 3 differs")),
    "a guest that another ended": (
        "unrecorded",
        _add("deaths", Death(slot=SLOT, pid=8, at_s=10.5)),
    ),
    "a guest that ended long after": (
        "unrecorded",
        _set("deaths", Death(slot=SLOT, pid=7, at_s=16.0)),
    ),
    "a lease that is not in the audit": ("unrecorded", _set("audit", _event("lease_ended"))),
    "a lease that was given twice": ("unrecorded", _add("audit", _event("lease_granted"))),
    "an end that is not in the audit": ("unrecorded", _set("audit", _event("lease_granted"))),
    "a signal to production": ("production_touched", _fate(signals=(15,))),
    "an end of production": ("production_touched", _fate(status=-9)),
    "another class of production": ("production_touched", _fate(changed=("class",))),
    "production that waited": ("production_touched", _fate(blocked_s=0.06)),
    "scrapes that pile up": ("production_touched", _fate(connections=3)),
    "a process": ("left_behind", _add("left", "process 7")),
    "an agent that did not end": ("left_behind", _set("agent_statuses", -9)),
    "a call that was granted": (
        "rights_exceeded",
        _add("refused", RefusedCall(name="guess", status=0, granted=True)),
    ),
    "a call that succeeded": (
        "rights_exceeded",
        _set("refused", RefusedCall(name="x", status=200)),
    ),
    "a call that broke the agent": (
        "rights_exceeded",
        _set("refused", RefusedCall(name="x", status=500)),
    ),
}


def test_a_clean_record_is_not_convicted() -> None:
    assert judged(_clean()).notes == []


def test_a_grant_without_its_agent_stands_until_it_expires_and_no_longer() -> None:
    evidence = _clean()
    evidence.grants[2:] = [_seen(18.9)]
    evidence.good.append(GoodData(slot=SLOT, at_s=18.8, until_s=19.0))
    evidence.decisions[SLOT][2:] = [_line(18.89, _write(_OPEN))]
    evidence.turns = [TurnServed(slot=SLOT, epoch=3, at_s=19.3)]
    assert judged(evidence).notes == []
    evidence.turns.append(TurnServed(slot=SLOT, epoch=3, at_s=19.4))
    assert set(judged(evidence).violations) == {"unleased_turns"}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_record_is_convicted_of_just_that(name: str) -> None:
    invariant, tamper = TAMPERED[name]
    evidence = _clean()
    tamper(evidence)
    assert set(judged(evidence).violations) == {invariant}


def test_a_restarted_agent_goes_on_with_a_recorded_lease_for_one_ttl() -> None:
    evidence = _clean()
    evidence.calls = [_call(until_s=10.05)]
    evidence.starts.append(10.02)
    assert judged(evidence).notes == []
    evidence.calls.append(_call(at_s=10.01, until_s=10.01, released=True))
    assert set(judged(evidence).violations) == {"unleased_grants"}


def test_a_full_disk_excuses_closed_grants_and_events_but_no_open_grant() -> None:
    evidence = _clean()
    evidence.recording = False
    evidence.audit.clear()
    del evidence.decisions[SLOT][2]
    assert judged(evidence).notes == []
    evidence.decisions[SLOT].clear()
    evidence.deaths.clear()
    assert judged(evidence).violations == {"unrecorded": 2}
