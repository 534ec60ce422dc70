"""The demo's calls to the gateway, against one in the same process and in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.testbed.gateway_admin import GatewayAdmin
from harvester.contracts.errors import PeerProtocolError


@dataclass(slots=True)
class Gateway:
    """Stands for aiohttp's session."""

    status: int = 200
    engines: dict[str, Any] = field(default_factory=dict)
    gone_at_s: float | None = None
    asked: list[tuple[str, Any]] = field(default_factory=list)

    @asynccontextmanager
    async def post(self, url: str, *, json: Any) -> AsyncIterator[Any]:
        self.asked.append((url, json))

        async def text() -> str:
            return "no such job" * 1000

        yield SimpleNamespace(status=self.status, text=text)

    @asynccontextmanager
    async def get(self, url: str) -> AsyncIterator[Any]:
        now_s = asyncio.get_running_loop().time()
        if self.gone_at_s is not None and now_s >= self.gone_at_s:
            self.engines = {name: {"state": "offline"} for name in self.engines}
        self.asked.append((url, None))

        async def answer() -> dict[str, Any]:
            return {"engines": self.engines}

        yield SimpleNamespace(json=answer)


def admin(gateway: Gateway) -> GatewayAdmin:
    return GatewayAdmin(cast(Any, gateway), "http://gateway")


async def test_a_call_names_the_job_and_the_new_setting() -> None:
    gateway = Gateway()
    await admin(gateway).activate("fixed")
    await admin(gateway).harvesting("harvest", enabled=False)
    assert gateway.asked == [
        ("http://gateway/v1/jobs/fixed/activate", None),
        ("http://gateway/v1/jobs/harvest/harvesting", {"enabled": False}),
    ]


async def test_a_refusal_is_reported_in_bounded_length() -> None:
    with pytest.raises(PeerProtocolError, match="404 no such job") as told:
        await admin(Gateway(status=404)).activate("fixed")
    assert len(str(told.value)) < 700


async def test_a_guest_that_serves_is_waited_for() -> None:
    gateway = Gateway(engines={"guest-0": {"state": "serving"}}, gone_at_s=3.0)
    assert await admin(gateway).guest_gone("guest-0", timeout_s=20.0)
    assert 3.0 <= asyncio.get_running_loop().time() < 4.0


async def test_a_guest_that_serves_on_is_reported() -> None:
    gateway = Gateway(engines={"guest-0": {"state": "serving"}})
    assert not await admin(gateway).guest_gone("guest-0", timeout_s=20.0)
    assert asyncio.get_running_loop().time() == pytest.approx(20.0)


@pytest.mark.parametrize("engines", [{}, {"guest-0": {"state": "offline"}}])
async def test_a_guest_that_is_not_there_is_gone_at_once(engines: dict[str, Any]) -> None:
    assert await admin(Gateway(engines=engines)).guest_gone("guest-0", timeout_s=20.0)
    assert asyncio.get_running_loop().time() == 0.0
