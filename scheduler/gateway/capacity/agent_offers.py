"""The slots that agents offer, and the guests on them; a silent agent offers none."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import EngineId, SlotId, checked_name
from harvester.contracts.wire.engines import EngineDescription
from harvester.contracts.wire.leases import SlotOffer, SlotOffers, SlotState
from harvester.platform.tls import Credentials
from scheduler.gateway.capacity.agent_client import AgentClient
from scheduler.gateway.settings import GUEST_ID_PREFIX, EngineSettings
from scheduler.model import Engine, EngineKind

_log = logging.getLogger(__name__)
_LEASABLE = (SlotState.OFFERED, SlotState.LEASED, SlotState.LEARNING)


@dataclass(slots=True)
class AgentOffers:
    agents: dict[str, AgentClient]
    _credentials: dict[str, Credentials]
    """Credentials for the guests of each agent; a guest's entry in `_guests` takes precedence."""
    _guests: Mapping[SlotId, EngineSettings]
    slots: dict[SlotId, tuple[str, SlotOffer]] = field(default_factory=dict)
    """Offered slots, each with its agent."""
    silent_agents: dict[str, str] = field(default_factory=dict)
    """Why slots of some agents are not used."""

    def add_agent(self, name: str, agent: AgentClient, guests: Credentials) -> None:
        """Asks one more agent from now on; `guests`: as in `_credentials`."""
        self.agents[name], self._credentials[name] = agent, guests

    def leasable(self) -> Iterator[EngineDescription]:
        """The engines of slots that may be leased, leased or not."""
        return (offer.engine for _, offer in self.slots.values() if offer.state in _LEASABLE)

    def find(self, slot: SlotId, agent: str) -> SlotOffer | None:
        """The slot's offer, if this agent's."""
        name, offer = self.slots.get(slot, ("", None))
        return offer if name == agent else None

    async def refresh(self, name: str) -> SlotOffers | None:
        """Asks one agent again; returns what may be used, None while it does not answer."""
        try:
            reply = await self.agents[name].offers()
        except (Exhausted, PeerProtocolError) as error:
            self.note_silence(name, str(error))
            self.slots = self._of_others(name)
            return None
        if self.silent_agents.pop(name, None):
            _log.info("agent %s answers again", name)
        others = self._of_others(name)
        twice = sorted(offer.slot for offer in reply.slots if offer.slot in others)
        if twice:
            # Leases and guests are known by their slot: one of two would get the other's turns.
            first = others[twice[0]][0]
            self.note_silence(name, f"agent {first} offers {', '.join(twice)} too: rename them")
        fresh = {offer.slot: offer for offer in reply.slots if offer.slot not in others}
        for slot, offer in tuple(fresh.items()):
            if exposed := self.credentials(name, slot).exposed_at(offer.engine_url):
                self.note_silence(name, f"slot {slot}: {exposed}")
                del fresh[slot]
        self.slots = others | {slot: (name, offer) for slot, offer in fresh.items()}
        return replace(reply, slots=tuple(fresh.values()))

    def _of_others(self, agent: str) -> dict[SlotId, tuple[str, SlotOffer]]:
        return {slot: offered for slot, offered in self.slots.items() if offered[0] != agent}

    def note_silence(self, agent: str, why: str) -> None:
        """Logs the beginning of each silence, and a change of its reason."""
        if self.silent_agents.get(agent) != why:
            _log.warning("agent %s: its slots are not used: %s", agent, why)
        self.silent_agents[agent] = why

    def credentials(self, agent: str, slot: SlotId) -> Credentials:
        own = self._guests.get(slot)
        return own if own is not None and own.are_given else self._credentials[agent]

    def guest_id(self, slot: SlotId) -> EngineId:
        settings = self._guests.get(slot)
        return EngineId(settings.id if settings else f"{GUEST_ID_PREFIX}{slot}")

    def guest(self, offer: SlotOffer) -> Engine:
        """The guest on an offered slot. Raises PeerProtocolError for a slot's invalid name."""
        settings = self._guests.get(offer.slot)
        checked_name(offer.slot, what="slot")
        return Engine(
            engine=self.guest_id(offer.slot),
            kind=EngineKind.GUEST,
            url=offer.engine_url,
            concurrency=min(max(1, offer.concurrency), settings.concurrency if settings else 4096),
            numerics=settings.numerics if settings else "",
        )
