import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from examples.grpo.environment import LINE_TOKENS, Line, Task, TaskShape
from examples.grpo.rollout import (
    RolloutCollector,
    StepBatch,
    TrajectoryLedger,
    sampled_tokens,
)
from examples.grpo.vocabulary import STOP_ID, digit_of
from harvester.contracts.errors import Exhausted, PeerProtocolError
from harvester.contracts.ids import EngineId, TrajectoryId, WeightVersion
from harvester.contracts.wire.rollouts import (
    Choice,
    FinishReason,
    GenerateRequest,
    Logprobs,
    SamplingParams,
    Span,
    TokenLogprob,
    VersionPin,
)
from tests.virtual_clock import VirtualClock

SHAPE = TaskShape(prompts_per_step=4)
TASKS = [Task(SHAPE, 1, 0, i) for i in range(4)]
SAMPLES = 3
STARTED = len(TASKS) * SAMPLES


def right_line(context: tuple[int, ...]) -> tuple[int, ...]:
    """A flawless player's line, read from the context alone: the tool's last word."""
    context = context[: len(context) - context[::-1].index(STOP_ID)]
    digits = [digit_of(token_id) or 0 for token_id in context]
    hops, turn = digits[2], context.count(STOP_ID) // 2
    key = tuple(digits[-11:-1])
    line = Line(turn=turn + 1, left=hops - turn, key=key, is_answer=turn == hops)
    return line.ids()


class Player:
    """A gateway with one engine that plays without flaw."""

    def __init__(self, engine: str = "e0") -> None:
        self.engine = engine
        self.asked: list[tuple[GenerateRequest, TrajectoryId]] = []
        self.open = 0
        self.open_max = 0

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        trajectory: str,
        request_id: str,
        weight_version: int,
    ) -> Choice:
        request = GenerateRequest(
            request_id=request_id,
            token_ids=tuple(token_ids),
            sampling_params=sampling,
            weight_version=VersionPin(exact=WeightVersion(weight_version)),
        )
        self.asked.append((request, TrajectoryId(trajectory)))
        self.open += 1
        self.open_max = max(self.open_max, self.open)
        for _ in range(Random(request.request_id).randrange(5)):
            await asyncio.sleep(0)
        self.open -= 1
        return self.choice(request)

    def choice(self, request: GenerateRequest) -> Choice:
        written = len(request.token_ids) - 1 - request.token_ids[::-1].index(STOP_ID)
        begun = len(request.token_ids) - 1 - written
        rest = right_line(request.token_ids)[begun:]
        return self.said(request, rest[: request.sampling_params.max_tokens])

    def said(
        self,
        request: GenerateRequest,
        token_ids: tuple[int, ...],
        reason: FinishReason = FinishReason.STOP,
    ) -> Choice:
        version = request.weight_version.exact
        assert version is not None
        return Choice(
            token_ids=token_ids,
            logprobs=Logprobs(tuple(TokenLogprob(i, -0.25) for i in token_ids)),
            finish_reason=reason,
            spans=(
                Span(
                    start=0,
                    end=len(token_ids),
                    version=version,
                    engine=EngineId(self.engine),
                    numerics="n",
                ),
            ),
        )


async def test_a_trainer_that_starts_again_asks_under_other_ids() -> None:
    """A gateway keeps a turn's answer by its id, and refuses or repeats it to the next run."""
    first, again = Player(), Player()
    await collected(first)
    await collected(again)
    assert len(first.asked) == len(again.asked)
    ids = [{request.request_id for request, _ in run.asked} for run in (first, again)]
    assert not ids[0] & ids[1]


class Aborting(Player):
    """Gives at most seven tokens at a time, each time from another engine."""

    def choice(self, request: GenerateRequest) -> Choice:
        self.engine = f"e{len(self.asked) % 3}"
        whole = super().choice(request)
        if len(whole.token_ids) <= 7:
            return whole
        return self.said(request, whole.token_ids[:7], FinishReason.ABORT)


async def collected(
    gateway: Player, *, seed: int = 5, slept: list[float] | None = None
) -> StepBatch:
    async def sleep(seconds: float) -> None:
        if slept is not None:
            slept.append(seconds)
        await asyncio.sleep(0)

    collector = RolloutCollector(
        gateway,
        job="job",
        seed=seed,
        samples_per_prompt=SAMPLES,
        clock=VirtualClock(),
        sleep=sleep,
    )
    return await collector.collect(TASKS, step=0, version=9)


async def test_a_flawless_player_earns_everything_on_every_trajectory() -> None:
    batch = await collected(Player())
    assert [one.reward for one in batch.trajectories] == [1.0] * STARTED
    assert batch.turns == SAMPLES * sum(task.hops + 1 for task in TASKS)
    assert batch.rollout_tokens == LINE_TOKENS * batch.turns
    assert batch.tokens_by_engine == {"e0": batch.rollout_tokens}
    lengths = sum(len(one.token_ids) for one in batch.trajectories)
    assert batch.prefill_tokens == lengths - batch.rollout_tokens


async def test_every_trajectory_is_started_and_ends_once() -> None:
    ledger = (await collected(Player())).ledger
    assert (ledger.started, ledger.completed, ledger.lost, ledger.duplicated) == (
        STARTED,
        STARTED,
        0,
        0,
    )


async def test_all_trajectories_run_at_the_same_time() -> None:
    gateway = Player()
    await collected(gateway)
    assert gateway.open_max > STARTED // 2
    assert len({trajectory for _, trajectory in gateway.asked}) == STARTED


async def test_every_turn_pins_the_version_and_has_a_seed_of_its_own() -> None:
    gateway = Player()
    await collected(gateway)
    assert {request.weight_version.exact for request, _ in gateway.asked} == {WeightVersion(9)}
    seeds = [request.sampling_params.seed for request, _ in gateway.asked]
    assert len(set(seeds)) == len(seeds)
    again, other = Player(), Player()
    await collected(again)
    await collected(other, seed=6)
    assert sorted(map(str, seeds)) == sorted(str(r.sampling_params.seed) for r, _ in again.asked)
    assert not set(seeds) & {request.sampling_params.seed for request, _ in other.asked}


async def test_progress_is_reported_with_every_ended_trajectory() -> None:
    told: list[float] = []
    collector = RolloutCollector(
        Player(),
        job="job",
        seed=5,
        samples_per_prompt=SAMPLES,
        clock=VirtualClock(),
        sleep=lambda _seconds: asyncio.sleep(0),
        on_progress=told.append,
    )
    await collector.collect(TASKS, step=0, version=9)
    assert told == sorted(told)
    assert len(told) == STARTED
    assert told[-1] == 1.0


async def test_tool_latencies_are_waited_for_once_per_call() -> None:
    slept: list[float] = []
    await collected(Player(), slept=slept)
    assert len(slept) == SAMPLES * sum(task.hops for task in TASKS)
    assert min(slept) > 0


async def test_the_batch_does_not_depend_on_the_serving_engine() -> None:
    one, other = await collected(Player("dedicated")), await collected(Player("harvested"))
    assert [t.token_ids for t in one.trajectories] == [t.token_ids for t in other.trajectories]
    assert [t.reward for t in one.trajectories] == [t.reward for t in other.trajectories]
    assert [(t.prompt_index, t.sample_index) for t in one.trajectories] == sorted(
        (t.prompt_index, t.sample_index) for t in one.trajectories
    )


async def test_an_aborted_turn_goes_on_from_the_tokens_it_has() -> None:
    whole, cut = await collected(Player()), await collected(Aborting())
    assert [t.token_ids for t in cut.trajectories] == [t.token_ids for t in whole.trajectories]
    assert cut.rollout_tokens == whole.rollout_tokens
    assert sum(cut.tokens_by_engine.values()) == cut.rollout_tokens
    assert cut.ledger.migrated == STARTED
    assert whole.ledger.migrated == 0


async def test_a_turn_that_is_always_aborted_loses_only_its_trajectory() -> None:
    class Stuck(Player):
        def choice(self, request: GenerateRequest) -> Choice:
            if "-p1-k0-" in request.request_id:
                return self.said(request, (), FinishReason.ABORT)
            return super().choice(request)

    batch = await collected(Stuck())
    assert batch.ledger.lost == 1
    assert batch.ledger.completed == len(batch.trajectories) == STARTED - 1


async def test_losing_every_trajectory_is_an_error() -> None:
    class Gone(Player):
        def choice(self, request: GenerateRequest) -> Choice:
            raise Exhausted("nothing serves")

    with pytest.raises(Exhausted, match="all 12"):
        await collected(Gone())


async def test_tokens_beyond_the_request_lose_the_trajectory() -> None:
    class Talkative(Player):
        def choice(self, request: GenerateRequest) -> Choice:
            if "-p2-k1-" in request.request_id:
                return self.said(request, (5,) * (LINE_TOKENS + 1))
            return super().choice(request)

    assert (await collected(Talkative())).ledger.lost == 1


def test_a_token_that_no_span_covers_has_no_version() -> None:
    span = Span(start=1, end=2, version=WeightVersion(4), engine=EngineId("e"), numerics="n")
    content = tuple(TokenLogprob(i, -0.5) for i in (7, 8, 9))
    tokens = sampled_tokens(Choice(token_ids=(7, 8, 9), logprobs=Logprobs(content), spans=(span,)))
    assert [(t.token_id, t.engine, t.version) for t in tokens] == [
        (7, "", 0),
        (8, "e", 4),
        (9, "", 0),
    ]


def test_log_probabilities_of_other_tokens_are_refused() -> None:
    content = (TokenLogprob(7, -0.5),)
    with pytest.raises(PeerProtocolError):
        sampled_tokens(Choice(token_ids=(8,), logprobs=Logprobs(content)))


def test_a_trajectory_that_completes_twice_is_counted_and_not_learned_from() -> None:
    ledger = TrajectoryLedger()
    assert ledger.complete(TrajectoryId("a"))
    assert not ledger.complete(TrajectoryId("a"))
    assert (ledger.completed, ledger.duplicated) == (1, 1)
