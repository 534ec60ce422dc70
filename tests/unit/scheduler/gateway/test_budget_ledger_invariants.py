"""The sum of allotments never exceeds a service's budget, whatever is lost, restarted or joins.

The agents' own objects (lease table, error budget) and the ledger with its rows in SQLite; only the
network and the faults are made up. Slots without proof slices: each miss is charged at once, so
that the charge is the truth.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from harvester.contracts.ids import Epoch, JobId, NodeId, SlotId, TenantId
from harvester.contracts.served import Served
from harvester.contracts.wire.error_budget import Allotment, BudgetReport
from harvester.contracts.wire.leases import LeaseGranted, LeaseRenewal, LeaseRequest, SlotState
from harvester.policy.budget import BudgetState, ErrorBudget
from harvester.policy.lease_table import LeaseTable
from harvester.policy.settings import BudgetSettings
from scheduler.gateway.gateway_state import SchedulerState

SLOT = SlotId("slot")
SETTINGS = BudgetSettings(slo_target_ratio=0.5, share_ratio=1.0, minimum_misses=10, hold_s=0.0)
STEP = 0.25
"""Misses at once: a slot stops at most so far beyond its limit."""
LIVES = 12


@dataclass
class Node:
    life: str
    run: int = 1
    served: Served = field(default_factory=Served)
    budget: ErrorBudget = field(default_factory=lambda: ErrorBudget(SETTINGS, proven=False))
    held: LeaseGranted | None = None
    """The scheduler's lease."""

    def __post_init__(self) -> None:
        self._serve(Epoch(0))

    def _serve(self, epoch: Epoch, recorded: Any = None) -> None:
        self.leases = LeaseTable(node=NodeId("n"), ttl_s=10.0)
        self.leases.add_slot(SLOT, epoch=epoch, recorded=recorded)
        self.leases.offer(SLOT, SlotState.OFFERED)

    def restart(self, now: float) -> None:
        live = self.leases.live(SLOT)
        kept = (
            None
            if live is None
            else msgspec.structs.replace(live, ends_s=now + 10.0, allotment=None)
        )
        self._serve(self.leases.view(SLOT).epoch, kept)
        kept_state = msgspec.msgpack.encode(self.budget.state)
        state = msgspec.msgpack.decode(kept_state, type=BudgetState)
        state.limit = None
        self.budget = ErrorBudget(SETTINGS, state, proven=False)
        self.run, self.served = self.run + 1, Served()

    def observe(self, served: Served, now: float) -> bool:
        self.leases.expire(now=now)
        view = self.leases.view(SLOT)
        self.served += served
        return self.budget.observe(
            served, now=now, leased=view.lease is not None, allotment=view.allotment
        )

    def spend(self, misses: float, now: float) -> None:
        while misses > 0:
            stopped = self.observe(Served(), now)
            if stopped or self.leases.live(SLOT) is None or self.budget.state.limit is None:
                return
            self.observe(Served(misses=STEP), now)
            misses -= STEP

    @property
    def may_spend(self) -> float:
        return max(self.budget.spent, self.budget.state.limit or 0.0)

    def report(self) -> BudgetReport:
        leased = self.leases.live(SLOT) is not None
        return BudgetReport(
            service="service",
            life=self.life,
            run=self.run,
            served=self.budget.evidence(self.served),
            charged=self.budget.spent,
            number=self.leases.allotted_number(SLOT),
            limit=self.budget.limit if leased else None,
            allowed_ratio=self.budget.allowed_ratio,
            minimum_misses=SETTINGS.minimum_misses,
        )


NODES = st.integers(0, 1)
FATES = st.sampled_from(["arrives", "reply lost", "lost", "late", "late", "twice"])


class Fleet(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now, self.asked = 0.0, 0
        self.state = SchedulerState(None)
        self.ledger, _ = self.state.budgets()
        self.nodes = [Node("life0"), Node("life1")]
        self.dead: list[Node] = []
        self.copies: dict[str, tuple[int, bytes]] = {}
        self.copied = 0.0
        self.late: list[tuple[Node, LeaseTable, str, Any]] = []

    @rule(node=NODES, requests=st.integers(0, 200))
    def serve(self, node: int, requests: int) -> None:
        self.nodes[node].observe(Served(requests=requests), self.now)

    @rule(seconds=st.floats(0.1, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes:
            node.observe(Served(), self.now)

    @rule(node=NODES, twice=st.booleans())
    def poll(self, node: int, twice: bool) -> None:
        found = self.nodes[node]
        found.observe(Served(), self.now)
        for _ in range(1 + twice):
            epoch = found.leases.view(SLOT).epoch
            self.ledger.observe(found.report(), slot="n.slot", epoch=epoch, now=self.now)

    @rule(requests=st.integers(0, 100))
    def harvest(self, requests: int) -> None:
        """All goes well for a second."""
        for number, node in enumerate(self.nodes):
            node.observe(Served(requests=requests), self.now)
            self.poll(number, twice=False)
            (self.take if node.leases.live(SLOT) is None else self.renew)(number, "arrives")
            self.poll(number, twice=False)

    def allot(self, node: Node, epoch: Epoch | None) -> Allotment | None:
        allotment = self.ledger.allot("service", node.life, epoch=epoch, now=self.now)
        self.state.keep_budgets(self.ledger, at_s=self.now)
        return allotment

    @rule(node=NODES, fate=FATES)
    def take(self, node: int, fate: str) -> None:
        found = self.nodes[node]
        allotment = self.allot(found, None)
        if allotment is None:
            return
        self.asked += 1
        request = LeaseRequest(
            request_id=f"r{self.asked}", slot=SLOT, tenant=TenantId("t"), job=JobId("j"),
            duration_s=10.0, allotment=allotment,
        )  # fmt: skip
        self.send(found, fate, "take", request)

    @rule(node=NODES, fate=FATES)
    def renew(self, node: int, fate: str) -> None:
        found = self.nodes[node]
        if found.held is None:
            return
        epoch = found.held.epoch
        allotment = self.allot(found, epoch)
        renewal = LeaseRenewal(epoch=epoch, duration_s=10.0, allotment=allotment)
        self.send(found, fate, "renew", (found.held.lease, renewal))

    def send(self, node: Node, fate: str, call: str, body: Any) -> None:
        if fate == "late":
            self.late.append((node, node.leases, call, body))
        for _ in range({"lost": 0, "late": 0, "twice": 2}.get(fate, 1)):
            reply = self.handle(node, call, body)
            if isinstance(reply, LeaseGranted) and fate != "reply lost":
                node.held = reply

    def handle(self, node: Node, call: str, body: Any) -> Any:
        if call == "take":
            answer: Any = node.leases.take(body, secret="s" * 8, now=self.now)
        else:
            answer = node.leases.renew(*body, now=self.now)
        node.observe(Served(), self.now)
        return answer

    @precondition(lambda self: self.late)
    @rule(place=st.integers(0, 50))
    def arrive_late(self, place: int) -> None:
        node, leases, call, body = self.late.pop(place % len(self.late))
        if node.leases is leases:
            self.handle(node, call, body)

    @rule(node=NODES)
    def release(self, node: int) -> None:
        found = self.nodes[node]
        if found.held is not None:
            found.leases.release(found.held.lease, now=self.now)
            found.observe(Served(), self.now)
            found.held = None

    @rule(node=NODES, misses=st.floats(0.0, 100.0))
    def spend(self, node: int, misses: float) -> None:
        self.nodes[node].spend(misses, self.now)

    @rule(node=NODES)
    def restart_agent(self, node: int) -> None:
        self.nodes[node].restart(self.now)

    @precondition(lambda self: len(self.dead) < LIVES)
    @rule(node=NODES, misses=st.floats(0.0, 100.0))
    def lose_disk(self, node: int, misses: float) -> None:
        self.nodes[node].spend(misses, self.now)
        self.dead.append(self.nodes[node])
        self.nodes[node] = Node(f"life{2 + len(self.dead)}")

    @rule(node=NODES)
    def copy_disk(self, node: int) -> None:
        found = self.nodes[node]
        self.copies[found.life] = found.run, msgspec.msgpack.encode(found.budget.state)

    @precondition(lambda self: len(self.dead) < LIVES)
    @rule(node=NODES)
    def roll_back(self, node: int) -> None:
        """The disk is an earlier copy again; the lease goes on. A poll comes before, and one at
        once: what is spent between polls is lost as in a crash."""
        found = self.nodes[node]
        if found.life not in self.copies:
            return
        self.poll(node, twice=False)
        run, kept = self.copies[found.life]
        again = Node(found.life, run=run)
        again.leases, again.held = found.leases, found.held
        again.budget = ErrorBudget(
            SETTINGS, msgspec.msgpack.decode(kept, type=BudgetState), proven=False
        )
        again.restart(self.now)
        # Charges of the copy were charged once.
        self.copied += again.budget.spent
        self.dead.append(found)
        self.nodes[node] = again
        self.poll(node, twice=False)

    @rule()
    def restart_scheduler(self) -> None:
        self.state.keep_budgets(self.ledger, at_s=self.now)
        self.ledger, at_s = self.state.budgets()
        assert at_s == self.now

    @invariant()
    def allotments_fit_into_the_budget(self) -> None:
        if not hasattr(self, "nodes"):
            return
        whole = self.ledger.budget("service", now=self.now)
        spent = sum(node.budget.spent for node in self.dead) - self.copied
        allotted = sum(node.may_spend for node in self.nodes)
        # A restarted agent's lease allows what was spent before, until it is renewed: with a hold
        # of 0 s, each run of an agent stops one step beyond its limit.
        runs = sum(node.run for node in [*self.nodes, *self.dead])
        assert spent + allotted <= max(whole.budget, 10.0) + runs * STEP + 1e-6


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_renewals_of_an_overdrawn_budget_allow_nothing_more() -> None:
    fleet = Fleet()
    fleet.begin()
    fleet.harvest(requests=0)
    fleet.harvest(requests=1)
    fleet.lose_disk(misses=11.0, node=0)
    for _ in range(10):
        fleet.harvest(requests=0)
        for node in (0, 1):
            fleet.spend(node=node, misses=1.0)
    assert [node.budget.spent for node in fleet.nodes] == [STEP, STEP]
