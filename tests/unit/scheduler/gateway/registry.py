"""A registry of engines without agents, for parts that stand on one."""

from harvester.contracts.ids import JobId
from scheduler.gateway.capacity.agent_offers import AgentOffers
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.policy.versions import VersionPolicy
from scheduler.gateway.policy.versions_events import VersionsConfig
from scheduler.gateway.settings import GatewayJobSettings


def registry_of(
    *jobs: JobId, versions: VersionPolicy | None = None, tenant: str = "default"
) -> EngineRegistry:
    settings = {job: GatewayJobSettings(id=job, tenant=tenant) for job in jobs}
    return EngineRegistry(
        versions or VersionPolicy(VersionsConfig()), settings, AgentOffers({}, {}, {})
    )
