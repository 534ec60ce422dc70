"""The place of a rollout's tail, step by step: no engine, no gateway and no clock."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler.rollmux.permits.events import Recall
from scheduler.rollmux.permits.job_permit import PermitStage
from scheduler.rollmux.permits.leased_tail import (
    GONE_S,
    RECALL_S,
    STARVED_S,
    EngineSwitches,
    LeasedTail,
    RecallTail,
    ReportNarrowed,
    TailEnd,
    TailSample,
    TailState,
)

BOTH = EngineSwitches(dedicated=True, harvesting=True)
LEASES_ALONE = EngineSwitches(dedicated=False, harvesting=True)
NEITHER = EngineSwitches(dedicated=False, harvesting=False)
ASKED = TailSample(stage=PermitStage.NARROWING, may_leave=True, guest_serves=True)
LEFT = TailSample(stage=PermitStage.TAILING, guest_serves=True, engines_off=True)
UNSERVED = TailSample(stage=PermitStage.TAILING, engines_off=True)


class Scene:
    def __init__(self, *, leases: bool = True) -> None:
        self.tail = LeasedTail(leases=leases)
        self.now = 0.0

    def see(self, sample: TailSample, *, after_s: float = 0.0) -> tuple[Any, ...]:
        self.now += after_s
        return self.tail.observe(sample, now=self.now)

    def leave(self) -> None:
        """The tail runs on leases alone, and the control has heard it."""
        self.see(ASKED)
        self.see(TailSample(stage=PermitStage.NARROWING, engines_off=True, guest_serves=True))
        self.see(LEFT)


def test_the_permit_is_narrowed_only_after_the_gateway_has_confirmed_that_engines_are_empty() -> (
    None
):
    scene = Scene()
    assert scene.tail.switches == BOTH
    assert scene.see(ASKED) == ()
    assert scene.tail.switches == LEASES_ALONE
    confirmed = TailSample(stage=PermitStage.NARROWING, engines_off=True)
    assert scene.see(confirmed, after_s=0.1) == (ReportNarrowed(),)


def test_an_unconfirmed_narrowing_is_sent_again() -> None:
    scene = Scene()
    scene.see(ASKED)
    confirmed = TailSample(stage=PermitStage.NARROWING, engines_off=True, guest_serves=True)
    assert scene.see(confirmed) == (ReportNarrowed(),)
    assert scene.see(confirmed, after_s=RECALL_S) == (ReportNarrowed(),)


def test_a_tail_stays_without_guest_leases_or_waiting_jobs() -> None:
    for sample in (
        TailSample(stage=PermitStage.NARROWING, may_leave=True),
        TailSample(stage=PermitStage.NARROWING, guest_serves=True),
        TailSample(guest_serves=True),
    ):
        scene = Scene()
        assert scene.see(sample) == ()
        assert (scene.tail.state, scene.tail.switches) == (TailState.HOME, BOTH)
    scene = Scene(leases=False)
    scene.see(ASKED)
    assert scene.tail.switches == EngineSwitches(dedicated=True, harvesting=False)


def test_a_tail_whose_gateway_confirms_nothing_stays_on_its_engines() -> None:
    scene = Scene()
    scene.see(ASKED)
    unconfirmed = TailSample(stage=PermitStage.NARROWING)
    scene.see(unconfirmed, after_s=GONE_S)
    assert scene.tail.state is TailState.LEAVING
    assert scene.see(unconfirmed, after_s=0.1) == ()
    assert (scene.tail.state, scene.tail.switches, scene.tail.tails) == (TailState.HOME, BOTH, [])


def test_a_tail_asks_for_its_nodes_while_they_are_not_free_and_returns_to_them() -> None:
    scene = Scene()
    scene.leave()
    assert scene.see(LEFT, after_s=RECALL_S) == (RecallTail(Recall.WHEN_FREE),)
    assert scene.see(LEFT, after_s=RECALL_S / 2) == ()
    back = TailSample(stage=PermitStage.RUNNING, guest_serves=True, engines_off=True)
    assert scene.see(back, after_s=1.0) == ()
    assert scene.tail.switches == BOTH
    (tail,) = scene.tail.tails
    assert tail.end is TailEnd.RETURNED
    assert tail.seconds == RECALL_S * 1.5 + 1.0


def test_a_lease_that_is_cut_for_a_moment_costs_no_place() -> None:
    scene = Scene()
    scene.leave()
    for _ in range(3):
        scene.see(UNSERVED, after_s=GONE_S)
        assert scene.tail.state is TailState.AWAY
        scene.see(LEFT, after_s=0.1)


def test_a_lease_that_is_gone_sends_the_tail_into_the_line_of_its_nodes() -> None:
    scene = Scene()
    scene.leave()
    assert scene.see(UNSERVED, after_s=GONE_S + 0.1) == (RecallTail(Recall.IN_LINE),)
    # A guest that comes back does not cost it the place.
    assert scene.see(LEFT, after_s=RECALL_S) == (RecallTail(Recall.IN_LINE),)
    assert scene.tail.switches == LEASES_ALONE
    scene.see(TailSample(stage=PermitStage.RUNNING), after_s=5.0)
    assert [tail.end for tail in scene.tail.tails] == [TailEnd.LEASE_LOST]
    # And it may leave once more.
    scene.see(ASKED)
    assert scene.tail.state is TailState.LEAVING


def test_a_guest_that_starves_is_as_good_as_gone() -> None:
    starved = TailSample(
        stage=PermitStage.TAILING,
        guest_serves=True,
        guest_busy=True,
        guest_tokens=7,
        engines_off=True,
    )
    scene = Scene()
    scene.leave()
    scene.see(starved, after_s=1.0)
    scene.see(starved, after_s=STARVED_S - 0.1)
    assert scene.tail.state is TailState.AWAY
    # A token, or a turn that waits for its tool, begins the time anew.
    for made in (replace(starved, guest_tokens=8), replace(starved, guest_busy=False)):
        scene.see(made, after_s=0.1)
        scene.see(replace(made, guest_busy=True), after_s=STARVED_S - 0.1)
        assert scene.tail.state is TailState.AWAY
    scene.see(starved, after_s=0.2)
    assert scene.tail.state is TailState.IN_LINE


def test_a_lost_permit_ends_the_use_of_engines_and_leases_wherever_the_tail_is() -> None:
    lost = TailSample(lost=True)
    at_home, away = Scene(), Scene()
    away.leave()
    for scene in (at_home, away):
        assert scene.see(lost, after_s=1.0) == ()
        assert scene.tail.switches == NEITHER
        assert scene.see(ASKED, after_s=1.0) == ()
        assert scene.tail.switches == NEITHER
    assert [tail.end for tail in away.tail.tails] == [TailEnd.PERMIT_LOST]


def test_a_rollout_that_ends_away_counts_its_tail() -> None:
    scene = Scene()
    scene.leave()
    scene.tail.end(now=scene.now + 2.0)
    assert [(tail.end, tail.seconds) for tail in scene.tail.tails] == [(TailEnd.FINISHED, 2.0)]
    assert scene.tail.switches == NEITHER


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 5.0),
            st.builds(
                TailSample,
                stage=st.sampled_from(PermitStage),
                may_leave=st.booleans(),
                lost=st.sampled_from((False,) * 9 + (True,)),
                guest_serves=st.booleans(),
                engines_off=st.booleans(),
            ),
        ),
        max_size=40,
    )
)
def test_whatever_is_seen_nodes_are_given_away_only_with_the_engines_off(
    steps: list[tuple[float, TailSample]],
) -> None:
    scene = Scene()
    for after_s, sample in steps:
        for effect in scene.see(sample, after_s=after_s):
            assert scene.tail.switches == LEASES_ALONE
            if isinstance(effect, RecallTail):
                assert sample.stage is PermitStage.TAILING
