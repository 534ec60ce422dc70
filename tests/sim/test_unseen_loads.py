"""Loads that production has never seen, played on the real policies: gate, agent and memory law.

The device is shared without any isolation, so that a guest step delays production by all of it.
"""

from harvester.contracts.page import GrantMode
from harvester.policy.effects import KillGuest
from harvester.policy.states import Condition
from tests.sim.fake_slot import GUEST_KV_TOKENS, FakeSlot, Request, chat

LEARNED_S = 130.0
"""Thirty seconds of traffic teach production's step times."""
SLO_S = 0.25


def learning() -> list[Request]:
    return chat(100.0, LEARNED_S, every_s=0.4)


def both(until_s: float, arrivals: list[Request]) -> tuple[FakeSlot, FakeSlot]:
    """The same requests with a guest and alone."""
    slots = FakeSlot(guest=True), FakeSlot(guest=False)
    for slot in slots:
        slot.run(
            until_s, [Request(one.at_s, one.prompt_tokens, one.output_tokens) for one in arrivals]
        )
    return slots


def later_by_s(slots: tuple[FakeSlot, FakeSlot], *, since_s: float) -> list[float]:
    """Delay of each request's first token over that of the same request alone, in s."""
    with_guest, alone = ({one.at_s: one.ttft_s for one in slot.production.served} for slot in slots)
    assert with_guest.keys() == alone.keys()
    return [with_guest[at] - alone[at] for at in sorted(alone) if at >= since_s]


def test_usual_traffic_leaves_the_guest_most_of_the_idle_time() -> None:
    slots = both(160.0, [*learning(), *chat(LEARNED_S, 158.0, every_s=0.4)])
    assert slots[0].guest_time_s(LEARNED_S, 158.0) > 10.0
    assert max(later_by_s(slots, since_s=LEARNED_S)) < 0.05 * SLO_S


def test_a_prompt_of_16k_tokens_amid_rollouts_stops_them_until_its_first_token() -> None:
    long = Request(140.03, 16_384, 20)
    slots = both(160.0, [*learning(), *chat(LEARNED_S, 158.0, every_s=0.4), long])
    (served,) = [one for one in slots[0].production.served if one.prompt_tokens == 16_384]
    assert 1.6 < served.ttft_s < 2.5
    begun = [start for start, _ in slots[0].guest_steps if 140.03 < start < 140.03 + served.ttft_s]
    assert begun == []


def test_after_such_prompts_short_requests_are_delayed_by_no_more_of_their_slo() -> None:
    """A long prompt is the P99 now, and production alone would serve it too late: the next short
    request can bear no more than before."""
    long = [Request(at_s, 16_384, 20) for at_s in (131.03, 134.03, 137.03)]
    slots = both(160.0, [*learning(), *chat(LEARNED_S, 158.0, every_s=0.4), *long])
    assert slots[0].pulse().record.prompt_tokens_p99 == 16_384
    assert slots[0].guest_time_s(140.0, 158.0) > 5.0
    assert max(later_by_s(slots, since_s=140.0)) < 0.05 * SLO_S


def test_ten_times_the_load_within_a_second_meets_a_gate_that_closes() -> None:
    slots = both(150.0, [*learning(), *chat(140.0, 145.0, every_s=0.04)])
    assert max(later_by_s(slots, since_s=140.0)) < 0.05 * SLO_S
    assert slots[0].guest_time_s(146.0, 150.0) > 3.0


def test_a_restart_of_production_is_learnt_anew_before_the_guest_steps_again() -> None:
    slot = FakeSlot(guest=True)
    slot.run(LEARNED_S + 5.0, learning())
    assert slot.guest_steps
    slot.restart_production(down_s=20.0)
    back_s = slot.now + 20.0
    begun = len(slot.guest_steps)
    slot.run(back_s + 1.0, [])
    assert len(slot.guest_steps) == begun, "a page that expired is no idle engine"
    assert slot.grant.mode is GrantMode.CLOSED
    slot.run(back_s + 5.0, [])
    assert len(slot.guest_steps) == begun, "counters at zero and nothing learned are neither"
    assert slot.policy.condition is Condition.UNLEARNED
    slot.run(back_s + 40.0, chat(back_s + 5.0, back_s + 30.0, every_s=0.4))
    opened = [one.at_s for one in slot.beats if one.at_s > back_s and one.grant.mode.admits]
    assert opened
    assert slot.guest_steps[begun][0] >= opened[0]
    assert slot.production.state.times.learned >= slot.settings.model_samples_min


def unseen(since_s: float, until_s: float, *, every_s: float) -> list[Request]:
    requests = chat(since_s, until_s, every_s=every_s, output_tokens=200)
    for one in requests:
        one.unseen = True
    return requests


def test_the_guest_takes_no_step_beside_requests_that_no_middleware_saw() -> None:
    """The profile is known and the flag is lost: only the statistics logger speaks."""
    slot = FakeSlot(guest=True)
    slot.run(LEARNED_S + 5.0, learning())
    assert slot.policy.condition is Condition.CLEAR
    slot.run(LEARNED_S + 20.0, unseen(LEARNED_S + 5.0, LEARNED_S + 20.0, every_s=0.02))
    # Only the first prompt is a surprise, and the step that ran then.
    late = [one for one in slot.guest_steps if LEARNED_S + 5.2 < one[0] < slot.now]
    assert late == []
    closed = [one for one in slot.beats if one.at_s > LEARNED_S + 5.5]
    assert {one.grant.mode for one in closed} == {GrantMode.CLOSED}
    assert slot.policy.condition is Condition.UNSEEN
    assert "--middleware" in slot.policy.reason
    assert slot.policy.idle_ratio is not None
    assert slot.policy.idle_ratio < 0.3


def test_requests_that_were_not_seen_keep_their_share_and_then_the_slot_is_closed() -> None:
    slot = FakeSlot(guest=True)
    slot.run(LEARNED_S + 5.0, learning())
    requests = unseen(LEARNED_S + 5.0, LEARNED_S + 30.0, every_s=3.0)
    slot.run(LEARNED_S + 32.0, requests)
    assert len(requests) > 5
    for one in requests:
        first_s, last_s = one.at_s + one.ttft_s, one.last_token_s
        assert slot.guest_time_s(first_s, last_s) < 0.05 * (last_s - first_s)
        assert slot.guest_time_s(first_s + 0.3, last_s) == 0.0


def test_no_load_that_the_middleware_sees_is_taken_for_unseen_requests() -> None:
    """Clients that go in the middle leave a step or two behind, with nothing in flight."""
    arrivals = [*learning(), *chat(LEARNED_S, 158.0, every_s=0.4)]
    for count, one in enumerate(arrivals):
        if count % 3 == 0:
            one.leaves_after = 1 + count % 17
    slot = FakeSlot(guest=True)
    slot.run(160.0, arrivals)
    assert not [one for one in slot.beats if "nothing is in flight" in one.grant.reason]
    assert slot.production.state.pulse(now_ns=int(160e9)).unseen_steps_total == 0
    assert slot.guest_time_s(LEARNED_S, 158.0) > 10.0


def test_kv_filled_to_the_brim_takes_the_guest_s_memory_and_its_steps() -> None:
    # Twelve requests of 8k fill the KV; the thirteenth waits for room.
    slot = FakeSlot(guest=True, kv_tokens=12 * 8_300)
    slot.run(LEARNED_S, learning())
    crowd = [Request(LEARNED_S + 0.01 * n, 8_000, 300) for n in range(14)]
    slot.run(LEARNED_S + 20.0, crowd)
    full = [one for one in slot.beats if one.at_s > LEARNED_S and one.grant.kv_budget_tokens]
    assert full[0].grant.kv_budget_tokens == GUEST_KV_TOKENS // 2
    assert min(one.grant.kv_budget_tokens for one in full) == GUEST_KV_TOKENS // 8
    assert not [effect for one in slot.beats for effect in one.effects if type(effect) is KillGuest]
    served = [one for one in slot.production.served if one.prompt_tokens == 8_000]
    waited_until_s = max(one.at_s + one.ttft_s for one in served)
    assert slot.guest_time_s(LEARNED_S + 0.2, waited_until_s) == 0.0
    assert len(served) == 14
    ended_s = slot.now
    slot.run(ended_s + 45.0, chat(ended_s, ended_s + 44.0, every_s=0.4))
    assert slot.guest_time_s(ended_s, ended_s + 44.0) > 10.0
    quiet = [one for one in slot.beats if ended_s < one.at_s < ended_s + 5.0]
    assert {one.grant.kv_budget_tokens for one in quiet} == {GUEST_KV_TOKENS // 8}, "not at once"
    assert slot.grant.kv_budget_tokens == 0, "all of it in the end"
