"""A turn on an engine of its own choice, while the gateway answers again with other engines."""

from types import SimpleNamespace
from typing import Any

import pytest

from harvester.contracts.ids import EngineId
from harvester.platform.tls import NO_CREDENTIALS
from scheduler.client.dedicated_turns import DedicatedTurns
from scheduler.gateway.engines.engine_faults import EngineLost


async def test_an_engine_that_the_gateway_names_no_more_is_lost_and_not_the_turn() -> None:
    watch: Any = SimpleNamespace(engines={})

    def session() -> Any:
        raise AssertionError("no connection is opened")

    gateway: Any = SimpleNamespace(session=session, clock=SimpleNamespace(now=lambda: 0.0))
    turns = DedicatedTurns(gateway, watch, NO_CREDENTIALS)
    with pytest.raises(EngineLost, match="no more"):
        await turns._adopt(EngineId("d0"))
