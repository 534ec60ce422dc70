"""The lease table, and a state machine that loses requests and replies at will."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from harvester.contracts.ids import Epoch, JobId, LeaseId, NodeId, SlotId, TenantId
from harvester.contracts.wire.leases import (
    EndReason,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotState,
)
from harvester.policy.leases import LeaseBook

SLOT = SlotId("slot0")


def request(request_id: str, *, slot: SlotId = SLOT, job: str = "job-a") -> LeaseRequest:
    return LeaseRequest(
        request_id=request_id,
        slot=slot,
        tenant=TenantId("tenant"),
        job=JobId(job),
        duration_s=10.0,
    )


@pytest.fixture
def book() -> LeaseBook:
    book = LeaseBook(node=NodeId("node"), ttl_s=10.0)
    book.add_slot(SLOT, epoch=Epoch(0))
    book.offer(SLOT, SlotState.OFFERED)
    return book


def granted(answer: object) -> LeaseGranted:
    assert isinstance(answer, LeaseGranted)
    return answer


def test_repeating_a_request_gives_the_same_lease_and_no_more_time(book: LeaseBook) -> None:
    first = granted(book.take(request("r1"), now=0.0))
    again = granted(book.take(request("r1"), now=4.0))
    assert (again.lease, again.epoch) == (first.lease, first.epoch)
    assert again.duration_s == 6.0


def test_refuses_a_second_lease_with_a_reason(book: LeaseBook) -> None:
    book.take(request("r1"), now=0.0)
    refused = book.take(request("r2", job="job-b"), now=1.0)
    assert isinstance(refused, LeaseRefused)
    assert "job-a" in refused.reason
    assert refused.retry_after_s > 0


@pytest.mark.parametrize("state", [s for s in SlotState if s is not SlotState.OFFERED])
def test_refuses_a_slot_that_is_not_offered(book: LeaseBook, state: SlotState) -> None:
    book.offer(SLOT, state, "because")
    refused = book.take(request("r1"), now=0.0)
    assert isinstance(refused, LeaseRefused)
    assert "because" in refused.reason


def test_refuses_an_unknown_slot(book: LeaseBook) -> None:
    assert isinstance(book.take(request("r", slot=SlotId("x")), now=0.0), LeaseRefused)


def test_never_grants_more_than_its_own_ttl(book: LeaseBook) -> None:
    lease = granted(book.take(LeaseRequest(**{**_fields(), "duration_s": 1e9}), now=0.0))
    assert lease.duration_s == 10.0
    renewal = LeaseRenewal(epoch=lease.epoch, duration_s=1e9)
    assert granted(book.renew(lease.lease, renewal, now=5.0)).duration_s == 10.0


def test_an_expired_lease_says_so_and_the_epoch_rises(book: LeaseBook) -> None:
    lease = granted(book.take(request("r1"), now=0.0))
    ended = book.renew(lease.lease, LeaseRenewal(epoch=lease.epoch, duration_s=10), now=10.0)
    assert ended == LeaseEnded(lease=lease.lease, reason=EndReason.EXPIRED)
    assert book.view(SLOT).epoch > lease.epoch
    assert book.view(SLOT).lease is None


def test_releasing_twice_answers_the_same(book: LeaseBook) -> None:
    lease = granted(book.take(request("r1"), now=0.0))
    first = book.release(lease.lease, now=1.0)
    assert first.reason is EndReason.RELEASED
    assert book.release(lease.lease, now=2.0) == first


def test_a_renewal_under_a_wrong_epoch_prolongs_nothing(book: LeaseBook) -> None:
    lease = granted(book.take(request("r1"), now=0.0))
    stale = LeaseRenewal(epoch=Epoch(lease.epoch - 1), duration_s=10)
    assert isinstance(book.renew(lease.lease, stale, now=5.0), LeaseEnded)
    book.expire(now=10.0)
    assert book.view(SLOT).lease is None


def test_a_revoked_lease_runs_to_its_deadline_and_is_not_renewed(book: LeaseBook) -> None:
    lease = granted(book.take(request("r1"), now=0.0))
    ended = book.end(lease.lease, EndReason.DRAIN, deadline_s=3.0, now=1.0)
    assert ended.deadline_s == 3.0
    answer = book.renew(lease.lease, LeaseRenewal(epoch=lease.epoch, duration_s=10), now=2.0)
    assert answer == LeaseEnded(lease=lease.lease, reason=EndReason.DRAIN, deadline_s=2.0)
    assert book.view(SLOT).ending
    book.expire(now=4.0)
    assert [e.reason for e in book.news()] == [EndReason.DRAIN]


def test_a_successor_takes_a_live_lease_over_under_the_epoch_left_on_the_page() -> None:
    heir = LeaseBook(node=NodeId("node"), ttl_s=10.0, adopt_until_s=110.0)
    heir.add_slot(SLOT, epoch=Epoch(7))
    lease = LeaseId("node.slot0.7")
    stale = heir.renew(lease, LeaseRenewal(epoch=Epoch(6), duration_s=10), now=101.0)
    assert isinstance(stale, LeaseEnded)
    renewal = LeaseRenewal(epoch=Epoch(7), duration_s=10)
    assert granted(heir.renew(lease, renewal, now=101.0)).epoch == 7
    assert heir.view(SLOT).lease == lease


def test_a_successor_adopts_nothing_late_or_after_it_leased_the_slot_itself() -> None:
    heir = LeaseBook(node=NodeId("node"), ttl_s=10.0, adopt_until_s=110.0)
    heir.add_slot(SLOT, epoch=Epoch(7))
    old, renewal = LeaseId("old"), LeaseRenewal(epoch=Epoch(7), duration_s=10)
    assert isinstance(heir.renew(old, renewal, now=110.0), LeaseEnded)
    heir.offer(SLOT, SlotState.OFFERED)
    assert granted(heir.take(request("r"), now=101.0)).epoch == 8
    assert isinstance(heir.renew(old, renewal, now=101.0), LeaseEnded)


def _fields() -> dict[str, object]:
    return {"request_id": "r", "slot": SLOT, "tenant": "t", "job": "j"}


class Holder:
    """A scheduler's view: it uses a lease only until its own, earlier, end of it."""

    def __init__(self, lease: LeaseGranted, ends_s: float) -> None:
        self.lease, self.ends_s = lease, ends_s


class LeaseMachine(RuleBasedStateMachine):
    """Calls whose request may be lost (nothing happens) or whose reply may (nobody learns)."""

    requests = Bundle("requests")
    SLOTS = (SlotId("a"), SlotId("b"))

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.book = LeaseBook(node=NodeId("node"), ttl_s=10.0)
        self.holders: dict[LeaseId, Holder] = {}
        self.epochs = dict.fromkeys(self.SLOTS, 0)
        self.count = 0
        for slot in self.SLOTS:
            self.book.add_slot(slot, epoch=Epoch(0))
            self.book.offer(slot, SlotState.OFFERED)

    @rule(elapsed_s=st.floats(0.0, 6.0))
    def time_passes(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rule(target=requests, slot=st.sampled_from(SLOTS), job=st.sampled_from(["a", "b"]))
    def compose(self, slot: SlotId, job: str) -> LeaseRequest:
        self.count += 1
        return request(f"r{self.count}", slot=slot, job=job)

    @rule(target=requests, wanted=consumes(requests), reply_lost=st.booleans())
    def take(self, wanted: LeaseRequest, reply_lost: bool) -> object:
        sent_s = self.now
        answer = self.book.take(wanted, now=self.now)
        if reply_lost:
            return wanted
        if isinstance(answer, LeaseGranted):
            self.holders[answer.lease] = Holder(answer, sent_s + answer.duration_s)
        return multiple()

    @rule(data=st.data(), reply_lost=st.booleans())
    def renew(self, data: st.DataObject, reply_lost: bool) -> None:
        if not self.holders:
            return
        holder = self.holders[data.draw(st.sampled_from(sorted(self.holders)))]
        renewal = LeaseRenewal(epoch=holder.lease.epoch, duration_s=10.0)
        answer = self.book.renew(holder.lease.lease, renewal, now=self.now)
        if reply_lost:
            return
        if isinstance(answer, LeaseGranted):
            holder.ends_s = self.now + answer.duration_s
        else:
            del self.holders[holder.lease.lease]

    @rule(data=st.data(), reply_lost=st.booleans())
    def release(self, data: st.DataObject, reply_lost: bool) -> None:
        if not self.holders:
            return
        lease = data.draw(st.sampled_from(sorted(self.holders)))
        # The holder stops using it before it says so.
        self.holders[lease].ends_s = self.now
        self.book.release(lease, now=self.now)
        if not reply_lost:
            del self.holders[lease]

    @rule(slot=st.sampled_from(SLOTS), state=st.sampled_from(SlotState))
    def offer_changes(self, slot: SlotId, state: SlotState) -> None:
        self.book.offer(slot, state)

    @invariant()
    def no_two_holders_believe_in_one_slot(self) -> None:
        self.book.expire(now=self.now)
        believed = [h.lease.slot for h in self.holders.values() if h.ends_s > self.now]
        assert len(believed) == len(set(believed))

    @invariant()
    def a_believed_lease_is_the_live_one_under_the_current_epoch(self) -> None:
        for lease, holder in self.holders.items():
            if holder.ends_s > self.now:
                view = self.book.view(holder.lease.slot)
                assert (view.lease, view.epoch) == (lease, holder.lease.epoch)

    @invariant()
    def epochs_only_rise(self) -> None:
        for slot in self.SLOTS:
            epoch = self.book.view(slot).epoch
            assert epoch >= self.epochs[slot]
            self.epochs[slot] = epoch


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
