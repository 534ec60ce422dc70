"""The forecast of a slot, from its pulses to offers, leases, metrics and the next agent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harvester.agent.node import NodeAgent
from harvester.config import AgentConfig
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.ids import JobId, SlotId, TenantId
from harvester.contracts.page import Guest, PageDirectory, Pulse
from harvester.contracts.wire.leases import LeaseGranted, LeaseRenewal, LeaseRequest
from harvester.policy.idle_forecast import HORIZONS_S
from tests.virtual_clock import VirtualClock

TTL_NS = 10**12


class Stage:
    def __init__(self, root: Path) -> None:
        self.config = AgentConfig.model_validate(
            {
                "mode": "harvest",
                "page_root": root / "pages",
                "state_dir": root / "state",
                "slots": [{"name": "slot0", "policy": {"proof": {"share_ratio": 0.0}}}],
            }
        )
        self.clock = VirtualClock()
        self.node = self._agent()
        pages = PageDirectory(root / "pages" / "slot0")
        self.pulse = pages.pulse_writer("prod", 0)
        pages.guest_writer().write(Guest(), now_ns=monotonic_ns(), ttl_ns=TTL_NS)
        self.busy_s = 0.0

    def _agent(self) -> NodeAgent:
        return NodeAgent(self.config, clock=self.clock, version="1")

    def restart(self) -> None:
        self.node.close()
        self.node = self._agent()

    def runs(self, seconds: int, *, busy_ratio: float | None) -> None:
        """A beat each second; production is silent where its share is not known."""
        for _ in range(seconds):
            self.clock.advance_to(self.clock.now() + 1.0)
            self.busy_s += busy_ratio or 0.0
            pulse = Pulse(model_samples=1000, busy_s_total=self.busy_s)
            ttl_ns = 0 if busy_ratio is None else TTL_NS
            self.pulse.write(pulse, now_ns=monotonic_ns(), ttl_ns=ttl_ns)
            self.node.beat()

    def metric(self, horizon: str, percentile: str) -> float | None:
        self.node.refresh_metrics()
        labels = {"slot": "slot0", "horizon": horizon, "percentile": percentile}
        return self.node.metrics.registry.get_sample_value("harvester_idle_forecast_ratio", labels)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.node.close()


def test_offers_leases_and_metrics_carry_the_forecast(stage: Stage) -> None:
    stage.runs(480, busy_ratio=0.4)
    forecasts = stage.node.slots[0].offer().forecasts
    assert tuple(each.horizon_s for each in forecasts) == HORIZONS_S
    assert all(each.median_ratio == pytest.approx(0.6, abs=0.01) for each in forecasts)
    taken = stage.node.take(
        LeaseRequest(
            request_id="r",
            slot=SlotId("slot0"),
            tenant=TenantId("t"),
            job=JobId("j"),
            duration_s=10.0,
        )
    )
    assert isinstance(taken, LeaseGranted)
    assert taken.forecasts == forecasts
    renewed = stage.node.renew(taken.lease, LeaseRenewal(epoch=taken.epoch, duration_s=10.0))
    assert isinstance(renewed, LeaseGranted)
    assert renewed.forecasts == forecasts
    assert stage.metric("30", "50") == pytest.approx(0.6, abs=0.01)
    # Production falls silent: the forecast is unknown, not idle.
    stage.runs(20, busy_ratio=None)
    assert stage.node.slots[0].offer().forecasts == ()
    unknown = stage.metric("30", "50")
    assert unknown is not None
    assert unknown != unknown


def test_seasons_survive_a_restart_of_the_agent_and_nothing_is_forecast_blindly(
    stage: Stage,
) -> None:
    stage.runs(60, busy_ratio=0.4)
    before = stage.node.slots[0]._forecaster.state()
    assert any(count for profile in before.profiles[0] for count in profile.counts)
    stage.restart()
    assert stage.node.slots[0]._forecaster.state() == before
    assert stage.node.slots[0].offer().forecasts == ()


def test_a_lost_state_file_forgets_the_seasons_only(stage: Stage, tmp_path: Path) -> None:
    stage.runs(60, busy_ratio=0.4)
    stage.node.close()
    (tmp_path / "state" / "slot0.state").write_bytes(b"torn")
    stage.node = stage._agent()
    state = stage.node.slots[0]._forecaster.state()
    assert not any(count for one in state.profiles for each in one for count in each.counts)
    stage.runs(2, busy_ratio=0.4)
