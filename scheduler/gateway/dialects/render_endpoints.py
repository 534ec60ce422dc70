"""The processes that render text: those that are configured, else the dedicated engines."""

from collections.abc import Sequence
from typing import NamedTuple

from harvester.contracts.errors import Exhausted
from scheduler.gateway.engine_registry import EngineRegistry
from scheduler.gateway.engines.engine_connections import EngineConnections
from scheduler.gateway.settings import RendererSettings
from scheduler.model import EngineKind


class RenderEndpoint(NamedTuple):
    """A process that renders."""

    connections: EngineConnections
    short_tokens: int = 0
    """The renderer's context if another's is longer, for requests too long for it; else 0."""


class RenderEndpoints:
    def __init__(
        self, renderers: Sequence[RendererSettings], registry: EngineRegistry, *, connect_s: float
    ) -> None:
        self._configured = [
            EngineConnections(given.url, connect_s=connect_s, credentials=given)
            for given in renderers
        ]
        self._registry = registry

    def in_order(self) -> list[RenderEndpoint]:
        """The configured renderers; without any, the dedicated engines that are up, the longest
        context first. Raises Exhausted without an engine."""
        if self._configured:
            return [*map(RenderEndpoint, self._configured)]
        members = self._registry.members.values()
        engines = [each for each in members if each.engine.kind is EngineKind.DEDICATED]
        if not engines:
            raise Exhausted(
                "text cannot be rendered: no renderer or dedicated engine is configured"
            )
        engines.sort(key=lambda each: -each.context_tokens)
        longest = engines[0].context_tokens
        return [
            RenderEndpoint(
                each.client.connections,
                short_tokens=each.context_tokens if each.context_tokens < longest else 0,
            )
            for each in engines
            if each.up
        ]

    def close(self) -> None:
        for connections in self._configured:
            connections.close()
