"""A job that harvests, as its code sees it: the embedded control, and a fake gateway."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from harvester.contracts.clock import MonotonicClock
from harvester.contracts.errors import ConfigError, Exhausted, PeerProtocolError, Stale
from harvester.contracts.ids import JobId
from scheduler.rollmux.cluster.runtime_events import (
    Call,
)
from scheduler.rollmux.control.job_gateway import GatewayAccess, GatewayView
from scheduler.rollmux.control.permit import Permit
from scheduler.rollmux.control.phase_client import PhaseClient
from scheduler.rollmux.control.wire import (
    Reply,
)
from scheduler.rollmux.permits.events import (
    Leave,
)
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.leased_tail import GONE_S, EngineSwitches, TailEnd
from scheduler.rollmux.permits.terms import LEASED_TAIL_RATIO, PermitsConfig
from tests.unit.scheduler.rollmux.control.embedded import EmbeddedControl
from tests.unit.scheduler.rollmux.permits.permit_scenario import ROLLOUT, nodes, terms
from tests.virtual_clock import VirtualClock

LONG_S = 20.0
BOTH = EngineSwitches(dedicated=True, harvesting=True)
LEASES_ALONE = EngineSwitches(dedicated=False, harvesting=True)
NEITHER = EngineSwitches(dedicated=False, harvesting=False)


class FakeGateway:
    """Stands for the settings and the gateway of a job; records its calls."""

    def __init__(self, *, jobs: str = "a", guest: bool = True) -> None:
        self.guest = guest
        self.active = JobId("a")
        self.jobs = jobs
        self.fault: BaseException | None = None
        self.told: list[EngineSwitches] = []
        self.activated = 0
        self.tokens = {"dedicated": 1000, "guest": 100}
        self.job = JobId("")
        self.changed = threading.Condition()

    def of(self, job: JobId) -> "FakeGateway":
        self.job = job
        return self

    def switch_off(self) -> None:
        pass

    def view(self) -> GatewayView:
        self._fail()
        kinds = {"own": "dedicated"} | ({"guest": "guest"} if self.guest else {})
        return msgspec.convert(
            {
                "active_job": self.active,
                "engines": {name: {"kind": k, "state": "serving"} for name, k in kinds.items()},
                "jobs": {job: {"tokens": self.tokens} for job in self.jobs.split()},
            },
            GatewayView,
        )

    def activate(self) -> None:
        self._fail()
        self.activated += 1
        self.active = self.job

    def switch(self, switches: EngineSwitches, *, for_s: float) -> None:
        self._fail()
        with self.changed:
            self.confirmed_s = MonotonicClock().now()
            if switches != self.now:
                self.told.append(switches)
            self.changed.notify_all()

    @property
    def now(self) -> EngineSwitches | None:
        return self.told[-1] if self.told else None

    def until(self, switches: EngineSwitches) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.now == switches, timeout=LONG_S)

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault


class Scene:
    """Job a harvests and rolls out, b waits for its node."""

    def __init__(self, control: EmbeddedControl, gateway: FakeGateway, **more: Any) -> None:
        given: Any = gateway
        self.gateway = gateway
        self.a = PhaseClient(control, terms("a"), timeout_s=LONG_S, gateway=given, **more)
        self.b = PhaseClient(control, terms("b"), timeout_s=LONG_S)

    def begin(self, ratio: float = 0.9) -> Permit:
        permit = self.a.begin(ROLLOUT)
        permit.progress(ratio)
        return permit


def _eventually(what: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(int(LONG_S / 0.02)):
        if what():
            return
        done.wait(0.02)
    raise AssertionError("not within its time")


def test_a_synchronous_rollout_leaves_its_node_to_a_job_that_waits_and_ends_on_leases() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())
        others = threading.Event()

        def roll_out_b() -> None:
            with scene.b.phase("rollout") as permit:
                assert permit.nodes == nodes("r0")
                others.set()
                assert over.wait(LONG_S)

        over = threading.Event()
        b = threading.Thread(target=roll_out_b)
        with scene.a.phase("rollout") as permit:
            assert permit.nodes == nodes("r0")
            assert scene.gateway.told == [BOTH]
            permit.progress(0.9)
            b.start()
            assert others.wait(LONG_S)
            assert permit.nodes == ()
            assert scene.gateway.now == LEASES_ALONE
        over.set()
        b.join()
        assert scene.gateway.now == NEITHER
        assert [tail.end for tail in scene.a.tails] == [TailEnd.FINISHED]
        assert scene.a.tails[0].seconds > 0.0


async def test_an_asynchronous_rollout_does_the_same() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())
        async with scene.a.phase("rollout") as permit:
            permit.progress(0.9)
            async with scene.b.phase("rollout") as others:
                assert (permit.nodes, others.nodes) == ((), nodes("r0"))
        assert scene.gateway.told == [BOTH, LEASES_ALONE, NEITHER]


async def test_a_cancelled_waiting_task_blocks_no_other_job() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())

        async def rolled_out() -> None:
            async with scene.a.phase("rollout"):
                raise AssertionError("b has the node")

        with scene.b.phase("rollout"):
            waiting = asyncio.ensure_future(rolled_out())
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert next(each for each in control.jobs() if each.job == "a").awaits == ()


def test_a_tail_comes_back_to_its_node_as_soon_as_that_is_free_under_its_permit() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())
        permit = scene.begin()
        scene.b.end(scene.b.begin(ROLLOUT))
        scene.gateway.until(BOTH)
        assert (permit.nodes, permit.lost) == (nodes("r0"), "")
        # The tail may leave again for the next that waits.
        others = scene.b.begin(ROLLOUT)
        scene.a.end(permit)
        scene.b.end(others)
        assert [tail.end for tail in scene.a.tails] == [TailEnd.RETURNED, TailEnd.FINISHED]
        assert scene.gateway.told == [BOTH, LEASES_ALONE, BOTH, LEASES_ALONE, NEITHER]


@pytest.mark.parametrize("reason", ["no guest", "gateway away", "another job is served"])
def test_without_a_guest_that_serves_the_job_its_tail_stays_where_it_is(reason: str) -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway(guest=reason != "no guest"))
        permit = scene.begin()
        if reason == "gateway away":
            scene.gateway.fault = Exhausted("nobody there")
        if reason == "another job is served":
            scene.gateway.active = JobId("c")
        waiting = threading.Thread(target=lambda: scene.b.end(scene.b.begin(ROLLOUT)))
        waiting.start()
        _eventually(lambda: permit.stage is PermitStage.NARROWING)
        waiting.join(0.5)
        assert waiting.is_alive()
        assert permit.nodes == nodes("r0")
        scene.a.end(permit)
        waiting.join()
        assert scene.a.tails == []


@pytest.mark.parametrize("lost_by", ["guest", "gateway"])
def test_a_tail_with_a_lost_lease_goes_back_in_line_and_is_served(lost_by: str) -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())
        c = PhaseClient(control, terms("c"), timeout_s=LONG_S)
        permit = scene.begin()
        others = scene.b.begin(ROLLOUT)
        if lost_by == "guest":
            scene.gateway.guest = False
        else:
            scene.gateway.fault = Exhausted("nobody there")
        _eventually(lambda: control.jobs()[0].awaits == nodes("r0"))
        later = threading.Thread(target=lambda: c.end(c.begin(ROLLOUT)))
        later.start()
        _eventually(lambda: control.jobs()[2].stage is PermitStage.WAITING)
        scene.gateway.fault = None
        scene.b.end(others)
        _eventually(lambda: permit.nodes == nodes("r0"))
        scene.gateway.until(BOTH)
        scene.a.end(permit)
        later.join()
        assert [tail.end for tail in scene.a.tails] == [TailEnd.LEASE_LOST]
        assert scene.a.tails[0].seconds > GONE_S


def test_a_tail_stays_where_the_job_that_waits_would_take_the_gateway_s_engines() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway(jobs="a b"))
        permit = scene.begin()
        waiting = threading.Thread(target=lambda: scene.b.end(scene.b.begin(ROLLOUT)))
        waiting.start()
        _eventually(lambda: permit.stage is PermitStage.NARROWING)
        waiting.join(0.5)
        assert waiting.is_alive()
        assert scene.gateway.told == [BOTH]
        scene.a.end(permit)
        waiting.join()


def test_a_tail_that_came_back_stays_for_the_next_job_that_would_take_its_engines() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway(jobs="a c"))
        c = PhaseClient(control, terms("c"), timeout_s=LONG_S)
        permit = scene.begin()
        # Job b has another gateway: the tail leaves its node to it, and comes back.
        scene.b.end(scene.b.begin(ROLLOUT))
        scene.gateway.until(BOTH)
        _eventually(lambda: permit.stage is PermitStage.RUNNING)
        before = len(scene.gateway.told)
        waiting = threading.Thread(target=lambda: c.end(c.begin(ROLLOUT)))
        waiting.start()
        _eventually(lambda: permit.stage is PermitStage.NARROWING)
        waiting.join(0.5)
        assert waiting.is_alive()
        assert scene.gateway.told[before:] == []
        scene.a.end(permit)
        waiting.join()


def test_a_job_whose_gateway_serves_another_one_is_activated_with_its_permit() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway(jobs="a c"))
        scene.gateway.active = JobId("c")
        scene.a.end(scene.begin())
        assert (scene.gateway.activated, scene.gateway.active) == (1, "a")
        scene.a.end(scene.begin())
        assert scene.gateway.activated == 1


@pytest.mark.parametrize("fault", [Exhausted("away"), PeerProtocolError("401"), Stale("409")])
def test_a_gateway_that_fails_fails_no_phase(fault: Exception) -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())
        scene.gateway.fault = fault
        with scene.a.phase("rollout") as permit:
            permit.check()
        assert scene.gateway.told == []


def test_nodes_are_given_back_only_once_the_gateway_has_turned_the_engines_off_by_itself() -> None:
    with EmbeddedControl(PermitsConfig(lease_s=0.5)) as control:
        scene = Scene(control, FakeGateway())
        permit = scene.begin(0.5)
        with scene.gateway.changed:
            scene.gateway.changed.wait(LONG_S)
        scene.gateway.fault = Exhausted("away")
        scene.a.end(permit)
        assert MonotonicClock().now() - scene.gateway.confirmed_s > 0.4


def test_a_permit_that_is_lost_ends_the_use_of_engines_and_leases_at_once() -> None:
    with EmbeddedControl(PermitsConfig(lease_s=0.5)) as control:
        scene = Scene(control, FakeGateway())
        permit = scene.begin()
        scene.a.forget()
        scene.gateway.until(NEITHER)
        with pytest.raises(Stale):
            scene.a.end(permit)
        assert scene.gateway.now == NEITHER


def test_a_rollout_that_fails_gives_its_leases_up() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())
        with pytest.raises(ValueError, match="reward"), scene.a.phase("rollout"):
            raise ValueError("no reward")
        assert scene.gateway.told == [BOTH, NEITHER]


def test_the_rollout_time_saved_by_leases_follows_from_their_tokens() -> None:
    left: list[Leave] = []

    class Noted(EmbeddedControl):
        def call(self, message: Call) -> Reply:
            if isinstance(message, Leave):
                left.append(message)
            return super().call(message)

    clock = VirtualClock()
    with Noted() as control:
        scene = Scene(control, FakeGateway(), clock=clock)
        for own, guest in ((300, 100), (50, 0), (-2000, 0)):
            with scene.a.phase("rollout"):
                clock.now_s += 0.3
                scene.gateway.tokens["dedicated"] += own
                scene.gateway.tokens["guest"] += guest
    # A quarter came from leases; none did; the gateway has forgotten its counts.
    assert left[0].leased_s == pytest.approx(0.1)
    assert [leave.leased_s for leave in left[1:]] == [0.0, 0.0]


@pytest.mark.parametrize("at", ["begin", "end"])
def test_an_interrupt_during_a_call_to_the_gateway_gives_the_permit_back(at: str) -> None:
    with EmbeddedControl() as control:
        scene, released = Scene(control, FakeGateway()), list[str]()
        scene.a.resident(ROLLOUT, on_release=lambda: released.append("a"))
        permit = scene.begin(0.5) if at == "end" else None
        scene.gateway.fault = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            scene.begin() if permit is None else scene.a.end(permit)
        assert released == ["a"]
        with scene.b.phase("rollout") as others:
            assert others.nodes == nodes("r0")


def test_an_interrupt_after_the_engines_are_on_turns_them_off_before_the_permit_goes() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())
        switch = scene.gateway.switch

        def interrupted(switches: EngineSwitches, *, for_s: float) -> None:
            switch(switches, for_s=for_s)
            if switches == BOTH:
                raise KeyboardInterrupt

        scene.gateway.switch = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            scene.begin()
        assert scene.gateway.told == [BOTH, NEITHER]


def test_an_interrupt_while_the_gateway_is_asked_at_the_end_leaves_no_engine_on() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())
        permit = scene.begin(0.5)
        scene.gateway.until(BOTH)

        def interrupted() -> GatewayView:
            raise KeyboardInterrupt

        scene.gateway.view = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            scene.a.end(permit)
        assert scene.gateway.told == [BOTH, NEITHER]


def test_a_job_that_its_gateway_refuses_is_not_placed() -> None:
    gateway: Any = FakeGateway()

    def refuse() -> None:
        raise ConfigError("no job of this tenant")

    gateway.switch_off = refuse
    with EmbeddedControl() as control:
        with pytest.raises(ConfigError):
            PhaseClient(control, terms("a"), gateway=gateway)
        assert control.jobs() == ()


def test_only_rollouts_of_jobs_that_opted_in_touch_a_gateway() -> None:
    with EmbeddedControl() as control:
        scene = Scene(control, FakeGateway())
        with scene.a.phase("training"), scene.b.phase("rollout"):
            assert scene.gateway.told == []


def test_a_tail_that_the_job_declares_stays_as_it_was_declared() -> None:
    with EmbeddedControl() as control:
        gateway: Any = FakeGateway()
        wide = terms("a", rollout="r0 r1", tail_ratio=0.5)
        a = PhaseClient(control, wide, gateway=gateway)
        b = PhaseClient(control, terms("b", rollout="r1"), timeout_s=LONG_S)
        with a.phase("rollout") as permit:
            permit.progress(LEASED_TAIL_RATIO)
            waiting = threading.Thread(target=lambda: b.end(b.begin(ROLLOUT)))
            waiting.start()
            _eventually(lambda: permit.keep is not None)
            assert permit.keep == nodes("r0")
            permit.narrowed()
            waiting.join()
        assert gateway.told == [BOTH, NEITHER]


def test_a_gateway_that_is_not_there_stops_no_job(caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedControl() as control:
        phases = PhaseClient(control, terms("a"), gateway=GatewayAccess(url="http://127.0.0.1:1"))
        with phases.phase("rollout") as permit:
            _eventually(lambda: len(caplog.messages) > 1)
            threading.Event().wait(0.5)
            permit.check()
    assert len(caplog.messages) <= 5
    assert all("127.0.0.1:1" in message for message in caplog.messages)


def test_a_token_that_cannot_be_read_stops_the_job_at_its_start(tmp_path: Any) -> None:
    with EmbeddedControl() as control:
        for access in (
            GatewayAccess(url="http://127.0.0.1:1", token_file=tmp_path / "none"),
            GatewayAccess(url="ftp://127.0.0.1"),
        ):
            with pytest.raises(ConfigError, match="gateway"):
                PhaseClient(control, terms("a"), gateway=access)
