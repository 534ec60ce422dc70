"""The guest's side of a slot over real pages, its agent and production acted by the test."""

import math
import random
import sys
import threading
import time
from collections.abc import Iterator
from statistics import fmean, stdev

import msgspec
import pytest

from coserve.guest.guest_slot import GuestSlot
from coserve.law.gate import Closed
from coserve.law.step_time import StepTimeModel
from harvester.contracts.clock import monotonic_ns
from harvester.contracts.page import (
    Grant,
    GrantMode,
    Lending,
    PageFault,
    PageHeld,
    ProductionModel,
    Pulse,
)
from harvester.contracts.process import ProcessId
from tests.unit.coserve.conftest import HOUR_NS, Slot


def test_opens_on_a_fresh_grant_and_idle_production(guest: GuestSlot) -> None:
    assert guest.decide().tokens == 512


def test_each_page_that_changes_changes_the_decision(slot: Slot, guest: GuestSlot) -> None:
    assert guest.decide().open
    slot.production_arrives()
    assert guest.decide().reason is Closed.NO_SLACK
    slot.pulse()
    assert guest.decide().open
    slot.grant(mode=GrantMode.CLOSED)
    assert guest.decide().reason is Closed.GRANT_CLOSED
    slot.grant(ttl_ns=0)
    decision = guest.decide()
    assert (decision.reason, decision.fault) == (Closed.GRANT_FAULT, PageFault.EXPIRED)
    slot.grant()
    slot.pulse(ttl_ns=0)
    decision = guest.decide()
    assert (decision.reason, decision.fault) == (Closed.PULSE_FAULT, PageFault.EXPIRED)


def test_waits_for_the_pulses_that_the_grant_names(slot: Slot, guest: GuestSlot) -> None:
    slot.grant(pulses=("pulse.prod.0", "pulse.prod.1"))
    assert guest.decide().fault is PageFault.MISSING
    second = slot.directory.pulse_writer("prod", 1)
    second.write(Pulse(), now_ns=monotonic_ns(), ttl_ns=3_600_000_000_000)
    assert guest.decide().open


@pytest.mark.parametrize("name", ["../grant", "", "a/b", "guest\n"])
def test_a_grant_that_names_no_pulse_page_closes_the_gate_and_ends_no_engine(
    slot: Slot, guest: GuestSlot, name: str
) -> None:
    slot.grant(pulses=(name,))
    assert guest.decide().reason is Closed.NO_PULSE
    slot.grant()
    assert guest.decide().open


def test_launched_steps_are_taken_off_until_they_finish(guest: GuestSlot) -> None:
    guest.steps.model.base_s = 0.3
    full = guest.decide()
    guest.launched(decodes=1, prefill_tokens=0)
    one = guest.decide()
    assert one.tokens < full.tokens
    guest.launched(decodes=1, prefill_tokens=0)
    assert not guest.decide().open
    guest.finished()
    guest.finished()
    guest.finished()
    assert guest.decide().open


def test_the_guest_page_shows_the_guest_s_work(slot: Slot, guest: GuestSlot) -> None:
    slot.grant(epoch=9)
    guest.load.running, guest.load.waiting, guest.load.weight_version = 2, 1, "17"
    guest.decide()
    guest.publish()
    assert slot.guest().decide_s_mean == 0.0, "no step came of it"
    guest.decide(for_step=True)
    guest.launched(decodes=2, prefill_tokens=6)
    guest.publish()
    page = slot.guest()
    assert (page.epoch, page.gate, page.reason) == (9, "open", "")
    assert (page.running, page.waiting, page.weight_version) == (2, 1, "17")
    assert (page.steps_launched, page.steps_finished) == (1, 0)
    guest.finished()
    guest.aborted(3)
    slot.production_arrives()
    guest.decide()
    guest.publish()
    page = slot.guest()
    assert (page.gate, page.reason, page.closings_total) == ("closed", "no_slack", 1)
    assert (page.steps_finished, page.tokens_total, page.last_step_tokens) == (1, 8, 8)
    assert page.aborted_total == 3
    assert page.decide_s_mean > 0.0


def test_short_steps_share_a_page_and_none_is_left_untold(slot: Slot, guest: GuestSlot) -> None:
    def step() -> None:
        guest.launched(decodes=1, prefill_tokens=0)
        guest.finished()
        if guest.page_due():
            guest.publish()

    slot.grant()
    guest.decide()
    guest.publish()
    began_ns, steps, written = monotonic_ns(), 0, set[int]()
    while monotonic_ns() - began_ns < 200_000_000:
        step()
        steps += 1
        written.add(slot.guest().steps_finished)
    pages_most = (monotonic_ns() - began_ns) / 50_000_000 + 2
    assert 2 <= len(written) <= pages_most < steps
    guest.publish()
    assert slot.guest().steps_finished == steps


def test_a_decision_beside_idle_production_holds_until_a_page_is_written(
    slot: Slot, guest: GuestSlot
) -> None:
    slot.grant(ttft_slo_s=0.2)
    guest.load.running, guest.load.kv_tokens = 4, 1000
    first = guest.decide()
    assert first.open
    guest.steps.model.base_s *= 2.0
    guest.load.kv_tokens += 16
    assert guest.decide() is first, "within 256 tokens of context"
    slot.pulse()
    assert guest.decide().tokens < first.tokens


@pytest.mark.parametrize("changed", [{"running": 5}, {"kv_tokens": 1025}])
def test_a_decision_holds_for_its_load_alone(
    slot: Slot, guest: GuestSlot, changed: dict[str, int]
) -> None:
    slot.grant(ttft_slo_s=0.2)
    guest.load.running, guest.load.kv_tokens = 4, 1000
    first = guest.decide()
    guest.steps.model.base_s *= 2.0
    for name, value in changed.items():
        setattr(guest.load, name, value)
    assert guest.decide().tokens < first.tokens


def test_a_step_that_is_longer_than_predicted_ends_a_decision(slot: Slot, guest: GuestSlot) -> None:
    slot.grant(ttft_slo_s=0.2)
    guest.load.running, guest.load.kv_tokens = 4, 1000
    first = guest.decide()
    guest.launched(decodes=4, prefill_tokens=0)
    guest.finished()
    assert guest.decide() is first, "it was short"
    guest.steps.model.base_s = guest.steps.model.decode_s = 0.0
    guest.launched(decodes=4, prefill_tokens=0)
    time.sleep(0.02)
    guest.finished()
    assert guest.decide() is not first


def test_a_page_holds_the_processes_of_a_wide_guest(slot: Slot, guest: GuestSlot) -> None:
    guest.load.processes = tuple(ProcessId(pid=4_000_000 + n, start_ticks=2**40) for n in range(64))
    for _ in range(40):
        guest.launched(decodes=1, prefill_tokens=0)
        guest.finished()
    guest.publish()
    assert slot.guest().processes == guest.load.processes[:48]


def test_no_decision_outlives_its_pages(
    slot: Slot, guest: GuestSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot.pulse(ttl_ns=60 * 10**9)
    assert guest.decide().open
    assert guest.decide().open
    monkeypatch.setattr(
        "coserve.guest.guest_slot.monotonic_ns", lambda: monotonic_ns() + 61 * 10**9
    )
    assert guest.decide().fault is PageFault.EXPIRED


def test_the_page_has_start_and_end_of_the_latest_steps(slot: Slot, guest: GuestSlot) -> None:
    guest.decide()
    for _ in range(40):
        guest.launched(decodes=1, prefill_tokens=0)
        guest.finished()
    guest.publish()
    steps_ns = slot.guest().latest_steps_ns
    times_ns = [at_ns for step_ns in steps_ns for at_ns in step_ns]
    assert len(steps_ns) == 32
    assert times_ns == sorted(times_ns)
    assert times_ns[-1] == slot.guest().last_step_end_ns


def test_learns_from_steps_beside_idle_production_only(slot: Slot, guest: GuestSlot) -> None:
    def step() -> None:
        guest.decide()
        guest.launched(decodes=1, prefill_tokens=0)

    step()
    guest.finished()
    assert guest.steps.model.samples == 1
    step()
    slot.pulse(in_flight=1, decoding=1, requests_total=1)
    guest.finished()
    assert guest.steps.model.samples == 1, "production had arrived"
    step()
    slot.pulse(requests_total=2)
    guest.finished()
    assert guest.steps.model.samples == 1, "production had come and gone"
    step()
    slot.pulse(ttl_ns=0)
    guest.finished()
    assert guest.steps.model.samples == 1, "nobody knows"
    slot.pulse(requests_total=2)
    step()
    guest.finished()
    assert guest.steps.model.samples == 2


def test_grace_ends_only_while_the_grant_is_gone(slot: Slot, guest: GuestSlot) -> None:
    slot.grant(abort_grace_s=0.0)
    guest.decide()
    assert not guest.grace_over()
    slot.grant(abort_grace_s=0.0, ttl_ns=0)
    guest.decide()
    assert guest.grace_over()
    slot.grant(abort_grace_s=0.0)
    guest.decide()
    assert not guest.grace_over()


def test_a_lost_grant_is_waited_for(slot: Slot, guest: GuestSlot) -> None:
    guest.decide()
    slot.grant(ttl_ns=0)
    assert not guest.decide().open
    assert not guest.grace_over()


def test_a_budget_is_owed_until_the_loop_has_obeyed_it(slot: Slot, guest: GuestSlot) -> None:
    guest.decide()
    assert (guest.kv_budget_tokens(), guest.owes_memory()) == (None, False)
    slot.grant(kv_budget_tokens=600)
    guest.decide()
    assert (guest.kv_budget_tokens(), guest.owes_memory()) == (600, True)
    guest.kv_obeyed_tokens, guest.kv_short_tokens = 600, 8
    assert guest.owes_memory(), "requests still hold some"
    guest.kv_short_tokens = 0
    assert not guest.owes_memory()


def test_a_late_grant_takes_no_memory_and_one_that_stays_away_takes_all(
    slot: Slot, guest: GuestSlot
) -> None:
    slot.grant(kv_budget_tokens=600, abort_grace_s=1e6)
    guest.decide()
    slot.grant(ttl_ns=0)
    guest.decide()
    assert guest.kv_budget_tokens() == 600
    slot.grant(kv_budget_tokens=600, abort_grace_s=0.0)
    guest.decide()
    slot.grant(ttl_ns=0)
    guest.decide()
    assert guest.kv_budget_tokens() == 0


def test_asleep_it_keeps_nothing(slot: Slot, guest: GuestSlot) -> None:
    slot.grant(mode=GrantMode.CLOSED, asleep=True, kv_budget_tokens=600)
    assert not guest.decide().open
    assert guest.kv_budget_tokens() == 0


def test_a_prediction_that_admits_nothing_is_probed_and_corrected(
    slot: Slot, guest: GuestSlot
) -> None:
    guest.steps.model.base_s = 50.0
    steps = 0
    while not (decision := guest.decide()).open or decision.probe:
        assert decision.probe, "the first step of a guest waits for nothing"
        guest.launched(decodes=1, prefill_tokens=0)
        guest.finished()
        steps += 1
        assert steps < 20
    assert steps > 0


def test_probes_take_a_hundredth_of_idle_time(guest: GuestSlot) -> None:
    guest.launched(decodes=1, prefill_tokens=0)
    threading.Event().wait(0.002)
    guest.finished()
    guest.steps.model.base_s = 50.0
    assert guest.decide().reason is Closed.NO_SLACK


def test_a_step_that_is_longer_than_an_arrival_may_wait_is_followed_by_a_rest(
    slot: Slot, guest: GuestSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coserve.guest.guest_slot.random", lambda: 0.5)
    slot.grant(epsilon=0.05)
    opened = guest.decide(for_step=True)
    # 20 ms alone, of which 1 ms; the first prediction of a step is 30 ms.
    assert opened.mean_wait_s == pytest.approx(0.001)
    guest.launched(decodes=1, prefill_tokens=0)
    assert not guest.decide(for_step=True).open, "one at a time"
    threading.Event().wait(0.05)
    guest.finished()
    owed_s = guest.steps.load.rest_s
    resting = guest.decide(for_step=True)
    assert resting.reason is Closed.RESTING
    # 50 ms wait 25 ms on average: 24 steps of rest, less what has passed.
    assert 0.5 < resting.rest_s <= owed_s
    assert owed_s == pytest.approx(
        guest.steps.last_step_s * (guest.steps.last_step_s / 2 / 0.001 - 1)
    )
    guest.steps.load.last_end_ns -= 10 * HOUR_NS
    guest.steps.load.rested_ns -= 10 * HOUR_NS
    slot.pulse(last_step_end_ns=monotonic_ns() - HOUR_NS)
    assert guest.decide(for_step=True).open


def test_a_rest_adds_up_over_production_s_idle_times(
    slot: Slot, guest: GuestSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step was slow: no idle time of production is as long as the rest that it owes."""
    now_s = 1_000_000.0
    monkeypatch.setattr("coserve.guest.guest_slot.random", lambda: 0.5)
    for module in ("coserve.guest.guest_slot", "tests.unit.coserve.conftest"):
        monkeypatch.setattr(f"{module}.monotonic_ns", lambda: round(now_s * 1e9))
    slot.pulse(last_step_end_ns=round(now_s * 1e9))
    slot.grant(epsilon=0.05)
    guest.decide(for_step=True)
    guest.launched(decodes=1, prefill_tokens=0)
    now_s += 0.05
    guest.finished()
    owed_s, rested_s = guest.steps.load.rest_s, 0.0
    assert owed_s > 1.0
    while not guest.decide(for_step=True).open:
        now_s += 0.5
        slot.grant(epsilon=0.05)
        opened = guest.decide(for_step=True).open
        rested_s += 0.5
        assert opened == (rested_s > owed_s)
        if opened:
            break
        # A request, and production is idle again.
        now_s += 0.02
        slot.pulse(last_step_end_ns=round(now_s * 1e9))
        slot.grant(epsilon=0.05)


@pytest.mark.parametrize(("ratio", "steps"), [(0.02, 4.0), (1.0, 100.0)])
def test_a_step_that_production_preempted_rests_for_its_own_time(
    slot: Slot, guest: GuestSlot, ratio: float, steps: float
) -> None:
    slot.grant(epsilon=0.05, blocking_ratio=ratio)
    guest.decide(for_step=True)
    guest.launched(decodes=1, prefill_tokens=0)
    predicted_s = guest.steps.launched_s
    for launched in guest.steps._launched:
        guest.steps._launched[0] = msgspec.structs.replace(
            launched, start_ns=launched.start_ns - round(100 * predicted_s * 1e9)
        )
    guest.finished()
    assert guest.steps.last_step_s > 100 * predicted_s
    assert guest.steps.load.last_own_s == pytest.approx(steps * predicted_s, rel=0.1)


def test_the_page_states_what_is_lent(slot: Slot, guest: GuestSlot) -> None:
    guest.decide()
    guest.publish()
    assert slot.guest().lending.tokens > 0
    assert slot.guest().lending.share_ratio == 1.0


def test_without_a_pulse_the_loan_is_unknown(slot: Slot, guest: GuestSlot) -> None:
    slot.pulse(ttl_ns=0)
    guest.decide()
    guest.publish()
    assert slot.guest().lending == Lending()


def test_sequences_change_with_every_page(slot: Slot, guest: GuestSlot) -> None:
    guest.decide()
    before = guest.written()
    assert guest.written() == before
    slot.pulse()
    after_pulse = guest.written()
    slot.grant()
    assert len({before, after_pulse, guest.written()}) == 3


def test_closing_removes_the_guest_page_and_quiets_later_calls(
    slot: Slot, guest: GuestSlot
) -> None:
    guest.publish()
    guest.close()
    guest.close()
    guest.publish()
    assert slot.guest_fault() is PageFault.MISSING


def test_a_second_guest_is_refused_while_the_first_lives(slot: Slot, guest: GuestSlot) -> None:
    guest.publish()
    with pytest.raises(PageHeld):
        GuestSlot(slot.directory.path, token_limit=512)
    guest.close()
    successor = GuestSlot(slot.directory.path, token_limit=512)
    successor.load.running = 5
    successor.publish()
    guest.close()
    assert slot.guest().running == 5
    successor.close()


def test_a_guest_page_that_was_lost_is_made_again(slot: Slot, guest: GuestSlot) -> None:
    guest.publish()
    (slot.directory.path / "guest").unlink()
    assert slot.guest_fault() is PageFault.MISSING
    until_ns = monotonic_ns() + 10**10
    while slot.guest_fault() is not None and monotonic_ns() < until_ns:
        guest.publish()
    assert slot.guest_fault() is None


@pytest.fixture
def eager_threads() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("eager_threads")
def test_two_threads_may_decide_while_pages_come_and_go(slot: Slot, guest: GuestSlot) -> None:
    errors: list[BaseException] = []
    rounds = 1000

    def watch() -> None:
        try:
            for _ in range(rounds):
                guest.written()
                guest.decide()
                guest.publish()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    for turn in range(rounds):
        slot.grant(pulses=("pulse.prod.0",) if turn % 2 else ("pulse.prod.0", "pulse.gone.0"))
        guest.decide()
        guest.launched(decodes=1, prefill_tokens=0)
        guest.publish()
        guest.finished()
    thread.join()
    assert errors == []
    slot.grant()
    assert guest.decide().open
    assert slot.guest_fault() is None


def test_the_page_says_how_steps_held_alone_and_beside_production(
    slot: Slot, guest: GuestSlot
) -> None:
    guest.decide()
    guest.launched(decodes=1, prefill_tokens=0)
    guest.finished()
    guest.launched(decodes=1, prefill_tokens=0)
    slot.pulse(in_flight=1, decoding=1, requests_total=1)
    guest.finished()
    guest.publish()
    page = slot.guest()
    assert (page.step_calibration.steps, page.beside_calibration.steps) == (1, 1)


def test_the_context_of_running_requests_counts(guest: GuestSlot) -> None:
    guest.steps.model.context_s = 1.0
    guest.steps.probe_ns = monotonic_ns() + HOUR_NS
    assert guest.decide().open
    guest.load.kv_tokens = 16 * 1024
    assert not guest.decide().open


def test_a_grant_is_believed_for_seconds_however_long_it_says_that_it_holds(
    slot: Slot, guest: GuestSlot
) -> None:
    """A mistaken or foreign agent wrote an expiry of a day, and is gone."""
    slot.grant(ttl_ns=24 * HOUR_NS, age_ns=Grant.AGE_MAX_NS - 2_000_000_000)
    assert guest.decide().open
    slot.grant(ttl_ns=24 * HOUR_NS, age_ns=Grant.AGE_MAX_NS + 1)
    decision = guest.decide()
    assert (decision.reason, decision.fault) == (Closed.GRANT_FAULT, PageFault.EXPIRED)


def test_a_grant_that_was_believed_ages_without_being_written_again(
    slot: Slot, guest: GuestSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot.pulse(ttl_ns=24 * HOUR_NS)
    slot.grant(ttl_ns=24 * HOUR_NS, mode=GrantMode.UNGATED, abort_grace_s=86_400.0)
    assert guest.decide().open
    late_ns = monotonic_ns() + Grant.AGE_MAX_NS
    monkeypatch.setattr("coserve.guest.guest_slot.monotonic_ns", lambda: late_ns)
    assert not guest.decide().open
    assert not guest.grace_over()
    late_ns += 601_000_000_000
    assert guest.grace_over(), "nor does a grace last for a day"
    assert guest.kv_budget_tokens() == 0


def missed_after(guest: GuestSlot, monkeypatch: pytest.MonkeyPatch, seconds: float) -> bool:
    guest.decide()
    guest.memory_missed()
    later_ns = monotonic_ns() + int(seconds * 1e9)
    with monkeypatch.context() as patch:
        patch.setattr("coserve.guest.guest_slot.monotonic_ns", lambda: later_ns)
        return guest.memory_missed()


def test_memory_above_the_budget_is_missed_after_the_deadline_that_the_grant_says(
    slot: Slot, guest: GuestSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest.load.kv_tokens_total = 1000
    assert not missed_after(guest, monkeypatch, 3600.0), "no budget"
    slot.grant(kv_budget_tokens=400, kv_deadline_s=4.0)
    assert not missed_after(guest, monkeypatch, 4.5)
    assert missed_after(guest, monkeypatch, 5.1)
    guest.load.kv_tokens_withheld = 600
    assert not missed_after(guest, monkeypatch, 3600.0)


def test_a_guest_that_falls_asleep_has_all_the_time_it_needs(
    slot: Slot, guest: GuestSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest.load.kv_tokens_total = 1000
    slot.grant(mode=GrantMode.CLOSED, asleep=True)
    # Less than the grace of a grant, after which its agent is gone.
    assert not missed_after(guest, monkeypatch, 9.0)


class _Random:
    """Requests that take 0.1 s alone, at random, beside a guest whose steps all take as long."""

    ALONE_S = 0.1

    def __init__(self, slot: Slot, guest: GuestSlot, monkeypatch: pytest.MonkeyPatch) -> None:
        self._slot, self._guest = slot, guest
        self._now_s = 1_000_000.0
        for module in ("coserve.guest.guest_slot", "tests.unit.coserve.conftest"):
            monkeypatch.setattr(f"{module}.monotonic_ns", lambda: round(self._now_s * 1e9))
        monkeypatch.setattr("coserve.guest.guest_slot.random", random.Random(3).random)

    def mean_ratio(
        self, *, step_s: float, gap_s: float, requests: int, constant: bool = False
    ) -> tuple[float, float]:
        """The mean of the requests' TTFT over that alone, and its standard error. `constant`: each
        comes as long after the reply before it as the others."""
        arrivals, ratios, free_s = random.Random(7), [], self._now_s
        for number in range(requests):
            at_s = free_s + (gap_s if constant else arrivals.expovariate(1.0 / gap_s))
            free_s = max(at_s, self._harvest(free_s, at_s, step_s, number)) + self.ALONE_S
            ratios.append((free_s - at_s) / self.ALONE_S)
        return fmean(ratios), stdev(ratios) / math.sqrt(requests)

    def _harvest(self, since_s: float, until_s: float, step_s: float, number: int) -> float:
        """Until a request arrives; returns the end of the step that is under way then."""
        self._now_s = ended_s = since_s
        idle = {"requests_total": number, "last_step_end_ns": round(since_s * 1e9)}
        while self._now_s < until_s:
            self._slot.pulse(**idle)
            self._slot.grant(
                epsilon=0.05,
                ttft_slo_s=0.25,
                phantom_prompt_tokens=0,
                production=ProductionModel(prefill_base_s=self.ALONE_S, decode_base_s=0.01),
            )
            found = self._guest.decide(for_step=True)
            if not found.open:
                since_step_s = self._now_s - self._guest.steps.load.last_end_ns * 1e-9
                self._now_s += found.rest_s + 1e-6 if found.rest_s else 0.1 + 0.02 * since_step_s
                continue
            self._guest.launched(decodes=1, prefill_tokens=0)
            self._now_s = ended_s = self._now_s + step_s
            if ended_s > until_s:
                self._slot.pulse(in_flight=1, waiting=1, requests_total=number + 1)
            self._guest.finished()
        return ended_s


@pytest.mark.parametrize(
    ("step_s", "gap_s", "requests"),
    [(0.05, 1.0, 500), (0.3, 20.0, 500), (1.0, 20.0, 500), (3.0, 20.0, 500), (1.0, 2000.0, 60)],
)
def test_steps_of_any_length_keep_the_mean_time_to_first_token(
    slot: Slot,
    guest: GuestSlot,
    monkeypatch: pytest.MonkeyPatch,
    step_s: float,
    gap_s: float,
    requests: int,
) -> None:
    guest.steps.model = StepTimeModel(base_s=step_s, decode_s=1e-9, prefill_s=1e-9, factor=1.0)
    production = _Random(slot, guest, monkeypatch)
    mean, error = production.mean_ratio(step_s=step_s, gap_s=gap_s, requests=requests)
    assert mean <= 1.05 + 2 * error
    assert guest.steps.finished_total > 0, "a prediction is tried"


@pytest.mark.parametrize("step_s", [0.02, 0.05])
def test_no_constant_interval_of_a_client_falls_in_with_the_steps(
    slot: Slot, guest: GuestSlot, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """The spread of the rests leaves up to 1.4 of the allowed mean to the worst interval."""
    guest.steps.model = StepTimeModel(base_s=step_s, decode_s=1e-9, prefill_s=1e-9, factor=1.0)
    production = _Random(slot, guest, monkeypatch)
    for interval in range(1, 40):
        mean, error = production.mean_ratio(
            step_s=step_s, gap_s=interval * step_s / 3, requests=150, constant=True
        )
        assert mean <= 1.0 + 1.4 * 0.05 + 2 * error, interval
    assert guest.steps.finished_total > 100
