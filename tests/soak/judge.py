"""The judge of a soak: all pieces, one verdict. Pure; a tampered record of any kind convicts."""

from collections import Counter
from collections.abc import Sequence

from tests.soak.judge_grants import judge_grants, judge_recovery
from tests.soak.judge_memory import judge_memory
from tests.soak.judge_parts import judge_ends, judge_production, latencies
from tests.soak.judge_turns import judge_served, judge_turns
from tests.soak.records import (
    FaultStruck,
    LendingSample,
    Note,
    PieceBegun,
    SoakRecord,
    VersionMade,
    of_kind,
)
from tests.soak.verdict import SoakVerdict


def judged(pieces: Sequence[Sequence[SoakRecord]]) -> SoakVerdict:
    verdict, made = SoakVerdict(), dict[int, VersionMade]()
    for records in pieces:
        made |= {each.version: each for each in of_kind(records, VersionMade)}
        judge_production(records, verdict)
        judge_ends(records, verdict)
        judge_turns(records, made, verdict)
        judge_served(records, made, verdict)
        judge_grants(records, verdict)
        judge_recovery(records, verdict)
    judge_memory(pieces, verdict)
    faults = [fault for records in pieces for fault in of_kind(records, FaultStruck)]
    waits = verdict.figures.pop("recoveries_s", [])
    verdict.figures |= {
        "hours": round(sum(map(soaked_s, pieces)) / 3600, 3),
        "pieces": len(pieces),
        "versions": len(made),
        "faults_by_name": dict(sorted(Counter(f.name for f in faults if not f.skipped).items())),
        "faults_skipped": dict(
            sorted(Counter(f"{f.name}: {f.skipped}" for f in faults if f.skipped).items())
        ),
        "recovery_s": {
            "median": round(waits[len(waits) // 2], 1),
            "most": round(waits[-1], 1),
        }
        if waits
        else {},
        "latencies": latencies(pieces),
        "notes": dict(Counter(each.text for records in pieces for each in of_kind(records, Note))),
    }
    return verdict


def soaked_s(records: Sequence[SoakRecord]) -> float:
    """Time of a piece for which its parts ran under load."""
    begun = of_kind(records, PieceBegun)
    lent = of_kind(records, LendingSample)
    return lent[-1].at_s - begun[0].at_s if begun and lent else 0.0
