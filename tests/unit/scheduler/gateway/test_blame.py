"""Blame for dead engines: at most two die of one request, and its neighbours all end.

The runner, routing and blame that ship, on engines in memory: no socket, no sleep.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harvester.contracts.clock import Clock, MonotonicClock
from harvester.contracts.ids import EngineId, Epoch, JobId, SlotId, TrajectoryId
from harvester.contracts.wire.engines import EngineDescription
from harvester.contracts.wire.rollouts import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
)
from scheduler.decision_log import DecisionLog
from scheduler.gateway import attempt_runner
from scheduler.gateway.dispatch import Dispatcher
from scheduler.gateway.engine_fleet import EngineFleet
from scheduler.gateway.engine_probing import EngineProbing
from scheduler.gateway.engines.engine_faults import (
    EngineLost,
    EngineUnreachable,
    RequestFailed,
    RequestRefused,
)
from scheduler.gateway.engines.identity import Change
from scheduler.gateway.engines.stream import EngineChoice, _Logprobs
from scheduler.gateway.gateway_metrics import GatewayMetrics
from scheduler.gateway.policy import repeated_deaths
from scheduler.gateway.policy.attempt import Attempt
from scheduler.gateway.policy.blame import (
    CLEARED_TOKENS,
    COMMON_CAUSE_S,
    HELD_S,
    KILLS_WITHIN_S,
    QUARANTINE_S,
    QUIET_S,
    BlamePolicy,
    RequestOnEngine,
)
from scheduler.gateway.policy.routing import RoutingPolicy
from scheduler.gateway.policy.routing_events import Refusal, RefuseTurn, RoutingConfig
from scheduler.gateway.policy.turn import Turn
from scheduler.gateway.policy.turn_ledger import TurnLedger
from scheduler.gateway.policy.versions import VersionPolicy
from scheduler.gateway.policy.versions_events import JobActivated
from scheduler.gateway.request_blame import RequestBlame
from scheduler.gateway.settings import Timeouts
from scheduler.gateway.turn_runner import TurnRunner
from scheduler.model import Engine, EngineKind
from tests.unit.scheduler.gateway.registry import registry_of

JOB = JobId("job")
A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


def failed(policy: BlamePolicy, engine: EngineId, *requests: str, now: float = 0.0) -> None:
    policy.failed(engine, requests, reason="gone", now=now)


def test_two_engines_that_die_under_one_request_quarantine_it_with_both_reasons() -> None:
    policy = BlamePolicy()
    failed(policy, A, "bad", "good")
    assert policy.suspected("bad", now=0)
    assert not policy.quarantined("bad", now=0)
    policy.placed("bad", B)
    failed(policy, B, "bad", "neighbour")
    told = policy.quarantined("bad", now=0)
    assert "a (gone)" in told
    assert "b (gone)" in told
    assert not policy.quarantined("good", now=0)
    assert policy.suspected("neighbour", now=0), "for the first time"


def test_a_bystander_is_cleared_by_what_it_makes_elsewhere_and_not_blamed_for_the_next_death() -> (
    None
):
    policy = BlamePolicy()
    failed(policy, A, "bystander")
    policy.placed("bystander", B)
    policy.served("bystander", B)
    assert not policy.suspected("bystander", now=0)
    failed(policy, B, "bystander")
    assert not policy.quarantined("bystander", now=0)


def test_a_suspect_that_was_moved_before_its_trial_ended_is_tried_again() -> None:
    policy = BlamePolicy()
    failed(policy, A, "r")
    policy.placed("r", B)
    policy.left("r", B)
    failed(policy, B, "r")
    assert not policy.quarantined("r", now=0), "it was not on it"
    policy.placed("r", C)
    failed(policy, C, "r")
    assert policy.quarantined("r", now=0)


def test_a_quarantine_ends() -> None:
    policy = BlamePolicy()
    failed(policy, A, "r")
    policy.placed("r", B)
    failed(policy, B, "r", now=5.0)
    assert policy.quarantined("r", now=QUARANTINE_S + 4)
    assert not policy.quarantined("r", now=QUARANTINE_S + 6)
    assert policy.idle


def died(
    policy: BlamePolicy,
    engine: EngineId,
    *requests: str,
    now: float,
    age_s: float = 0.0,
    tokens: int = 0,
    proven: bool = True,
) -> None:
    ran = [RequestOnEngine(one, age_s=age_s, tokens=tokens) for one in requests]
    policy.died(engine, ran, reason="gone", now=now, proven=proven)


@pytest.mark.parametrize(("age_s", "tokens"), [(KILLS_WITHIN_S * 1.1, 0), (0.1, 1)])
def test_an_engine_that_dies_later_than_a_request_kills_shows_nothing(
    age_s: float, tokens: int
) -> None:
    policy = BlamePolicy(held_s=0)
    died(policy, A, "r", now=0)
    for round_ in range(1, 6):
        policy.placed("r", B)
        died(policy, B, "r", now=round_, age_s=age_s, tokens=tokens)
        assert not policy.quarantined("r", now=round_)


def test_a_prompt_that_waited_long_for_its_first_token_is_no_suspect() -> None:
    policy = BlamePolicy()
    died(policy, A, "r", now=0, age_s=KILLS_WITHIN_S * 1.1)
    assert policy.idle


def test_on_slow_engines_a_first_step_is_longer() -> None:
    """A killer that a slow engine reached after a second would else be cleared by its second kill,
    and its bystanders blamed for its third."""
    policy = BlamePolicy(held_s=0)
    policy.died(A, [RequestOnEngine("r", 1.1, 0, usual_first_token_s=0.6)], reason="gone", now=0)
    policy.placed("r", B)
    policy.died(B, [RequestOnEngine("r", 1.1, 0, usual_first_token_s=0.6)], reason="gone", now=60)
    assert policy.quarantined("r", now=60)


def test_no_trial_begins_while_engines_die() -> None:
    policy = BlamePolicy()
    died(policy, A, "r", now=0)
    died(policy, B, "other", now=0.75)
    assert policy.trial_in_s("r", now=1) == pytest.approx(0.75 + QUIET_S - 1)
    assert policy.trial_in_s("r", now=0.75 + QUIET_S) == 0
    assert policy.trial_in_s("unsuspected", now=0.75) == 0


def test_a_suspect_shuns_the_engine_that_failed_under_it_for_a_while() -> None:
    policy = BlamePolicy()
    died(policy, A, "r", now=1)
    assert policy.shunned("r", now=1) == {A: 1 + HELD_S}
    assert policy.shunned("r", now=1 + HELD_S) == {}
    assert policy.shunned("other", now=1) == {}


@pytest.mark.parametrize("without_it_s", [-10.0, 2.0, 5.0 + HELD_S / 2])
def test_a_request_is_excused_once_where_an_engine_dies_without_it(
    without_it_s: float,
) -> None:
    policy = BlamePolicy()
    deaths = [(0.0, A, "r"), (5.0, B, "r"), (without_it_s, C, "other")]
    for at_s, engine, request in sorted(deaths):
        policy.placed(request, engine)
        died(policy, engine, request, now=at_s)
    assert not policy.quarantined("r", now=6 + HELD_S)
    assert policy.suspected("r", now=6 + HELD_S)
    policy.placed("r", A)
    died(policy, A, "r", now=20)
    assert policy.trial_in_s("r", now=20) == HELD_S
    assert policy.quarantined("r", now=20 + HELD_S), "once"


@pytest.mark.parametrize("without_it_s", [-COMMON_CAUSE_S - 1, 5.1 + HELD_S])
def test_a_request_is_judged_when_no_other_engine_died_about_then(
    without_it_s: float,
) -> None:
    policy = BlamePolicy()
    for at_s, engine, request in sorted([(0.0, A, "r"), (5.0, B, "r"), (without_it_s, C, "x")]):
        if at_s > 5:
            assert policy.quarantined("r", now=at_s)
        policy.placed(request, engine)
        died(policy, engine, request, now=at_s)
    assert policy.quarantined("r", now=5 + HELD_S)


def on_trial(policy: BlamePolicy, *, first: bool = True, second: bool = True) -> None:
    """`r` was on A, which failed at 0 s, and on trial on B, which failed at 5 s; proven or not."""
    died(policy, A, "r", now=0, proven=first)
    policy.placed("r", B)
    died(policy, B, "r", now=5, proven=second)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_a_request_is_refused_only_for_engines_that_are_known_to_have_died(
    first: bool, second: bool
) -> None:
    policy = BlamePolicy()
    on_trial(policy, first=first, second=second)
    assert policy.trial_in_s("r", now=5) == HELD_S
    assert bool(policy.quarantined("r", now=5 + HELD_S)) == (first and second)
    assert policy.suspected("r", now=5 + HELD_S) == (not (first and second))
    assert policy.trial_in_s("r", now=5 + HELD_S) == 0, "it is tried again"


@pytest.mark.parametrize(("engine", "first"), [(A, False), (B, True)])
def test_an_engine_that_was_silent_and_lives_is_no_strike(engine: EngineId, first: bool) -> None:
    policy = BlamePolicy()
    on_trial(policy, first=first, second=not first)
    policy.proved(engine, dead=False, now=6)
    assert policy.suspected("r", now=6), "one engine did die under it"
    assert policy.trial_in_s("r", now=6) == 0
    assert not policy.quarantined("r", now=6 + HELD_S)
    policy.placed("r", C)
    died(policy, C, "r", now=20)
    assert "c (gone)" in policy.quarantined("r", now=20 + HELD_S)


def test_a_silence_alone_that_ends_clears_the_request() -> None:
    policy = BlamePolicy()
    died(policy, A, "r", now=0, proven=False)
    assert policy.suspected("r", now=1), "it shares no engine with others meanwhile"
    policy.proved(A, dead=False, now=2)
    assert policy.idle


def test_a_silence_that_nothing_explains_in_time_makes_no_suspect_but_of_a_request_on_trial() -> (
    None
):
    policy = BlamePolicy()
    died(policy, A, "waiting", "begun", "struck", now=0, proven=False)
    died(policy, C, "known", now=0)
    assert policy.suspected("waiting", now=HELD_S * 0.99)
    policy.placed("begun", B)
    policy.placed("struck", B)
    died(policy, B, "struck", now=1, proven=False)
    late = 1 + 2 * HELD_S
    assert not policy.quarantined("struck", now=late)
    assert not policy.suspected("waiting", now=late)
    assert all(policy.suspected(one, now=late) for one in ("begun", "struck", "known"))
    policy.proved(A, dead=True, now=late)
    assert not policy.suspected("waiting", now=late), "its turns have gone on long ago"


def test_a_silent_engine_that_proves_dead_before_the_verdict_counts() -> None:
    policy = BlamePolicy()
    on_trial(policy, first=False, second=False)
    policy.proved(A, dead=True, now=6)
    policy.proved(B, dead=True, now=7)
    assert not policy.quarantined("r", now=7)
    assert policy.quarantined("r", now=5 + HELD_S)


def test_only_a_death_excuses_a_request_that_was_elsewhere() -> None:
    policy = BlamePolicy()
    on_trial(policy)
    died(policy, C, "other", now=6, proven=False)
    assert policy.trial_in_s("r", now=6) == HELD_S - 1, "not excused"
    policy.proved(C, dead=True, now=7)
    assert not policy.quarantined("r", now=6 + HELD_S)


def test_a_request_that_an_engine_fails_waits_for_the_fate_of_a_silent_one() -> None:
    policy = BlamePolicy()
    died(policy, A, "r", now=0, proven=False)
    policy.placed("r", B)
    failed(policy, B, "r", now=1)
    assert not policy.quarantined("r", now=1)
    policy.proved(A, dead=True, now=2)
    assert policy.quarantined("r", now=1 + HELD_S)


@dataclass(eq=False)
class Client:
    """An engine that dies of a request with its first token in `poison`, at that many tokens."""

    poison: dict[int, int]
    answers: dict[int, str] = field(default_factory=dict)
    """First tokens of requests that it answers with a failure while it stays well."""
    life: int = 0
    dead: bool = False
    gone: bool = False
    deaths: int = 0
    visits: list[int] = field(default_factory=list)
    served_life: int = 0
    state_hash: str = ""
    vocabulary: int = 0
    slow: int = 0
    """Steps before its first token."""
    silences: list[Change] = field(default_factory=list)
    """Changes that its next deaths or broken streams show at first."""
    breaks: int = 0
    """Streams to come that break before a token."""
    gathers: int = 0
    """Streams that must have come before it makes a token."""

    async def generate(
        self,
        attempt: Attempt,
        *,
        request_id: str,
        epoch: Epoch | None,
        priority: int = 0,
        ended: Sequence[str] = (),
        wait_s: Callable[[], float] = float,
    ) -> AsyncGenerator[EngineChoice, None]:
        assert wait_s() >= 0.0
        life, told = self.life, attempt.token_ids[0]
        self.visits.append(told)
        await asyncio.sleep(0)
        if self.gone:
            raise EngineUnreachable("refused")
        if told in self.answers:
            raise RequestFailed(self.answers[told])
        for _ in range(self.slow):
            await asyncio.sleep(0)
        while len(self.visits) < self.gathers:  # noqa: ASYNC110 - of a fake
            await asyncio.sleep(0)
        for made in range(1, attempt.sampling_params.max_tokens + 1):
            await asyncio.sleep(0)
            if not self.dead and len(attempt.token_ids) + made > self.poison.get(told, 1 << 30):
                self.dead, self.deaths, self.life = True, self.deaths + 1, self.life + 1
            if self.breaks:
                self.breaks -= 1
                raise EngineLost("reset")
            if self.dead or life != self.life:
                raise EngineLost("the stream ended early")
            token = len(attempt.token_ids) + made
            finish = "length" if made == attempt.sampling_params.max_tokens else None
            yield EngineChoice([token], _Logprobs([TokenLogprob(token, -1.0)]), finish)

    def close(self) -> None:
        pass

    async def became(self) -> Change:
        if self.silences:
            return self.silences.pop()
        return Change.PROCESS if self.dead or self.served_life != self.life else Change.NONE

    process = frozenset[str]()

    async def describe(self, guest_of: SlotId | None) -> EngineDescription:
        return EngineDescription(vocabulary=self.vocabulary)

    async def switch(self, *_: Any, **__: Any) -> EngineDescription:
        self.served_life = self.life
        return EngineDescription(vocabulary=self.vocabulary)

    async def vllm_version(self) -> str:
        return "0"

    def forget(self) -> None:
        pass


class Cluster:
    def __init__(
        self,
        engines: int,
        *,
        poison: dict[int, int],
        places: int = 4,
        blame: BlamePolicy | None = None,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or MonotonicClock()
        versions = VersionPolicy.from_config({"min_dedicated": 1})
        registry, routing = registry_of(JOB, versions=versions), RoutingPolicy(RoutingConfig())
        dispatcher = Dispatcher(routing, registry, clock, queue_s=60, queued=asyncio.Event())
        log = DecisionLog(None, versions, {}, max_bytes=1 << 16, now=0.0)
        self.blame = RequestBlame()
        self.blame.policy = blame or BlamePolicy(quiet_s=0, held_s=0)
        metrics = GatewayMetrics()
        self.fleet = EngineFleet(registry, dispatcher, self.blame, log, metrics, clock, update_s=1)
        self.probing = EngineProbing(self.fleet, self.blame, clock)
        self.runner = TurnRunner(
            self.fleet,
            self.probing,
            dispatcher,
            self.blame,
            metrics,
            clock,
            timeouts=Timeouts(),
            max_attempts=8,
        )
        self.ledger = TurnLedger(JOB)
        self.clients = [Client(poison) for _ in range(engines)]
        self.members = []
        for index, client in enumerate(self.clients):
            engine = Engine(
                engine=EngineId(f"e{index}"),
                kind=EngineKind.DEDICATED,
                url="",
                concurrency=places,
                numerics="n",
            )
            given: Any = client
            self.members.append(self.fleet.add(engine, given))
        self.fleet.switching.observe(JobActivated(job=JOB))

    async def serve(
        self, name: str, prompt: tuple[int, ...], tokens: int
    ) -> tuple[Turn, RefuseTurn | None]:
        sampling = SamplingParams(max_tokens=tokens)
        request = GenerateRequest(request_id=name, token_ids=prompt, sampling_params=sampling)
        turn = self.ledger.open(request, trajectory=TrajectoryId(name))
        assert turn is not None
        return turn, await self.runner.run(turn, on_tokens=None)

    async def restart_engines(self) -> None:
        while True:
            for member, client in zip(self.members, self.clients, strict=True):
                if not member.up and not client.gone:
                    self.probing.answered(member, await client.became())
                    client.dead, client.served_life = False, client.life
            for _ in range(5):
                await asyncio.sleep(0)

    async def run(self, *turns: Any) -> list[tuple[Turn, RefuseTurn | None]]:
        restarting = asyncio.create_task(self.restart_engines())
        try:
            async with asyncio.timeout(30):
                return await asyncio.gather(*turns)
        finally:
            restarting.cancel()
            await asyncio.gather(restarting, return_exceptions=True)
            await self.fleet.close()


@example(engines=1, others=4, at=24, places=3, arrives=0)
@settings(max_examples=30, deadline=None)
@given(
    engines=st.integers(1, 5),
    others=st.integers(0, 14),
    at=st.integers(0, 25),
    places=st.integers(1, 6),
    arrives=st.integers(0, 14),
)
def test_one_poisoned_request_costs_two_engines_and_its_neighbours_all_end(
    engines: int, others: int, at: int, places: int, arrives: int
) -> None:
    async def case() -> None:
        cluster = Cluster(engines, poison={99: 2 + at}, places=places)
        turns = [cluster.serve(f"good{n}", (n,), 20 + n) for n in range(others)]
        turns.insert(min(arrives, others), cluster.serve("bad", (99, 1), 40))
        ended = await cluster.run(*turns)
        assert sum(client.deaths for client in cluster.clients) <= 2
        for turn, refused in ended:
            if turn.request.request_id == "bad":
                assert turn.outcome == "failed"
                assert "failed twice" in turn.fault
                assert (refused is None) == bool(turn.token_ids)
            else:
                assert turn.finish_reason is FinishReason.LENGTH, turn.fault
                start = len(turn.request.token_ids)
                wanted = turn.request.sampling_params.max_tokens
                assert turn.token_ids == list(range(start + 1, start + 1 + wanted))

    asyncio.run(case())


@pytest.mark.parametrize("unanswered", [1, 3])
def test_a_poisoned_request_costs_two_engines_also_if_they_are_silent_first(
    unanswered: int,
) -> None:
    async def case() -> None:
        cluster = Cluster(4, poison={99: 5}, blame=BlamePolicy(quiet_s=0, held_s=0.1))
        for client in cluster.clients:
            client.silences = [Change.UNKNOWN] * unanswered
        turns = [cluster.serve(f"good{n}", (n,), 20) for n in range(6)]
        (bad, _), *served = await cluster.run(cluster.serve("bad", (99, 1), 40), *turns)
        assert bad.outcome == "failed"
        assert sum(client.deaths for client in cluster.clients) == 2
        assert {turn.finish_reason for turn, _ in served} == {FinishReason.LENGTH}

    asyncio.run(case())


class SlowClock:
    """A slow machine's: time passes from one reading to the next."""

    def __init__(self, reading_s: float) -> None:
        self._reading_s, self._now_s = reading_s, 0.0

    def now(self) -> float:
        self._now_s += self._reading_s
        return self._now_s


@pytest.mark.parametrize("reading_s", [0.03 + 0.01 * n for n in range(12)])
def test_a_verdict_that_falls_due_between_two_readings_of_the_clock_is_spoken(
    reading_s: float,
) -> None:
    async def case() -> None:
        blame = BlamePolicy(quiet_s=0, held_s=0.6)
        cluster = Cluster(4, poison={99: 2}, blame=blame, clock=SlowClock(reading_s))
        ((bad, _),) = await cluster.run(cluster.serve("bad", (99, 1), 40))
        assert bad.outcome == "failed"
        assert "failed twice" in bad.fault
        assert sum(client.deaths for client in cluster.clients) == 2

    asyncio.run(case())


@pytest.mark.parametrize(("engines", "others"), [(1, 0), (1, 6), (3, 0), (3, 9)])
@pytest.mark.parametrize("unanswered", [0, 2])
def test_streams_that_break_and_engines_that_are_silent_cost_no_turn(
    engines: int, others: int, unanswered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: none of the engines dies."""
    monkeypatch.setattr(attempt_runner, "_ABORTED_PAUSE_S", 0.0)
    monkeypatch.setattr(repeated_deaths, "HELD_S", 0.0)

    async def case() -> None:
        cluster = Cluster(engines, poison={})
        for client in cluster.clients:
            client.breaks, client.silences = 12, [Change.UNKNOWN] * unanswered
        ended = await cluster.run(*(cluster.serve(f"t{n}", (n,), 12) for n in range(others + 1)))
        assert {turn.finish_reason for turn, _ in ended} == {FinishReason.LENGTH}
        assert cluster.blame.policy.idle
        assert cluster.ledger.counters.lost == 0

    asyncio.run(case())


def test_turns_of_an_engine_that_stays_silent_go_on_together_once_nothing_can_be_proven() -> None:
    """One by one, a thousand of them would take minutes."""

    async def case() -> None:
        blame = BlamePolicy(quiet_s=0, held_s=0.1)
        cluster = Cluster(2, poison={}, places=40, blame=blame)
        silent, other = cluster.clients
        silent.breaks, silent.silences = 40, [*[Change.UNKNOWN] * 1_000_000, Change.NONE]
        other.gathers = 30
        turns = [cluster.serve(f"t{n}", (n,), 6) for n in range(30)]
        ended = await cluster.run(*turns)
        assert {turn.finish_reason for turn, _ in ended} == {FinishReason.LENGTH}
        assert silent.breaks < 40

    asyncio.run(case())


def test_samples_of_one_poisoned_prompt_that_come_one_after_another_cost_two_engines() -> None:
    async def case() -> None:
        cluster = Cluster(2, poison={99: 2}, places=2)

        async def group() -> tuple[Turn, RefuseTurn | None]:
            for n in range(8):
                last = await cluster.serve(f"bad{n}", (99, 1), 10)
                assert last[1] is not None
                assert last[1].refusal is Refusal.REQUEST
            return last

        await cluster.run(group())
        assert sum(client.deaths for client in cluster.clients) == 2

    asyncio.run(case())


def test_a_request_that_no_engine_saw_is_blamed_for_none() -> None:
    """Engines that were stopped while they had nothing to do."""

    async def case() -> None:
        cluster = Cluster(4, poison={})
        for client in cluster.clients[:3]:
            client.gone = True
        ((turn, _),) = await cluster.run(cluster.serve("r", (1,), 4))
        assert turn.finish_reason is FinishReason.LENGTH
        assert cluster.blame.policy.idle

    asyncio.run(case())


def test_an_engine_gets_no_ids_beyond_its_vocabulary() -> None:
    """A turn may be older than the first known vocabulary."""

    async def case() -> None:
        cluster = Cluster(1, poison={})
        cluster.clients[0].vocabulary = 64
        with pytest.raises(RequestRefused, match="knows 64 token ids"):
            await cluster.run(cluster.serve("r", (64,), 4))
        assert cluster.clients[0].visits == []
        assert cluster.ledger.counters.failed == 1

    asyncio.run(case())


@settings(max_examples=20, deadline=None)
@given(engines=st.integers(2, 5), others=st.integers(0, 9))
def test_a_request_that_engines_answer_with_a_failure_visits_two_and_harms_none(
    engines: int, others: int
) -> None:
    async def case() -> None:
        cluster = Cluster(engines, poison={}, places=4)
        for client in cluster.clients:
            client.answers[99] = "HTTP 500: cannot"
        turns = [cluster.serve(f"good{n}", (n,), 30) for n in range(others)]
        ended = await cluster.run(cluster.serve("bad", (99,), 4), *turns)
        assert sum(client.visits.count(99) for client in cluster.clients) == 2
        assert max(client.visits.count(99) for client in cluster.clients) == 1
        assert ended[0][0].outcome == "failed"
        assert [turn.finish_reason for turn, _ in ended[1:]] == [FinishReason.LENGTH] * others
        assert cluster.ledger.counters.migrated == 0

    asyncio.run(case())


def test_an_engine_that_dies_of_itself_under_every_turn_costs_no_turn() -> None:
    """Engines restarted one after another, faster than the turns end."""

    async def case() -> None:
        cluster = Cluster(3, poison={}, places=8)

        async def restarts() -> tuple[Turn, RefuseTurn | None]:
            for round_ in range(6):
                for _ in range(40 * (CLEARED_TOKENS + 1)):
                    await asyncio.sleep(0)
                cluster.clients[round_ % 3].life += 1
            return await cluster.serve("last", (1,), 1)

        turns = [cluster.serve(f"t{n}", (n,), 400) for n in range(12)]
        ended = await cluster.run(restarts(), *turns)
        assert [turn.finish_reason for turn, _ in ended] == [FinishReason.LENGTH] * 13

    asyncio.run(case())


@settings(max_examples=12, deadline=None)
@given(restarts=st.permutations([0, 1, 2]), gaps=st.lists(st.integers(0, 25), min_size=3))
def test_engines_that_are_restarted_together_cost_no_turn(
    restarts: list[int], gaps: list[int]
) -> None:
    """Groups of samples that wait for a slow first token."""

    async def case() -> None:
        blame = BlamePolicy(quiet_s=0.3, held_s=0)
        cluster = Cluster(3, poison={}, places=8, blame=blame)
        for client in cluster.clients:
            client.slow = 12

        async def restart() -> tuple[Turn, RefuseTurn | None]:
            for engine, gap in zip(restarts, gaps, strict=False):
                for _ in range(gap):
                    await asyncio.sleep(0)
                cluster.clients[engine].life += 1
            return await cluster.serve("last", (9,), 1)

        turns = [cluster.serve(f"t{n}", (n % 2,), 6) for n in range(16)]
        ended = await cluster.run(restart(), *turns)
        assert [(turn.finish_reason, turn.fault) for turn, _ in ended] == (
            [(FinishReason.LENGTH, "")] * 17
        )

    asyncio.run(case())


def test_a_turn_with_tokens_does_not_end_by_the_verdict_on_its_prompt() -> None:
    async def case() -> None:
        cluster = Cluster(2, poison={})
        request = GenerateRequest(
            request_id="r", token_ids=(1,), sampling_params=SamplingParams(max_tokens=20)
        )
        turn = cluster.ledger.open(request, trajectory=TrajectoryId("r"))
        assert turn is not None

        def restart() -> None:
            if len(turn.token_ids) == 5:
                blame = cluster.blame.policy
                failed(blame, A, turn.content)
                blame.placed(turn.content, B)
                failed(blame, B, turn.content)
                assert blame.quarantined(turn.content, now=0)
                for client in cluster.clients:
                    client.life += 1

        async def one() -> tuple[Turn, RefuseTurn | None]:
            return turn, await cluster.runner.run(turn, on_tokens=restart)

        await cluster.run(one())
        assert turn.attempts == 2
        assert turn.finish_reason is FinishReason.LENGTH, turn.fault

    asyncio.run(case())


def test_a_prompt_under_which_engines_die_late_is_blamed_whatever_it_has_made_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each engine dies long after the rule for quick deaths has cleared the request."""
    monkeypatch.setattr(repeated_deaths, "HELD_S", 0.0)
    monkeypatch.setattr(repeated_deaths, "RESTART_BURST_S", 0.0)

    async def case() -> None:
        cluster = Cluster(5, poison={}, places=2)
        bad = cluster.ledger.open(
            GenerateRequest(
                request_id="bad", token_ids=(9,), sampling_params=SamplingParams(max_tokens=400)
            ),
            trajectory=TrajectoryId("bad"),
        )
        assert bad is not None
        made = 0

        def kill() -> None:
            nonlocal made
            made += 1
            if made % 20 == 0:
                for client, member in zip(cluster.clients, cluster.members, strict=True):
                    client.life += any(running.turn is bad for running in member.running)

        async def one() -> tuple[Turn, RefuseTurn | None]:
            return bad, await cluster.runner.run(bad, on_tokens=kill)

        others = [cluster.serve(f"good{n}", (n,), 200) for n in range(4)]
        (blamed, _), *served = await cluster.run(one(), *others)
        assert blamed.finish_reason is FinishReason.ABORT
        assert "engines died under this prompt" in blamed.fault
        assert blamed.attempts < 8
        assert {turn.finish_reason for turn, _ in served} == {FinishReason.LENGTH}

    asyncio.run(case())
