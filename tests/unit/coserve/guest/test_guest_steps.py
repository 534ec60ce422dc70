"""The account of a guest's steps: what each taught, and how well it had been foreseen."""

from coserve.guest.guest_steps import GuestSteps, ProductionMoment
from coserve.law.step_time import StepTimeModel

IDLE = ProductionMoment(idle=True, requests=7, waiting=0)
BUSY = ProductionMoment(idle=False, requests=8, waiting=0)
SECOND_NS = 1_000_000_000


class Loop:
    """Steps one after another; the next one begins where the last has ended."""

    def __init__(self, *, step_s: float) -> None:
        model = StepTimeModel(base_s=step_s, decode_s=1e-9, prefill_s=1e-9, factor=1.0)
        self.steps = GuestSteps(model)
        self.now_ns = SECOND_NS

    def step(
        self,
        seconds: float,
        *,
        before: ProductionMoment | None = IDLE,
        after: ProductionMoment | None = IDLE,
    ) -> None:
        self.steps.launch(
            decodes=4, prefill_tokens=0, context_tokens=512, production=before, now_ns=self.now_ns
        )
        self.now_ns += round(seconds * 1e9)
        self.steps.finish(production=after, now_ns=self.now_ns)


def test_steps_beside_production_are_counted_apart_and_not_learned() -> None:
    loop = Loop(step_s=0.010)
    for _ in range(20):
        loop.step(0.010)
    learned = loop.steps.model.samples
    for before, after in ((IDLE, BUSY), (BUSY, BUSY), (BUSY, IDLE)):
        loop.step(0.020, before=before, after=after)
    alone, beside = loop.steps.calibrations(now_ns=loop.now_ns)
    assert (alone.steps, beside.steps) == (20, 3)
    assert 0.9 < alone.p50_ratio < 1.1
    assert 1.8 < beside.p50_ratio < 2.2, "half of the accelerator was production's"
    assert loop.steps.model.samples == learned == 20


def test_a_request_that_came_and_went_within_a_step_disturbed_it() -> None:
    loop = Loop(step_s=0.010)
    loop.step(0.010, after=ProductionMoment(idle=True, requests=8, waiting=0))
    assert loop.steps.calibrations(now_ns=loop.now_ns)[1].steps == 1
    assert loop.steps.model.samples == 0


def test_a_step_without_a_pulse_is_neither() -> None:
    loop = Loop(step_s=0.010)
    loop.step(0.010, before=None)
    loop.step(0.010, after=None)
    alone, beside = loop.steps.calibrations(now_ns=loop.now_ns)
    assert (alone.steps, beside.steps, loop.steps.model.samples) == (0, 0, 0)
    assert loop.steps.finished_total == 2


def test_a_step_behind_another_one_begins_when_that_ends() -> None:
    steps = GuestSteps()
    for _ in range(2):
        steps.launch(
            decodes=1, prefill_tokens=0, context_tokens=0, production=IDLE, now_ns=SECOND_NS
        )
    assert steps.launched_s > 0.0
    steps.finish(production=IDLE, now_ns=SECOND_NS + 10_000_000)
    steps.finish(production=IDLE, now_ns=SECOND_NS + 25_000_000)
    assert round(steps.last_step_s, 6) == 0.015
    assert steps.launched_s == 0.0
    steps.finish(production=IDLE, now_ns=SECOND_NS + 30_000_000)
    assert steps.finished_total == 2, "what was not launched does not end"


def test_the_reported_calibration_is_at_most_a_second_old() -> None:
    loop = Loop(step_s=0.010)
    loop.step(0.010)
    assert loop.steps.calibrations(now_ns=loop.now_ns)[0].steps == 1
    loop.step(0.010)
    assert loop.steps.calibrations(now_ns=loop.now_ns)[0].steps == 1
    assert loop.steps.calibrations(now_ns=loop.now_ns + 2 * SECOND_NS)[0].steps == 2
