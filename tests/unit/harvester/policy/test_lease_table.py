"""The lease table, and a state machine that loses requests and replies at will."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from msgspec import structs

from harvester.contracts.ids import (
    Epoch,
    JobId,
    LeaseId,
    NodeId,
    SlotId,
    TenantId,
    is_name,
)
from harvester.contracts.wire.error_budget import Allotment
from harvester.contracts.wire.leases import (
    EndReason,
    LeaseEnded,
    LeaseGranted,
    LeaseRefused,
    LeaseRenewal,
    LeaseRequest,
    SlotState,
)
from harvester.policy.lease_table import LeaseTable, SlotLease

SLOT = SlotId("slot0")
_secrets = count()


def take(leases: LeaseTable, wanted: LeaseRequest, *, now: float) -> LeaseGranted | LeaseRefused:
    return leases.take(wanted, secret=f"secret{next(_secrets)}", now=now)


def request(
    request_id: str, *, slot: SlotId = SLOT, job: str = "job-a", tenant: str = "tenant"
) -> LeaseRequest:
    return LeaseRequest(
        request_id=request_id,
        slot=slot,
        tenant=TenantId(tenant),
        job=JobId(job),
        duration_s=10.0,
    )


@pytest.fixture
def leases() -> LeaseTable:
    leases = LeaseTable(node=NodeId("node"), ttl_s=10.0)
    leases.add_slot(SLOT, epoch=Epoch(0))
    leases.offer(SLOT, SlotState.OFFERED)
    return leases


def granted(answer: object) -> LeaseGranted:
    assert isinstance(answer, LeaseGranted)
    return answer


def test_repeating_a_request_gives_the_same_lease_and_no_more_time(leases: LeaseTable) -> None:
    first = granted(take(leases, request("r1"), now=0.0))
    again = granted(take(leases, request("r1"), now=4.0))
    assert (again.lease, again.epoch) == (first.lease, first.epoch)
    assert again.duration_s == 6.0


def test_refuses_a_second_lease_with_a_reason(leases: LeaseTable) -> None:
    take(leases, request("r1"), now=0.0)
    refused = take(leases, request("r2", job="job-b"), now=1.0)
    assert isinstance(refused, LeaseRefused)
    assert "job-a" in refused.reason
    assert refused.retry_after_s > 0


@pytest.mark.parametrize("state", [s for s in SlotState if s is not SlotState.OFFERED])
def test_refuses_a_slot_that_is_not_offered(leases: LeaseTable, state: SlotState) -> None:
    leases.offer(SLOT, state, "because")
    refused = take(leases, request("r1"), now=0.0)
    assert isinstance(refused, LeaseRefused)
    assert "because" in refused.reason


def test_refuses_an_unknown_slot(leases: LeaseTable) -> None:
    assert isinstance(take(leases, request("r", slot=SlotId("x")), now=0.0), LeaseRefused)


def test_never_grants_more_than_its_own_ttl(leases: LeaseTable) -> None:
    lease = granted(take(leases, LeaseRequest(**{**_fields(), "duration_s": 1e9}), now=0.0))
    assert lease.duration_s == 10.0
    renewal = LeaseRenewal(epoch=lease.epoch, duration_s=1e9)
    assert granted(leases.renew(lease.lease, renewal, now=5.0)).duration_s == 10.0


def test_an_expired_lease_says_so_and_the_epoch_rises(leases: LeaseTable) -> None:
    lease = granted(take(leases, request("r1"), now=0.0))
    ended = leases.renew(lease.lease, LeaseRenewal(epoch=lease.epoch, duration_s=10), now=10.0)
    assert ended == LeaseEnded(lease=lease.lease, reason=EndReason.EXPIRED)
    assert leases.view(SLOT).epoch > lease.epoch
    assert leases.view(SLOT).lease is None


def allotted(number: int, misses: float) -> Allotment:
    return Allotment(number=number, misses=misses, budget=100.0, spent=0.0)


def test_a_lease_has_the_newest_allotment_and_a_late_one_changes_nothing(
    leases: LeaseTable,
) -> None:
    wanted = structs.replace(request("r1"), allotment=allotted(4, 9.0))
    lease = granted(take(leases, wanted, now=0.0))
    for number, misses in ((6, 5.0), (5, 9.0), (6, 9.0)):
        renewal = LeaseRenewal(
            epoch=lease.epoch, duration_s=10.0, allotment=allotted(number, misses)
        )
        granted(leases.renew(lease.lease, renewal, now=1.0))
        assert leases.view(SLOT).allotment == allotted(6, 5.0)
    granted(leases.renew(lease.lease, LeaseRenewal(epoch=lease.epoch, duration_s=10.0), now=2.0))
    assert leases.view(SLOT).allotment == allotted(6, 5.0)
    assert leases.allotted_number(SLOT) == 6
    leases.release(lease.lease, now=3.0)
    assert leases.view(SLOT).allotment is None


def test_a_refused_request_uses_its_allotment_up(leases: LeaseTable) -> None:
    wanted = structs.replace(request("r1"), allotment=allotted(1, 9.0))
    leases.offer(SLOT, SlotState.OFF, "because")
    assert isinstance(take(leases, wanted, now=0.0), LeaseRefused)
    assert leases.allotted_number(SLOT) == 1
    leases.offer(SLOT, SlotState.OFFERED)
    late = take(leases, wanted, now=1.0)
    assert isinstance(late, LeaseRefused)
    assert "allotment" in late.reason


def test_no_allotment_uses_the_numbers_of_later_ones_up(leases: LeaseTable) -> None:
    last = structs.replace(request("r1"), allotment=allotted((1 << 53) - 1, 9.0))
    refused = take(leases, last, now=0.0)
    assert isinstance(refused, LeaseRefused)
    assert "allotment" in refused.reason
    lease = granted(
        take(leases, structs.replace(request("r2"), allotment=allotted(3, 9.0)), now=0.0)
    )
    renewal = LeaseRenewal(
        epoch=lease.epoch, duration_s=10.0, allotment=allotted((1 << 53) - 1, 99.0)
    )
    granted(leases.renew(lease.lease, renewal, now=1.0))
    assert leases.view(SLOT).allotment == allotted(3, 9.0)


def test_releasing_twice_answers_the_same(leases: LeaseTable) -> None:
    lease = granted(take(leases, request("r1"), now=0.0))
    first = leases.release(lease.lease, now=1.0)
    assert first.reason is EndReason.RELEASED
    assert leases.release(lease.lease, now=2.0) == first


def test_a_renewal_under_a_wrong_epoch_prolongs_nothing(leases: LeaseTable) -> None:
    lease = granted(take(leases, request("r1"), now=0.0))
    stale = LeaseRenewal(epoch=Epoch(lease.epoch - 1), duration_s=10)
    assert isinstance(leases.renew(lease.lease, stale, now=5.0), LeaseEnded)
    leases.expire(now=10.0)
    assert leases.view(SLOT).lease is None


def test_a_revoked_lease_runs_to_its_deadline_and_is_not_renewed(leases: LeaseTable) -> None:
    lease = granted(take(leases, request("r1"), now=0.0))
    ended = leases.end(lease.lease, EndReason.DRAIN, deadline_s=3.0, now=1.0)
    assert ended.deadline_s == 3.0
    answer = leases.renew(lease.lease, LeaseRenewal(epoch=lease.epoch, duration_s=10), now=2.0)
    assert answer == LeaseEnded(lease=lease.lease, reason=EndReason.DRAIN, deadline_s=2.0)
    assert leases.view(SLOT).ending
    leases.expire(now=4.0)
    assert [reason for _, reason in leases.take_ended()] == [EndReason.DRAIN]


def test_a_held_lease_is_renewed_for_two_minutes_and_names_the_order_meanwhile(
    leases: LeaseTable,
) -> None:
    """A gateway from before the order renews as if there were none."""
    lease = granted(take(leases, request("r1"), now=0.0))
    renewal = LeaseRenewal(epoch=lease.epoch, duration_s=10)
    for now in range(1, 125):
        if now >= 5:
            leases.stop(SLOT, "hold by alice", now=now)
        granted(leases.renew(lease.lease, renewal, now=now))
        leases.offer(SLOT, SlotState.OFFERED, "clear")
        reason = "hold by alice" if now >= 5 else "clear"
        assert leases.entry(SLOT)[:2] == (SlotState.LEASED, reason)
    ended = leases.renew(lease.lease, renewal, now=125)
    assert ended == LeaseEnded(lease=lease.lease, reason=EndReason.DRAIN, deadline_s=9.0)
    leases.expire(now=134)
    assert [reason for _, reason in leases.take_ended()] == [EndReason.DRAIN]


def test_an_order_that_was_lifted_in_time_ends_no_lease(leases: LeaseTable) -> None:
    lease = granted(take(leases, request("r1"), now=0.0))
    renewal = LeaseRenewal(epoch=lease.epoch, duration_s=10)
    for now in range(1, 240):
        leases.stop(SLOT, "hold" if now != 115 else "", now=now)
        if now < 235:
            granted(leases.renew(lease.lease, renewal, now=now))
    assert isinstance(leases.renew(lease.lease, renewal, now=239), LeaseEnded)


def recorded_by(leases: LeaseTable, slot: SlotId = SLOT) -> SlotLease:
    lease = leases.live(slot)
    assert lease is not None
    return lease


def test_a_successor_goes_on_with_the_recorded_lease_its_tenant_and_its_job(
    leases: LeaseTable,
) -> None:
    first = granted(take(leases, request("r1"), now=0.0))
    heir = LeaseTable(node=NodeId("node"), ttl_s=10.0)
    heir.add_slot(SLOT, epoch=first.epoch, recorded=recorded_by(leases))
    view = heir.view(SLOT)
    assert (view.epoch, view.tenant, view.job) == (first.epoch, "tenant", "job-a")
    renewed = granted(heir.renew(first.lease, LeaseRenewal(epoch=first.epoch, duration_s=5), now=1))
    assert (renewed.lease, renewed.slot) == (first.lease, SLOT)
    again = granted(take(heir, request("r1"), now=2.0))
    assert again.lease == first.lease


@pytest.mark.parametrize(("page", "then"), [(0, 8), (6, 8), (8, 8), (11, 11)])
def test_a_record_of_another_epoch_than_the_pages_is_a_lease_that_is_over(
    page: int, then: int
) -> None:
    heir = LeaseTable(node=NodeId("node"), ttl_s=10.0)
    over = SlotLease(
        lease=LeaseId("l"),
        slot=SLOT,
        tenant=TenantId("t"),
        job=JobId("j"),
        epoch=Epoch(7),
        request_id="r",
        ends_s=10.0,
    )
    heir.add_slot(SLOT, epoch=Epoch(page), recorded=over)
    assert (heir.view(SLOT).lease, heir.view(SLOT).epoch) == (None, then)
    assert heir.take_ended() == ((over, EndReason.EXPIRED),), "the audit has its end too"
    answer = heir.renew(LeaseId("l"), LeaseRenewal(epoch=Epoch(7), duration_s=10), now=1.0)
    assert answer == LeaseEnded(lease=LeaseId("l"), reason=EndReason.UNKNOWN)


def test_a_guessed_epoch_gets_and_ends_nothing(leases: LeaseTable) -> None:
    lease = granted(take(leases, request("r1"), now=0.0))
    renewal = LeaseRenewal(epoch=lease.epoch, duration_s=10)
    for guess in ("slot0.1", "node.slot0.1", leases.view(SLOT).lease or "", lease.lease[:-1]):
        assert isinstance(leases.renew(LeaseId(guess), renewal, now=1.0), LeaseEnded)
        assert leases.release(LeaseId(guess), now=1.0).reason is EndReason.UNKNOWN
    assert recorded_by(leases).lease == lease.lease
    empty = LeaseTable(node=NodeId("node"), ttl_s=10.0)
    empty.add_slot(SLOT, epoch=lease.epoch)
    assert isinstance(empty.renew(lease.lease, renewal, now=1.0), LeaseEnded)


def test_a_grant_that_is_withdrawn_leaves_the_slot_free_under_a_raised_epoch(
    leases: LeaseTable,
) -> None:
    lease = granted(take(leases, request("r1"), now=0.0))
    refused = leases.withdraw(lease, "no record")
    assert (refused.slot, refused.reason) == (SLOT, "no record")
    assert leases.live(SLOT) is None
    assert leases.take_ended() == ()
    again = granted(take(leases, request("r1"), now=1.0))
    assert again.epoch > lease.epoch
    assert again.lease != lease.lease


def test_a_caller_that_takes_and_releases_all_day_gets_a_bounded_number_of_leases(
    leases: LeaseTable,
) -> None:
    day_s, refused, taken, now = 86_400.0, 0, 0, 0.0
    while now < day_s:
        answer = take(leases, request(f"r{taken}.{now}"), now=now)
        if isinstance(answer, LeaseGranted):
            taken += 1
            leases.release(answer.lease, now=now)
            now += 0.01
        else:
            assert "too often" in answer.reason
            refused += 1
            now += answer.retry_after_s + 0.001
    assert 60 + day_s / 11 < taken <= 61 + day_s / 10
    # A caller that waits as it is told is granted the next time.
    assert refused <= taken
    leases.add_slot(SlotId("slot1"), epoch=Epoch(0))
    leases.offer(SlotId("slot1"), SlotState.OFFERED)
    granted(take(leases, request("other", slot=SlotId("slot1")), now=now))


def flood(leases: LeaseTable, tenants: list[str], *, until_s: float) -> int:
    """Leases that these tenants get of a slot that they take and release as fast as they can."""
    taken, now = 0, 0.0
    while now < until_s:
        answers = [
            take(leases, request(f"{tenant}.{now}", tenant=tenant), now=now) for tenant in tenants
        ]
        for answer in answers:
            if isinstance(answer, LeaseGranted):
                taken += 1
                leases.release(answer.lease, now=now)
        now += 0.1
    return taken


def test_a_tenant_that_floods_a_slot_shuts_out_no_other(leases: LeaseTable) -> None:
    flood(leases, ["flood"], until_s=600.0)
    refused = take(leases, request("f", tenant="flood"), now=600.0)
    assert isinstance(refused, LeaseRefused)
    assert "too often" in refused.reason
    for number in range(60):
        lease = granted(take(leases, request(f"r{number}", tenant="quiet"), now=600.0))
        leases.release(lease.lease, now=600.0)


def test_a_caller_that_invents_tenants_gets_a_bounded_number_of_leases(leases: LeaseTable) -> None:
    taken = flood(leases, [f"t{number}" for number in range(200)], until_s=600.0)
    assert taken <= 240 + 600 * 1.0 + 1
    assert len(leases._slots[SLOT].pace.tenants) <= 64


def test_a_lease_that_could_not_be_recorded_counts_as_none(leases: LeaseTable) -> None:
    for number in range(200):
        lease = granted(take(leases, request(f"r{number}"), now=0.0))
        leases.withdraw(lease, "no record")


def test_an_id_is_a_name_however_long_the_slots_is() -> None:
    leases = LeaseTable(node=NodeId("n" * 64), ttl_s=10.0)
    slot = SlotId("s" * 64)
    leases.add_slot(slot, epoch=Epoch(10**9))
    leases.offer(slot, SlotState.OFFERED)
    answer = leases.take(request("r", slot=slot), secret="f" * 32, now=0.0)
    assert is_name(granted(answer).lease)


def _fields() -> dict[str, object]:
    return {"request_id": "r", "slot": SLOT, "tenant": "t", "job": "j"}


class Holder:
    """A scheduler's view: it uses a lease only until its own, earlier, end."""

    def __init__(self, lease: LeaseGranted, ends_s: float) -> None:
        self.lease, self.ends_s = lease, ends_s


class LeaseMachine(RuleBasedStateMachine):
    """Calls whose request may be lost (no effect) or whose reply may (effect unknown to the
    caller), under agents that end at any moment and leave their pages and their records."""

    requests = Bundle("requests")
    SLOTS = tuple(SlotId(f"slot{number}") for number in range(4))

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.holders: dict[LeaseId, Holder] = {}
        self.granted_on: dict[LeaseId, tuple[SlotId, int]] = {}
        self.epochs = dict.fromkeys(self.SLOTS, 0)
        self.pages = dict.fromkeys(self.SLOTS, Epoch(0))
        self.records: dict[SlotId, SlotLease] = {}
        self.count = 0
        self.start()

    def start(self) -> None:
        self.leases = LeaseTable(node=NodeId("node"), ttl_s=10.0)
        for slot in self.SLOTS:
            left = self.records.get(slot)
            recorded = None if left is None else structs.replace(left, ends_s=self.now + 10.0)
            self.leases.add_slot(slot, epoch=self.pages[slot], recorded=recorded)
            self.leases.offer(slot, SlotState.OFFERED)

    def beat(self) -> None:
        """The agent's writes: records of ended leases go first, pages come after."""
        self.leases.expire(now=self.now)
        for slot in self.SLOTS:
            live = self.leases.live(slot)
            if slot in self.records and (live is None or live.lease != self.records[slot].lease):
                del self.records[slot]
            self.pages[slot] = self.leases.view(slot).epoch

    @rule(elapsed_s=st.floats(0.0, 6.0))
    def time_passes(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        self.beat()

    @rule(elapsed_s=st.floats(0.0, 3.0))
    def the_agent_is_killed_and_another_one_starts(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        self.start()

    @rule(
        target=requests,
        slot=st.sampled_from(SLOTS),
        job=st.sampled_from(["a", "b"]),
    )
    def compose(self, slot: SlotId, job: str) -> LeaseRequest:
        self.count += 1
        return request(f"r{self.count}", slot=slot, job=job)

    @rule(
        target=requests,
        wanted=consumes(requests),
        reply_lost=st.booleans(),
        written=st.sampled_from(["all", "record", "nothing"]),
    )
    def take(self, wanted: LeaseRequest, reply_lost: bool, written: str) -> object:
        """The agent dies before all its writes, or answers after them."""
        sent_s = self.now
        answer = take(self.leases, wanted, now=self.now)
        if isinstance(answer, LeaseGranted):
            self.granted_on[answer.lease] = (answer.slot, answer.epoch)
            live = self.leases.live(wanted.slot)
            assert live is not None
            if written != "nothing":
                self.records[wanted.slot] = live
            if written != "all":
                self.start()
                return wanted
            self.beat()
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
        answer = self.leases.renew(holder.lease.lease, renewal, now=self.now)
        if isinstance(answer, LeaseGranted):
            assert (answer.slot, answer.epoch) == (holder.lease.slot, holder.lease.epoch)
        if reply_lost:
            return
        if isinstance(answer, LeaseGranted):
            holder.ends_s = self.now + answer.duration_s
        else:
            del self.holders[holder.lease.lease]

    @rule(epoch=st.integers(0, 9), slot=st.sampled_from(SLOTS), data=st.data())
    def a_stranger_tries(self, epoch: int, slot: SlotId, data: st.DataObject) -> None:
        view = self.leases.view(slot)
        guess = data.draw(st.sampled_from([f"{slot}.{epoch}", view.lease or "x", f"n.{slot}.1"]))
        renewal = LeaseRenewal(epoch=Epoch(epoch), duration_s=10.0)
        before = {slot: self.leases.view(slot) for slot in self.SLOTS}
        assert isinstance(self.leases.renew(LeaseId(guess), renewal, now=self.now), LeaseEnded)
        self.leases.release(LeaseId(guess), now=self.now)
        self.leases.expire(now=self.now)
        assert before == {slot: self.leases.view(slot) for slot in self.SLOTS}

    @rule(data=st.data(), reply_lost=st.booleans(), written=st.booleans())
    def release(self, data: st.DataObject, reply_lost: bool, written: bool) -> None:
        if not self.holders:
            return
        lease = data.draw(st.sampled_from(sorted(self.holders)))
        # The holder stops using it before it releases it.
        self.holders[lease].ends_s = self.now
        self.leases.release(lease, now=self.now)
        if not written:
            self.start()
            return
        self.beat()
        if not reply_lost:
            del self.holders[lease]

    @rule(slot=st.sampled_from(SLOTS), state=st.sampled_from(SlotState))
    def offer_changes(self, slot: SlotId, state: SlotState) -> None:
        self.leases.offer(slot, state)

    @invariant()
    def no_two_holders_believe_in_one_slot(self) -> None:
        self.leases.expire(now=self.now)
        believed = [h.lease.slot for h in self.holders.values() if h.ends_s > self.now]
        assert len(believed) == len(set(believed))

    @invariant()
    def a_believed_lease_is_the_live_one_under_the_current_epoch(self) -> None:
        for lease, holder in self.holders.items():
            if holder.ends_s > self.now:
                live = self.leases.live(holder.lease.slot)
                assert live is not None
                assert (live.lease, live.epoch) == (lease, holder.lease.epoch)

    @invariant()
    def a_live_lease_is_on_the_slot_and_under_the_epoch_that_it_was_granted_for(self) -> None:
        for slot in self.SLOTS:
            live = self.leases.live(slot)
            if live is not None:
                assert self.granted_on[live.lease] == (slot, live.epoch)

    @invariant()
    def epochs_that_were_written_only_rise(self) -> None:
        for slot in self.SLOTS:
            assert self.pages[slot] >= self.epochs[slot]
            assert self.leases.view(slot).epoch >= self.epochs[slot]
            self.epochs[slot] = self.pages[slot]


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
