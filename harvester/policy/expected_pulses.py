"""Pulses that must be present: the present ones, the siblings that they announce, the configured.

Each pulse says how many API servers its engine has. An announced server that never showed itself is
missing, not idle; a page beyond the announced number is a leftover. A configured list adds to that:
it never hides an engine that runs beside the listed ones.
"""

from harvester.contracts.page import PageFault, engine_of, pulse_page
from harvester.policy.sample import PulseReading

MAX_PULSES = 32
"""Their names fit into the grant page."""
FOREIGN_PULSE = "pulse.foreign.0"
"""Stands for pulses that are too many to be believed."""

_GONE = frozenset((PageFault.EXPIRED, PageFault.MISSING))


def expected(
    present: tuple[PulseReading, ...], configured: frozenset[str] = frozenset()
) -> tuple[PulseReading, ...]:
    """`present` less what was left over, with those that are missing, in the order of names.

    Where pulses are configured, the silent page of an engine that is not listed was left over too.
    """
    processes: dict[str, int] = {}
    for reading in present:
        if reading.record is not None:
            engine = engine_of(reading.name)
            processes[engine] = max(processes.get(engine, 0), reading.record.processes)
    if sum(processes.values()) > MAX_PULSES:
        return (PulseReading(name=FOREIGN_PULSE, fault=PageFault.FOREIGN),)
    named = {
        pulse_page(engine, place) for engine, count in processes.items() for place in range(count)
    }
    kept = {
        reading.name: reading
        for reading in present
        if reading.name in named
        or reading.name in configured
        or reading.fault not in _GONE
        or not (configured or processes.get(engine_of(reading.name)))
    }
    for name in named - kept.keys():
        kept[name] = PulseReading(name=name, fault=PageFault.MISSING)
    return tuple(kept[name] for name in sorted(kept))
