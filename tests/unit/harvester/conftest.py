"""A slot whose production, guest and lease a test sets, beat by beat, in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from harvester.contracts.ids import Epoch, LeaseId
from harvester.contracts.page import Grant, Guest, PageFault, ProductionModel, Pulse
from harvester.contracts.wire.stops import Stop
from harvester.policy.effects import Effect, EndLease, WriteGrant
from harvester.policy.sample import (
    ActionOutcome,
    GuestReading,
    KillSwitch,
    KvReading,
    LeaseView,
    MemoryReading,
    MpsReading,
    PulseReading,
    SlotSample,
)
from harvester.policy.settings import ProofSettings, SlotSettings
from harvester.policy.slot import SlotPolicy

PULSE = "pulse.prod.0"
MODEL = ProductionModel(
    prefill_base_s=0.001, prefill_s_per_token=1e-5, decode_base_s=0.004, decode_s_per_request=1e-4
)


@dataclass
class Scene:
    settings: SlotSettings
    now: float = 100.0
    pulse: Pulse = field(default_factory=lambda: Pulse(model=MODEL, model_samples=1000))
    pulse_fault: PageFault | None = None
    guest: Guest | None = field(default_factory=Guest)
    guest_fault: PageFault = PageFault.EXPIRED
    guest_runs_below_production: bool = False
    lease: LeaseView = field(default_factory=lambda: LeaseView(epoch=Epoch(1), lease=LeaseId("l1")))
    kill_switch: KillSwitch = KillSwitch.NONE
    memory: MemoryReading | None = None
    mps: MpsReading | None = None
    guest_kv: KvReading | None = None
    outcomes: tuple[ActionOutcome, ...] = ()
    record_fault: str = ""
    release: str = ""
    stop: Stop | None = None

    def __post_init__(self) -> None:
        self.policy = SlotPolicy(self.settings)
        self.recorded: list[tuple[float, SlotSample, tuple[Effect, ...]]] = []

    def set_pulse(self, **changes: Any) -> None:
        self.pulse = msgspec.structs.replace(self.pulse, **changes)

    def sample(self) -> SlotSample:
        record = None if self.pulse_fault else self.pulse
        return SlotSample(
            pulses=(PulseReading(name=PULSE, record=record, fault=self.pulse_fault),),
            guest=(
                GuestReading(record=self.guest)
                if self.guest
                else GuestReading(
                    fault=self.guest_fault, runs_below_production=self.guest_runs_below_production
                )
            ),
            lease=self.lease,
            kill_switch=self.kill_switch,
            memory=self.memory,
            mps=self.mps,
            guest_kv=self.guest_kv,
            outcomes=self.outcomes,
            record_fault=self.record_fault,
            release=self.release,
            stop=self.stop,
        )

    def beat(self) -> tuple[Effect, ...]:
        self.now = round(self.now + self.settings.beat_s, 6)
        sample = self.sample()
        effects = self.policy.observe(sample, now=self.now)
        self.recorded.append((self.now, sample, effects))
        return effects

    def beats_for(self, seconds: float) -> tuple[Effect, ...]:
        effects: tuple[Effect, ...] = ()
        for _ in range(round(seconds / self.settings.beat_s)):
            effects = self.beat()
        return effects

    def latencies(self, ttft: tuple[float, ...] = (), itl: tuple[float, ...] = ()) -> None:
        """New samples since the last beat, beside a guest that stepped."""
        pulse = self.pulse
        self.set_pulse(
            ttft_s_recent=(*pulse.ttft_s_recent, *ttft)[-32:],
            itl_s_recent=(*pulse.itl_s_recent, *itl)[-32:],
            samples_total=pulse.samples_total + len(ttft),
            itl_samples_total=pulse.itl_samples_total + len(itl),
            requests_total=pulse.requests_total + len(ttft),
            steps_total=pulse.steps_total + 1,
        )

    def guest_steps(self) -> None:
        assert self.guest is not None
        steps = self.guest.steps_finished + 1
        self.guest = msgspec.structs.replace(self.guest, steps_finished=steps, steps_launched=steps)


@pytest.fixture
def make_scene() -> Callable[..., Scene]:
    def make(**settings: Any) -> Scene:
        settings.setdefault("proof", ProofSettings(share_ratio=0.0))
        return Scene(settings=SlotSettings(**settings))

    return make


@pytest.fixture
def open_scene(make_scene: Callable[..., Scene]) -> Scene:
    """A slot that harvests."""
    scene = make_scene()
    scene.beats_for(0.3)
    assert grant_in(scene.beat()).mode == "open"
    return scene


def grant_in(effects: tuple[Effect, ...]) -> Grant:
    (grant,) = [effect.grant for effect in effects if isinstance(effect, WriteGrant)]
    return grant


def ended_in(effects: tuple[Effect, ...]) -> list[str]:
    return [effect.reason.value for effect in effects if isinstance(effect, EndLease)]


@pytest.fixture(name="grant_in")
def _grant_in() -> Callable[[tuple[Effect, ...]], Grant]:
    return grant_in


@pytest.fixture(name="ended_in")
def _ended_in() -> Callable[[tuple[Effect, ...]], list[str]]:
    return ended_in
