"""State of an engine's cores, from all of its API servers.

Each step's statistics reach one of them, so a core's newest word counts, wherever it stands.
"""

from collections.abc import Sequence

from harvester.contracts.page.records import EngineCore, PulseHead

_LATE_NS = 250_000_000
"""Reports closer in time than this cannot be ordered: a busy API server may read its statistics
later by as much."""


def latest_cores(pulses: Sequence[PulseHead]) -> Sequence[EngineCore]:
    """The latest report of each core, from the pulses of one engine.

    Reports that are nearly as new as the newest cannot be ordered: the one with the fewest requests
    counts, since a running engine repeats its report and an idle one reports once.
    """
    if len(pulses) == 1:
        return pulses[0].cores
    words: dict[int, list[EngineCore]] = {}
    for pulse in pulses:
        for core in pulse.cores:
            words.setdefault(core.rank, []).append(core)
    found: list[EngineCore] = []
    for of_core in words.values():
        newest_ns = max([core.told_ns for core in of_core])
        near = [core for core in of_core if newest_ns - core.told_ns <= _LATE_NS]
        found.append(min(near, key=lambda core: core.running + core.waiting))
    return found
