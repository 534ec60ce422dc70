"""A rollout whose tail goes to a lease: the real permit policy, a gateway that is none."""

import asyncio
import threading
from typing import Any

from benchmarks.multiplex import leased_rollout
from benchmarks.multiplex.arms import JOBS, ROLLOUT_NODE, Arm, Run
from benchmarks.multiplex.leased_rollout import LeasedRollout
from harvester.contracts.clock import MonotonicClock
from scheduler.phases.control import PhaseControl
from scheduler.phases.embedded import EmbeddedControl
from scheduler.phases.permit import Permit
from scheduler.policy.model import PhaseKind

LARGE, SMALL = JOBS
RUN = Run(Arm.LEASED)


class FakeGateway:
    """Says whether a guest serves; remembers what it was told."""

    def __init__(self, *, guest: bool) -> None:
        self.guest = guest
        self.told: list[tuple[str, bool]] = []
        self.used_again = asyncio.Event()

    async def dedicated(self, _job: str, *, enabled: bool) -> None:
        self.told.append(("dedicated", enabled))
        if enabled:
            self.used_again.set()

    async def harvesting(self, _job: str, *, enabled: bool) -> None:
        self.told.append(("lease", enabled))

    async def status(self) -> dict[str, Any]:
        engines = {"own": {"kind": "dedicated", "state": "serving"}}
        if self.guest:
            engines["guest"] = {"kind": "guest", "state": "serving"}
        return {"engines": engines}


class Scene:
    """One job rolls out, the other waits for its node."""

    def __init__(self, control: EmbeddedControl, gateway: FakeGateway) -> None:
        clock = MonotonicClock()
        self.gateway = gateway
        self.first = PhaseControl(control, LARGE.terms(RUN), timeout_s=20.0)
        self.other = PhaseControl(control, SMALL.terms(RUN), timeout_s=20.0)
        self.leased = LeasedRollout(gateway, self.first, control, ROLLOUT_NODE, clock)
        self.finish = asyncio.Event()

    async def work(self) -> str:
        self.leased.progress(0.9)
        await self.finish.wait()
        return "batch"

    async def begin(self, control: PhaseControl) -> Any:
        return await asyncio.to_thread(control.begin, PhaseKind.ROLLOUT)

    async def end(self, control: PhaseControl, permit: Any) -> None:
        await asyncio.to_thread(control.end, permit)


async def test_the_tail_leaves_its_node_to_who_waits_and_ends_on_the_lease() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway(guest=True))
        permit = await scene.begin(scene.first)
        running = asyncio.ensure_future(scene.leased.run(permit, scene.work()))
        others = await scene.begin(scene.other)
        assert others.nodes == (ROLLOUT_NODE,)
        scene.finish.set()
        assert await running == "batch"
        assert scene.leased.tails == 1
        assert scene.gateway.told == [
            ("dedicated", True), ("lease", True), ("dedicated", False),
            ("dedicated", False), ("lease", False),
        ]  # fmt: skip
        await scene.end(scene.first, scene.leased.permit)
        await scene.end(scene.other, others)


async def test_without_a_guest_that_serves_the_tail_stays_where_it_is() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway(guest=False))
        permit = await scene.begin(scene.first)
        running = asyncio.ensure_future(scene.leased.run(permit, scene.work()))
        waiting = asyncio.ensure_future(scene.begin(scene.other))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        scene.finish.set()
        await running
        assert (scene.leased.tails, scene.leased.permit) == (0, permit)
        await scene.end(scene.first, permit)
        await scene.end(scene.other, await waiting)


async def test_a_tail_comes_back_to_its_node_as_soon_as_that_is_free() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway(guest=True))
        permit = await scene.begin(scene.first)
        running = asyncio.ensure_future(scene.leased.run(permit, scene.work()))
        others = await scene.begin(scene.other)
        scene.gateway.used_again.clear()
        await scene.end(scene.other, others)
        await scene.gateway.used_again.wait()
        scene.finish.set()
        await running
        assert (scene.leased.returns, scene.leased.losses) == (1, 0)
        assert scene.leased.permit is not None
        assert scene.leased.permit.epoch > permit.epoch
        assert scene.leased.permit.nodes == (ROLLOUT_NODE,)
        await scene.end(scene.first, scene.leased.permit)


async def test_a_tail_whose_lease_is_gone_goes_back_in_line(monkeypatch: Any) -> None:
    monkeypatch.setattr(leased_rollout, "_GONE_S", 0.2)
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway(guest=True))
        permit = await scene.begin(scene.first)
        running = asyncio.ensure_future(scene.leased.run(permit, scene.work()))
        others = await scene.begin(scene.other)
        asked = threading.Event()
        begin = scene.first.begin

        def noted(kind: PhaseKind) -> Permit:
            asked.set()
            return begin(kind)

        monkeypatch.setattr(scene.first, "begin", noted)
        scene.gateway.guest = False
        scene.gateway.used_again.clear()
        await asyncio.to_thread(asked.wait)
        assert not scene.gateway.used_again.is_set()
        await scene.end(scene.other, others)
        await scene.gateway.used_again.wait()
        scene.finish.set()
        await running
        assert (scene.leased.returns, scene.leased.losses) == (0, 1)
        assert scene.leased.permit is not None
        await scene.end(scene.first, scene.leased.permit)


async def test_a_rollout_that_fails_gives_its_lease_up() -> None:
    async def failing() -> None:
        raise ValueError("no reward")

    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway(guest=True))
        permit = await scene.begin(scene.first)
        try:
            await scene.leased.run(permit, failing())
        except ValueError as error:
            await asyncio.to_thread(scene.first.end, permit, failed=str(error))
        assert scene.gateway.told[-2:] == [("dedicated", False), ("lease", False)]
