"""The GPUs of each slot's production, as its pages state them.

An engine that is silent keeps the GPUs that it stated last, since it may only restart, and so does
each of its processes while its page is there. A pod that takes the place of another is not believed
to run on the GPUs of that one, whose engine may still write its page for a while.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from harvester.config import AgentConfig, SlotConfig
from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import PageDirectory, Pulse, stated_gpus
from harvester.contracts.process import ProcessId
from harvester.discovery.slot_template import GPU, DiscoveredEngine
from harvester.policy.sample import MAX_PULSES

_LEAVE_S = 60.0
"""Time for which the processes of an earlier engine may go on writing their pages. Not longer: they
may be the successor's, if both lived at once."""


@dataclass(slots=True, kw_only=True)
class _Production:
    engine: tuple[str, str]
    """Origin and instance of the engine."""
    since_s: float
    earlier: frozenset[ProcessId] = frozenset()
    """Root processes that were there when the engine took the slot's place of another."""
    roots: frozenset[ProcessId] = frozenset()
    gpus: tuple[str, ...] = ()


class ProductionGpus:
    def __init__(
        self,
        config: AgentConfig,
        *,
        last: Mapping[str, tuple[str, ...]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`config`: the agent's, for the pages and their owners; its slots do not matter. `last`:
        GPUs of each slot as an earlier process wrote them, which a unit keeps while it states
        nothing, unless it names others itself. A pod may be another than the one that had them."""
        self._config = config
        self._last = last or {}
        self._clock = clock or MonotonicClock()
        self._by_slot: dict[str, _Production] = {}

    def __call__(self, slot: SlotConfig, engine: DiscoveredEngine) -> tuple[str, ...]:
        """UUIDs of the engine's GPUs; empty on a CPU, and if it has not stated them yet."""
        found, key = self._by_slot.get(slot.name), (engine.origin, engine.instance)
        now_s = self._clock.now()
        if found is None or found.engine != key:
            earlier = found.earlier | found.roots if found else frozenset()
            same = found is None and not engine.instance and GPU not in engine.values
            gpus = self._last.get(slot.name, ()) if same else ()
            found = _Production(engine=key, since_s=now_s, earlier=earlier, gpus=gpus)
            self._by_slot[slot.name] = found
        if now_s - found.since_s >= _LEAVE_S:
            found.earlier = frozenset()
        fresh, silent = self._pulses(slot)
        fresh = [pulse for pulse in fresh if pulse.root not in found.earlier]
        if fresh:
            silent = [pulse for pulse in silent if pulse.root in found.roots]
            pulses = [*fresh, *silent]
            found.roots = frozenset(pulse.root for pulse in pulses if pulse.root is not None)
            found.gpus = stated_gpus(pulses)
        return found.gpus

    def _pulses(self, slot: SlotConfig) -> tuple[list[Pulse], list[Pulse]]:
        """Pulses that are fresh, and the last ones of pages whose writer is silent."""
        try:
            owners = self._config.owners_of(slot)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        pages = PageDirectory(self._config.pages_of(slot), owners)
        fresh, silent = [], []
        for name in pages.pulse_names()[:MAX_PULSES]:
            reader = pages.pulse_reader(name)
            if (pulse := reader.read().record) is not None:
                fresh.append(pulse)
            elif (left := reader.read_left().record) is not None:
                silent.append(left)
        return fresh, silent
