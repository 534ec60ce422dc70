"""The GPUs of each slot's production, as its pages state them.

An engine that is silent keeps the GPUs that it stated last, since it may only restart. A pod that
takes the place of another is not believed to run on the GPUs of that one, whose engine may still
write its page for a while.
"""

from dataclasses import dataclass

from harvester.config import AgentConfig, SlotConfig
from harvester.contracts.errors import ConfigError
from harvester.contracts.page import PageDirectory, Pulse, stated_gpus
from harvester.contracts.process import ProcessId
from harvester.discovery.slot_template import DiscoveredEngine
from harvester.policy.sample import MAX_PULSES

_Roots = frozenset[ProcessId | None]


@dataclass(slots=True, kw_only=True)
class _Production:
    engine: tuple[str, str]
    """Origin and instance of the engine."""
    earlier: _Roots = frozenset()
    """Root processes of the slot's earlier engines."""
    roots: _Roots = frozenset()
    gpus: tuple[str, ...] = ()


class ProductionGpus:
    def __init__(self, config: AgentConfig) -> None:
        """`config`: the agent's, for the pages and their owners; its slots do not matter."""
        self._config = config
        self._by_slot: dict[str, _Production] = {}

    def __call__(self, slot: SlotConfig, engine: DiscoveredEngine) -> tuple[str, ...]:
        """UUIDs of the engine's GPUs; empty on a CPU, and if it has not stated them yet."""
        found, key = self._by_slot.get(slot.name), (engine.origin, engine.instance)
        if found is None or found.engine != key:
            earlier = found.earlier | found.roots if found else frozenset()
            found = self._by_slot[slot.name] = _Production(engine=key, earlier=earlier)
        pulses = [pulse for pulse in self._pulses(slot) if pulse.root not in found.earlier]
        if pulses:
            found.roots = frozenset(pulse.root for pulse in pulses if pulse.root is not None)
            found.gpus = stated_gpus(pulses)
        return found.gpus

    def _pulses(self, slot: SlotConfig) -> list[Pulse]:
        try:
            owners = self._config.owners_of(slot)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return PageDirectory(self._config.pages_of(slot), owners).pulses(most=MAX_PULSES)
