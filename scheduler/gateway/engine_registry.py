"""The engines that the gateway knows, and what they allow to requests: models, contexts, jobs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from harvester.contracts.ids import EngineId, JobId
from harvester.contracts.wire.engines import EngineDescription
from scheduler.gateway.capacity.agent_offers import AgentOffers
from scheduler.gateway.fleet_member import FleetMember
from scheduler.gateway.policy.routing_events import ForgetPrefix
from scheduler.gateway.policy.versions import VersionPolicy
from scheduler.gateway.settings import GatewayJobSettings
from scheduler.model import EngineKind

_FAULT_CHARS = 200
"""Bound on one engine's fault in a message: engines word parts of it."""


@dataclass(slots=True)
class EngineRegistry:
    versions: VersionPolicy
    jobs: Mapping[JobId, GatewayJobSettings]
    _offers: AgentOffers
    """Slots whose guests may still be leased."""
    members: dict[EngineId, FleetMember] = field(default_factory=dict)
    parked: set[JobId] = field(default_factory=set)
    """Jobs whose turns may not run on dedicated engines."""

    def is_serving(self, engine: EngineId) -> bool:
        return self.versions.state(engine) == "serving"

    def may_use_dedicated(self, job: JobId) -> bool:
        return job not in self.parked

    def dedicated_places(self) -> int:
        """Turns that the dedicated engines take at once; one whose update failed takes none."""
        return sum(
            member.engine.concurrency
            for engine, member in self.members.items()
            if member.up
            and member.engine.kind is EngineKind.DEDICATED
            and not self.versions.fails(engine)
        )

    def model_names(self, job: JobId) -> set[str]:
        """Model names that a request of the job may use. The base of its adapter is none of them,
        since engines answer with the adapter."""
        adapter = self.jobs[job].adapter
        return {job, adapter} if adapter else {job, *self.models()}

    def may_meet_other_models(self, job: JobId) -> bool:
        """Whether no engine's model is known yet, though there are engines to come."""
        known = self.jobs[job].adapter or self.models()
        return not known and bool(self.members or self._offers.agents)

    def models(self) -> set[str]:
        """Model names of the engines that are known."""
        names = [member.model for member in self._agreeing()]
        return {*filter(None, [*names, *(engine.model for engine in self._leasable())])}

    def vocabulary_tokens(self) -> int | None:
        """Smallest vocabulary of the engines; None while no vocabulary is known."""
        known = (member.vocabulary_tokens for member in self._agreeing())
        return min((tokens for tokens in known if tokens), default=None)

    def context_tokens(self) -> int:
        """Largest context of the engines; 0 while none is known."""
        return max((member.context_tokens for member in self._agreeing()), default=0)

    def context_limit(self) -> int | None:
        """Largest context of any engine in tokens, once it is known of every engine."""
        known = [member.context_tokens for member in self._agreeing()]
        known += [engine.context_tokens for engine in self._leasable()]
        return max(known) if known and all(known) else None

    def _agreeing(self) -> Iterator[FleetMember]:
        """The engines whose descriptions count for all requests."""
        return (member for member in self.members.values() if not member.clashes)

    def _leasable(self) -> Iterator[EngineDescription]:
        serving = self._serving(self.members.values())
        return (each for each in self._offers.leasable() if not _clash(each, serving))

    def clash_of(self, guest: EngineDescription) -> str:
        """Reason why the guest cannot make tokens beside the serving engines; "" if it can."""
        return _clash(guest, self._serving(self.members.values()))

    def agree(self) -> bool:
        """Whether no serving engine clashes with another one."""
        serving = self._serving(self.members.values())
        return not any(_clash(each, serving) for each in serving)

    def review_clash(self, member: FleetMember) -> str:
        """Compares a dedicated engine with dedicated ones only: guests that clash are dropped."""
        guest = member.engine.kind is EngineKind.GUEST
        others = (
            other
            for other in self.members.values()
            if other is not member and (guest or other.engine.kind is EngineKind.DEDICATED)
        )
        described = member.description
        fault = _clash(described, self._serving(others)) if described else ""
        member.clashes = member.clashes or bool(fault)
        return fault

    def twin_of(self, member: FleetMember) -> str:
        """Why an engine that was just described is another one under a second URL; "" if it is not.
        An update of the one would change weights under the turns of the other."""
        for engine, other in self.members.items():
            twin = other is not member and other.is_described
            if twin and not member.client.process.isdisjoint(other.client.process):
                return f"it is the process of engine {engine}: list it once, with one URL"
        return ""

    def _serving(self, members: Iterable[FleetMember]) -> dict[EngineDescription, EngineId]:
        """The first serving engine of each description. Engines are mostly alike, and each request
        with a model's name compares the slots, of which there may be hundreds, with all of them."""
        serving: dict[EngineDescription, EngineId] = {}
        for member in members:
            engine, described = member.engine.engine, member.description
            if described is not None and self.is_serving(engine):
                serving.setdefault(described, engine)
        return serving

    def shows_engines(self, job: JobId) -> bool:
        """Whether the job's tenant sees them: they serve a job of the same tenant, or none."""
        target = self.versions.target
        return target is None or self.jobs[target.job].tenant == self.jobs[job].tenant

    def faults(self, job: JobId) -> list[str]:
        """Faults of engines, each in one sentence; none where the job's tenant sees no engines."""
        members = self.members.values() if self.shows_engines(job) else ()
        found = [(each.engine.engine, " ".join(each.fault.split())) for each in members]
        return [f"engine {engine}: {fault[:_FAULT_CHARS]}" for engine, fault in found if fault]

    def forget_prefix(self, effect: ForgetPrefix) -> None:
        """The engine learns with its next request that the trajectory has ended."""
        if (member := self.members.get(effect.engine)) is not None:
            member.ended_trajectories.append(f"{effect.job}/{effect.trajectory}")


def _clash(described: EngineDescription, serving: Mapping[EngineDescription, EngineId]) -> str:
    if described.fault:
        return described.fault
    clashes = ((described.disagreement(other), engine) for other, engine in serving.items())
    return next((f"{clash} as on {engine}" for clash, engine in clashes if clash), "")
