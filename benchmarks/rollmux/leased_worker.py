"""A simulated job's process whose rollouts use leased slots beside their nodes, and at their tail
may use them alone.

The slots' headroom is the truth, second by second; the policy that ships with the job,
`scheduler.rollmux.permits.leased_tail`, chooses the tail's place. A bulk has sequences for all
slots; a tail waits for its longest ones, so that more slots than it needs make it no faster.
"""

from math import ceil

from benchmarks.rollmux.lease_supply import HeadroomRecord, LeaseTerms
from harvester.contracts.ids import NodeId
from scheduler.model import PhaseKind
from scheduler.rollmux.permits.leased_tail import BULK_RATIO, LeasedTail, TailState, taken_off_s
from scheduler.sim.rollmux.worker import ROUNDING_S, Worker, WorkerStage
from scheduler.sim.rollmux.workload import SimulatedJob, World


class LeasedWorker(Worker):
    def __init__(
        self, one: SimulatedJob, world: World, *, terms: LeaseTerms, record: HeadroomRecord
    ) -> None:
        super().__init__(one, world)
        self.tail = LeasedTail(leases=True)
        self.slots = 0
        self.slots_coming = 0
        self.slots_ready_s = 0.0
        self.offset_s = 0.0
        """Second of the record at which its group's time begins."""
        self.published_s = 0.0
        """Time at which its present weights were published for slots."""
        self.is_narrowing = False
        """Brings its tail together or away, and gets no slots meanwhile."""
        self.is_asked_away = False
        """Its permit asks for all of its nodes; it leaves them once guests serve it."""
        self.has_lost_kv = False
        """Whether its tail has lost the KV, with the slots that it ran on."""
        self.has_poll_due = False
        """A poll of its tail policy is due."""
        self.slot_s = 0.0
        """Slot seconds that it held."""
        self.given_node_s = 0.0
        """Node seconds of work that they gave."""
        self._terms = terms
        self._record = record
        self._began_s = 0.0
        self._leased_s = 0.0
        """Solo seconds of the present rollout that slots did."""
        self._is_bulk_measured = False

    @property
    def is_away(self) -> bool:
        return self.tail.state in (TailState.AWAY, TailState.IN_LINE)

    @property
    def node_count(self) -> int:
        return self.one.job.phases[0].nodes

    @property
    def tail_slots(self) -> int:
        """Number of slots for its tail at full headroom."""
        return ceil(self._tail_share * self._terms.accelerators * self.node_count - 1e-6)

    @property
    def synced_s(self) -> float:
        """Time at which every slot may hold its present weights."""
        return self.published_s + self._terms.sync_s

    @property
    def takes_slots_for_its_bulk(self) -> bool:
        rolls_out = self.stage is WorkerStage.RUNNING and self.kind is PhaseKind.ROLLOUT
        return rolls_out and not self.is_away and not self.is_narrowing and self.is_in_bulk

    def begin(
        self, nodes: tuple[NodeId, ...], *, loading_s: float, share: float, now: float
    ) -> None:
        super().begin(nodes, loading_s=loading_s, share=share, now=now)
        self.tail = LeasedTail(leases=True)
        self.leased_s = self._leased_s = 0.0
        self._is_bulk_measured = False
        self.is_narrowing = self.is_asked_away = self.has_lost_kv = False
        self._began_s = now + loading_s

    def work_until(self, now: float) -> None:
        self.slot_s += (self.slots + self.slots_coming) * (now - self._at_s)
        super().work_until(now)

    def next_s(self) -> float:
        next_s = super().next_s()
        return min(next_s, self.slots_ready_s) if self.slots_coming else next_s

    def take_ready_slots(self, *, now: float) -> None:
        if self.slots_coming and self.slots_ready_s <= now:
            self.slots, self.slots_coming = self.slots + self.slots_coming, 0

    def resize(self, target: int, *, recompute: bool, now: float) -> None:
        """Changes a bulk's slots: some go at once, others wake up; work on the leaving ones moves
        home."""
        have, terms = self.slots, self._terms
        if have + self.slots_coming < target:
            self.slots_coming = target - have
            self.slots_ready_s = max(now + terms.activation_s, self.synced_s)
            return
        self.slots_coming = max(0, target - have)
        if have > target:
            move_s = terms.recomputed_s if recompute else terms.move_s
            whole = have + terms.accelerators * self.node_count
            self.overhead_s += move_s * (have - target) / whole
            self.slots = target

    def end_bulk(self) -> None:
        """Brings work on slots home at the end of the bulk, where the whole tail has room."""
        if self.slots and self.left_s > ROUNDING_S:
            self.overhead_s += self._terms.move_s
        self.drop_slots()

    def drop_slots(self) -> None:
        self.slots = self.slots_coming = 0

    def leave_nodes(self) -> None:
        """Leaves its nodes for slots, where its tail goes on."""
        self.share, self.is_narrowing, self.is_asked_away = 0.0, False, False
        self.overhead_s += self._terms.activation_s + self._terms.move_s

    def come_home(self, *, loading_s: float) -> None:
        """Comes home from slots, or from a state without any KV."""
        moved_s = self._terms.move_s if self.slots else self._terms.recomputed_s
        self.overhead_s += loading_s + moved_s
        self.drop_slots()

    def take_tail_slots(self, slots: int) -> None:
        """Gives slots to a tail that is away; with 0 it goes on without progress."""
        if slots and self.has_lost_kv:
            self.overhead_s += self._terms.activation_s + self._terms.recomputed_s
        self.slots, self.has_lost_kv = slots, slots == 0

    def measure_bulk(self, *, now: float) -> None:
        """Measures, once the rollout is in its tail or over, the time that leases saved."""
        if self._is_bulk_measured:
            return
        self._is_bulk_measured = True
        bulk_s = min(self.worked_s, self._bulk_ratio * self.length_s)
        # A tail makes fewer tokens in a second, by the share that it needs.
        tokens = bulk_s + (self.worked_s - bulk_s) * self._tail_share
        if tokens > 0.0:
            leased_ratio = self._leased_s / tokens
            self.leased_s = taken_off_s(now - self._began_s, leased_ratio=leased_ratio)

    def end_rollout(self, *, now: float) -> None:
        self.measure_bulk(now=now)
        self.tail.end(now=now)
        self.loading_s += sum(tail.in_line_s for tail in self.tail.tails)

    @property
    def is_known_to_be_in_its_tail(self) -> bool:
        return self.reported_ratio >= BULK_RATIO

    @property
    def _is_slower_or_faster(self) -> bool:
        return super()._is_slower_or_faster or self.slots + self.slots_coming > 0

    @property
    def _leased_speed(self) -> float:
        """Solo seconds in a second, which its slots would add at full headroom."""
        if not self.slots:
            return 0.0
        if self.is_away:
            return min(1.0, self.slots / self.tail_slots)
        return self.slots / (self._terms.accelerators * self.node_count)

    def _done_s(self, works_s: float) -> float:
        own_s, leased = super()._done_s(works_s), self._leased_speed
        if not leased or not works_s:
            return own_s
        until_s = self._at_s + self.offset_s
        leased_s = leased * self._record.given(until_s - works_s, until_s)
        self.given_node_s += leased_s * self.node_count
        self._leased_s += leased_s
        return own_s + leased_s

    def _takes_s(self, left_s: float) -> float:
        own, leased = self._speed(), self._leased_speed
        if leased:
            from_s = self._at_s + self.overhead_s + self.offset_s
            return self._record.takes_s(left_s, from_s=from_s, own=own, leased=leased)
        return left_s / own if own else float("inf")
