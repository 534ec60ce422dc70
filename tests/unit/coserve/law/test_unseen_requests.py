"""Requests that reach production past the middleware: what the engine does for them is no idleness.

The state hears of them by the statistics logger alone; the gate has the pulse that it publishes.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coserve.law.engine_terms import idle, terms_of
from coserve.law.gate import Closed, GuestLoad, StepDecision, decide
from coserve.law.step_time import StepTimeModel
from coserve.pulse.engine_cores import EngineStep, Siblings
from coserve.pulse.pulse_state import PulseState
from harvester.contracts.page import EngineCore, Grant, Law, ProductionModel, PulseHead, Reading

MakeGrant = Callable[..., Grant]

START_NS = 1_000_000_000_000
PULSE = "pulse.prod.0"
PROFILE = ProductionModel(
    prefill_base_s=0.01, prefill_s_per_token=1e-4, decode_base_s=0.02, decode_s_per_request=1e-4
)
GUEST_TIME = StepTimeModel(base_s=1e-4, decode_s=1e-6, prefill_s=1e-6)


class Engine:
    """Production as its logger sees it; the middleware sees what a test lets arrive."""

    def __init__(self) -> None:
        self.state, self.now_ns = PulseState(), START_NS

    def after(self, seconds: float) -> "Engine":
        self.now_ns += round(seconds * 1e9)
        return self

    def step(
        self, *, running: int | None, waiting: int | None = 0, first_tokens: int = 0, **fields: Any
    ) -> None:
        told: dict[str, Any] = {
            "kv_usage_ratio": None if running is None else 0.5,
            # Arrivals differ, and are those of requests that the middleware may know.
            "ttft_s": tuple(0.01 + 1e-4 * each for each in range(first_tokens)),
            "wall_s": self.now_ns * 1e-9,
            "prompt_tokens": 0,
            "generation_tokens": 0,
            "inter_token_s": (),
            "finished_prompt_tokens": (),
        }
        if running is None:
            waiting = None
        step = EngineStep(running=running, waiting=waiting, **(told | fields))
        self.state.step(step, now_ns=self.now_ns)

    def decode(self, requests: int, *, step_s: float = 0.02) -> None:
        self.after(step_s).step(
            running=requests, generation_tokens=requests, inter_token_s=(step_s,) * requests
        )

    def arrive(self, key: int) -> None:
        self.state.arrive(key, body_bytes=300, now_ns=self.now_ns)

    def finish(self, key: int) -> None:
        self.state.finish(key, now_ns=self.now_ns)

    def pulse(self) -> PulseHead:
        return self.state.pulse(now_ns=self.now_ns)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def grant(make_grant: MakeGrant) -> Grant:
    return make_grant(
        pulses=(PULSE,), ttft_slo_s=1.0, itl_slo_s=0.05, epsilon=0.05, production=PROFILE,
        phantom_prompt_tokens=4000,
    )  # fmt: skip


def decision(grant: Grant, *pulses: PulseHead, now_ns: int, may_probe: bool = True) -> StepDecision:
    return decide(
        Reading(grant, None),
        [Reading(pulse, None) for pulse in pulses],
        GuestLoad(GUEST_TIME, decodes=16, context_tokens=0, launched_s=0.0, cap=512),
        may_probe=may_probe,
        now_ns=now_ns,
    )


def is_idle(grant: Grant, *pulses: PulseHead, now_ns: int) -> bool:
    return idle(pulses, terms_of(pulses, grant), now_ns=now_ns)


def test_an_idle_engine_opens_the_gate(engine: Engine, grant: Grant) -> None:
    engine.decode(1)
    engine.after(0.02).step(running=0)
    engine.after(1.0)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 512
    assert is_idle(grant, engine.pulse(), now_ns=engine.now_ns)


@pytest.mark.parametrize("requests", [1, 64])
def test_decodes_that_no_middleware_saw_have_the_deadline_of_decodes(
    engine: Engine, grant: Grant, requests: int
) -> None:
    for _ in range(50):
        engine.decode(requests)
    pulse = engine.pulse()
    assert pulse.in_flight == 0
    (terms,) = terms_of([pulse], grant)
    assert (terms.decoding, terms.unseen) == (requests, requests)
    alone_s = PROFILE.decode_s(requests)
    found = decision(grant, pulse, now_ns=engine.now_ns)
    assert found.slack_s == pytest.approx(0.05 * alone_s)
    engine.after(0.06 * alone_s)
    found = decision(grant, engine.pulse(), now_ns=engine.now_ns)
    assert (found.tokens, found.reason) == (0, Closed.NO_SLACK)
    assert not is_idle(grant, engine.pulse(), now_ns=engine.now_ns)


def test_the_law_of_rose_obeys_them_too(engine: Engine, grant: Grant) -> None:
    engine.decode(64)
    rose = msgspec.structs.replace(grant, law=Law.ROSE)
    late_ns = engine.now_ns + 40_000_000
    assert decision(rose, engine.pulse(), now_ns=late_ns).tokens == 0


def test_an_engine_that_fell_silent_amid_unseen_requests_is_not_idle_an_hour_later(
    engine: Engine, grant: Grant
) -> None:
    engine.decode(3)
    engine.after(3600.0)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 0


def test_unseen_requests_that_wait_for_a_place_are_work(engine: Engine, grant: Grant) -> None:
    engine.after(0.02).step(running=0, waiting=2)
    engine.after(0.01)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 0


def test_unseen_requests_of_one_step_each_are_seen_by_their_steps(
    engine: Engine, grant: Grant
) -> None:
    """Embeddings, scores, single tokens: between two steps the batch is empty."""
    for _ in range(20):
        engine.after(0.05).step(running=0, first_tokens=1, prompt_tokens=40)
        engine.after(0.02)
        assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 0
    engine.after(0.3)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 512


def test_an_unseen_batch_beside_requests_that_are_seen_has_its_deadline(
    engine: Engine, grant: Grant
) -> None:
    """A background response decodes while the prompt of a seen request waits."""
    engine.decode(3)
    engine.arrive(1)
    engine.after(0.01)
    pulse = engine.pulse()
    (terms,) = terms_of([pulse], grant)
    assert (pulse.waiting, pulse.decoding, terms.decoding) == (1, 0, 2), "one may be the seen one's"
    assert decision(grant, pulse, now_ns=engine.now_ns).tokens == 0


def test_several_samples_of_one_request_are_as_many_decodes(engine: Engine, grant: Grant) -> None:
    engine.arrive(1)
    engine.after(0.05).step(running=8, first_tokens=1, prompt_tokens=40, generation_tokens=8)
    (terms,) = terms_of([engine.pulse()], grant)
    assert terms.decoding == 8


def test_nothing_is_unseen_while_the_middleware_sees_as_much(engine: Engine, grant: Grant) -> None:
    for key in range(4):
        engine.arrive(key)
    engine.after(0.05).step(running=4, first_tokens=2, prompt_tokens=80, generation_tokens=2)
    (terms,) = terms_of([engine.pulse()], grant)
    assert (terms.decoding, terms.unseen) == (2, 0)
    assert engine.state.pulse(now_ns=engine.now_ns).unseen_steps_total == 0


def test_a_probe_is_no_way_past_unseen_requests(engine: Engine, grant: Grant) -> None:
    """A step time that is predicted far too long asks for a probe whenever production is idle."""
    engine.decode(1)
    slow = msgspec.structs.replace(grant, epsilon=float("inf"))
    guest = GuestLoad(StepTimeModel(base_s=9.0), 1, context_tokens=0, launched_s=0.0, cap=512)
    pulses = [Reading(engine.pulse(), None)]
    found = decide(Reading(slow, None), pulses, guest, may_probe=True, now_ns=engine.now_ns)
    assert found.slack_s > 0
    assert found.tokens == 0


def test_an_aborted_request_is_work_until_its_engine_says_that_it_is_gone(
    engine: Engine, grant: Grant
) -> None:
    """The reply ends at once; the running step gives the request tokens that are not counted."""
    engine.arrive(1)
    engine.after(0.05).step(running=1, first_tokens=1, prompt_tokens=40, generation_tokens=1)
    engine.after(0.01).finish(1)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 0
    engine.after(0.01).step(running=1)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns + 10_000_000).tokens == 0
    engine.after(0.02).step(running=0, ours=False)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 512
    assert engine.state.pulse(now_ns=engine.now_ns).unseen_steps_total == 0


def test_a_step_after_the_last_reply_counts_as_unseen_only_if_it_served(engine: Engine) -> None:
    engine.step(running=0, ours=False)
    engine.step(running=2, ours=False)
    engine.step(running=None, ours=True)
    assert engine.state.pulse(now_ns=engine.now_ns).unseen_steps_total == 0
    engine.decode(1)
    pulse = engine.state.pulse(now_ns=engine.now_ns)
    assert (pulse.unseen_steps_total, pulse.unseen_step_ns) == (1, engine.now_ns)


def test_time_with_unseen_requests_is_busy_time(engine: Engine) -> None:
    engine.decode(8)
    for _ in range(100):
        engine.decode(8)
    assert engine.state.pulse(now_ns=engine.now_ns).busy_s_total == pytest.approx(2.0)
    engine.decode(0, step_s=60.0)
    engine.after(60.0).decode(1)
    assert engine.state.pulse(now_ns=engine.now_ns).busy_s_total == pytest.approx(2.0, abs=0.1)


@given(
    st.lists(
        st.tuples(st.sampled_from(["arrive", "finish", "decode"]), st.floats(0.001, 5.0)),
        max_size=60,
    )
)
def test_no_moment_is_busy_twice(events: list[tuple[str, float]]) -> None:
    engine, open_keys = Engine(), list[int]()
    before_s = 0.0
    for key, (event, seconds) in enumerate(events):
        engine.after(seconds)
        if event == "arrive":
            engine.arrive(key)
            open_keys.append(key)
        elif event == "finish" and open_keys:
            engine.finish(open_keys.pop(0))
        else:
            engine.decode(1, step_s=0.0)
        busy_s = engine.state.pulse(now_ns=engine.now_ns).busy_s_total
        assert before_s <= busy_s <= (engine.now_ns - START_NS) * 1e-9 + 1e-6
        before_s = busy_s


def test_a_response_in_the_background_is_work_from_the_end_of_its_reply(
    engine: Engine, grant: Grant
) -> None:
    engine.arrive(1)
    engine.after(0.001)
    engine.state.finish(1, now_ns=engine.now_ns, outlived=True)
    engine.after(0.05)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 0, "it prefills"
    engine.step(running=1, first_tokens=1, prompt_tokens=40, generation_tokens=1)
    for _ in range(20):
        engine.decode(1)
        engine.after(0.01)
        assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 0
    engine.after(0.01).step(running=0, generation_tokens=1, finished_prompt_tokens=(40,))
    engine.after(0.31)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 512


def test_a_request_that_is_refused_holds_nothing_back(engine: Engine, grant: Grant) -> None:
    engine.arrive(1)
    engine.finish(1)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 512


def test_an_open_websocket_is_in_flight_and_its_steps_are_seen(
    engine: Engine, grant: Grant
) -> None:
    engine.state.connect(7)
    engine.after(60.0)
    pulse = engine.state.pulse(now_ns=engine.now_ns)
    assert (pulse.in_flight, pulse.sockets, pulse.waiting, pulse.decoding) == (1, 1, 0, 0)
    assert pulse.busy_s_total == 0.0, "nobody speaks"
    assert decision(grant, pulse, now_ns=engine.now_ns).tokens == 512, "no hung engine either"
    engine.state.spoken_ns = engine.now_ns
    engine.decode(1)
    engine.after(0.01)
    assert decision(grant, engine.pulse(), now_ns=engine.now_ns).tokens == 0
    assert engine.state.pulse(now_ns=engine.now_ns).unseen_steps_total == 0
    engine.state.finish(7, now_ns=engine.now_ns)
    assert engine.pulse().in_flight == 0


def test_an_hour_of_websockets_that_speak_leaves_no_unseen_step(engine: Engine) -> None:
    for key in range(3):
        engine.state.connect(key)
    for _ in range(3600):
        engine.after(0.9)
        engine.state.spoken_ns = engine.now_ns
        engine.decode(3, step_s=0.1)
    assert engine.state.pulse(now_ns=engine.now_ns).unseen_steps_total == 0


@pytest.mark.parametrize(
    ("silent_s", "requests"), [(6.0, 1), (0.0, 2)], ids=["nobody speaks", "more than sockets"]
)
def test_a_websocket_hides_no_request_of_another_door(
    engine: Engine, grant: Grant, silent_s: float, requests: int
) -> None:
    engine.state.connect(7)
    engine.state.spoken_ns = engine.now_ns
    engine.after(silent_s)
    for _ in range(3):
        engine.after(0.1).step(
            running=0,
            first_tokens=requests,
            prompt_tokens=8000,
            generation_tokens=requests,
            finished_prompt_tokens=(8000,) * requests,
        )
    assert engine.state.pulse(now_ns=engine.now_ns).unseen_steps_total == 3


def test_once_the_websocket_is_closed_it_explains_nothing(engine: Engine) -> None:
    engine.state.connect(7)
    engine.state.spoken_ns = engine.now_ns
    engine.finish(7)
    engine.step(running=1, prompt_tokens=512)
    assert engine.state.pulse(now_ns=engine.now_ns).unseen_steps_total == 1


def test_a_step_for_a_websocket_is_work_a_moment_later_too(engine: Engine, grant: Grant) -> None:
    """Its next step may follow, and the cores tell of it at its end only."""
    engine.state.connect(7)
    engine.state.spoken_ns = engine.now_ns
    engine.step(
        running=0, first_tokens=1, prompt_tokens=40, generation_tokens=1,
        finished_prompt_tokens=(40,),
    )  # fmt: skip
    assert decision(grant, engine.after(0.1).pulse(), now_ns=engine.now_ns).tokens == 0
    assert decision(grant, engine.after(0.3).pulse(), now_ns=engine.now_ns).tokens == 512


def core(requests: int, *, told_s: float, rank: int = 0) -> PulseHead:
    told_ns = START_NS + round(told_s * 1e9)
    return PulseHead(cores=(EngineCore(rank=rank, told_ns=told_ns, running=requests),))


TWO = ("pulse.prod.0", "pulse.prod.1")


@pytest.mark.parametrize("order", [1, -1])
def test_the_newer_report_of_two_api_servers_on_a_core_counts(grant: Grant, order: int) -> None:
    two = msgspec.structs.replace(grant, pulses=TWO)
    later_ns = START_NS + 2_000_000_000
    gone = (core(5, told_s=0.0), core(0, told_s=1.0))[::order]
    assert is_idle(two, *gone, now_ns=later_ns)
    came = (core(0, told_s=0.0), core(5, told_s=1.0))[::order]
    assert not is_idle(two, *came, now_ns=later_ns)
    assert decision(two, *came, now_ns=later_ns).tokens == 0


def test_an_api_server_that_reads_late_does_not_keep_an_idle_engine_busy(grant: Grant) -> None:
    """It had the last step but one and read it after the other had read the last."""
    two = msgspec.structs.replace(grant, pulses=TWO)
    late = core(1, told_s=1.0), core(0, told_s=0.98)
    assert is_idle(two, *late, now_ns=START_NS + 2_000_000_000)


def test_each_data_parallel_rank_has_its_own_word(grant: Grant) -> None:
    ranks = PulseHead(
        cores=(
            EngineCore(rank=0, told_ns=START_NS, running=0),
            EngineCore(rank=1, told_ns=START_NS, running=3),
        )
    )
    (terms,) = terms_of([ranks], grant)
    assert (terms.unseen, terms.cores) == (3, 2)
    beside = msgspec.structs.replace(ranks, in_flight=3, decoding=3)
    assert terms_of([beside], grant)[0].unseen == 0


def test_unseen_requests_of_one_engine_are_not_anothers(grant: Grant) -> None:
    two = msgspec.structs.replace(grant, pulses=("pulse.a.0", "pulse.b.0"))
    terms = terms_of([core(4, told_s=0.0), core(0, told_s=0.0)], two)
    assert [each.unseen for each in terms] == [4, 0]
    assert decision(
        two, core(4, told_s=0.0), core(0, told_s=0.0), now_ns=START_NS + 10_000_000
    ).tokens == 0  # fmt: skip


def test_requests_of_another_api_server_are_not_unseen_by_this_one() -> None:
    """A step that gave it nothing may tell it of theirs."""
    engine = Engine()
    for _ in range(10):
        engine.state.step(
            EngineStep(
                running=2, waiting=0, kv_usage_ratio=0.5, prompt_tokens=0,
                generation_tokens=0, inter_token_s=(), finished_prompt_tokens=(), ours=False,
            ),
            now_ns=engine.now_ns,
            beside=Siblings(in_flight=2, decoding=2, requests_total=2),
        )  # fmt: skip
    assert engine.state.pulse(now_ns=engine.now_ns).unseen_steps_total == 0
